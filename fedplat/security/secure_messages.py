"""What secure aggregation says in Flower messages: their types, and the fields of their one record.

Node ids have 64 bits without sign, more than a record's integers hold: lists of them travel as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import ConfigRecord, RecordDict

from .masking import ProtocolError, Session
from .secure_member import Peer

RECORD = "fedplat.secure-aggregation"
"""The record that carries the protocol, in questions, answers and training messages, and a client's state."""

ACTIONS = ("secure_keys", "secure_shares", "secure_unmask")
KEYS, SHARES, UNMASK = (f"query.{action}" for action in ACTIONS)
"""Message types of the questions."""

MASKED = "masked"
"""The name of the one array of a masked reply."""

TOKEN_BYTES = 16
"""Length of the token that is drawn for a session."""

_ID_BYTES = 8


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return node ids as bytes, eight for each.

    >>> unpack_ids(pack_ids([3, 2**64 - 1]))
    (3, 18446744073709551615)
    """
    return b"".join(node_id.to_bytes(_ID_BYTES, "big") for node_id in ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Return the node ids of bytes; raises ProtocolError for a length that is not a multiple of eight."""
    if len(data) % _ID_BYTES:
        raise ProtocolError("a list of node ids is cut off")
    return tuple(int.from_bytes(data[i : i + _ID_BYTES], "big") for i in range(0, len(data), _ID_BYTES))


def record_of(content: RecordDict) -> ConfigRecord:
    """Return the protocol's record of a message; raises ProtocolError if it has none."""
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise ProtocolError("the message is not one of secure aggregation")
    return record


def bytes_in(record: ConfigRecord, name: str) -> bytes:
    """Return a field of bytes; raises ProtocolError if it is missing or something else."""
    value = record.get(name)
    if not isinstance(value, bytes):
        raise ProtocolError(f"'{name}' is missing")
    return value


def list_in(record: ConfigRecord, name: str) -> list[bytes]:
    """Return a field that is a list of bytes, likewise."""
    value = record.get(name)
    if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
        raise ProtocolError(f"'{name}' is missing")
    return value  # type: ignore[return-value]


def number_in(record: ConfigRecord, name: str) -> float:
    """Return a field that is a number, likewise."""
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ProtocolError(f"'{name}' is missing")
    return value


def session_fields(session: Session) -> dict[str, bytes | int]:
    """Return the fields that name a session."""
    return {"session": session.token, "round": session.server_round}


def session_in(record: ConfigRecord) -> Session:
    """Return the session that a record names; raises ProtocolError if it does not name one."""
    token, number = bytes_in(record, "session"), int(number_in(record, "round"))
    if len(token) != TOKEN_BYTES or number < 0:
        raise ProtocolError("the session is not one")
    return Session(token, number)


def peer_fields(peers: Sequence[Peer]) -> dict[str, bytes | list[bytes]]:
    """Return the fields that list members with their public keys."""
    return {
        "ids": pack_ids([peer.node_id for peer in peers]),
        "encryption-keys": [peer.encryption_key for peer in peers],
        "mask-keys": [peer.mask_key for peer in peers],
    }


def peers_in(record: ConfigRecord) -> tuple[Peer, ...]:
    """Return the members that a record lists; raises ProtocolError for lists of different lengths."""
    ids = unpack_ids(bytes_in(record, "ids"))
    encryption, masks = list_in(record, "encryption-keys"), list_in(record, "mask-keys")
    if not len(ids) == len(encryption) == len(masks):
        raise ProtocolError("the list of members is cut off")
    return tuple(Peer(*three) for three in zip(ids, encryption, masks, strict=True))
