"""Signed replies: what is signed, with which keys, and what it takes to believe a signature.

A client signs a *statement*: a byte string of who it is, what it was asked, and everything that it answers,
so that nobody between client and strategy can change, repeat or swap a reply. The server knows what the
statement has to be; the copy that travels with the reply only serves to tell what differs.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_public_key
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from ..arrays import peek
from ..errors import UserError
from .validation import ReplyRefused

log = logging.getLogger("fedplat")

SIGNATURE = "fedplat.signature"
"""Name of the record of a signed reply: ``key`` (32 bytes), ``signature`` (64 bytes) and ``statement``."""

CHALLENGE = "fedplat.challenge"
"""Name of the record by which the server asks for a signature: ``challenge`` and ``server-round``."""

CHALLENGE_BYTES = 16
KEY_BYTES = 32
TAG = b"fedplat signed update 1"
_FIELDS = ("form", "run", "kind of message", "round", "node", "challenge", "arrays")
_SHOWN = 60  # characters of another party's text in a reason

PublicKey = Ed25519PublicKey | bytes | str


# What is signed --------------------------------------------------------------------------------------------


def packed(*parts: bytes) -> bytes:
    """Join byte strings, each behind its length in 8 bytes, little-endian: no two lists give the same bytes.

    >>> packed(b"ab", b"").hex(" ", -8)
    '0200000000000000 6162000000000000 0000'
    """
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def unpacked(data: bytes) -> list[bytes]:
    """Take apart what :func:`packed` joined; raises ValueError for anything else.

    >>> unpacked(packed(b"ab", b""))
    [b'ab', b'']
    """
    parts, position = [], 0
    while position < len(data):
        start = position + 8
        stop = start + int.from_bytes(data[position:start], "little")
        if stop > len(data):
            raise ValueError("a part is shorter than its length says")
        parts.append(data[start:stop])
        position = stop
    return parts


@dataclass(frozen=True)
class Occasion:
    """What a reply answers, and by whom: the run, the kind of message, the round, the node, the challenge.

    The challenge is what makes it fresh: the server draws it anew for every round.
    """

    run_id: int
    message_type: str
    server_round: int
    node_id: int
    challenge: bytes

    def encode(self) -> bytes:
        """Return the first fields of a statement; whole numbers are written in decimal."""
        return packed(
            TAG,
            str(self.run_id).encode(),
            self.message_type.encode(),
            str(self.server_round).encode(),
            str(self.node_id).encode(),
            self.challenge,
        )


def occasion_of(message: Message) -> Occasion | None:
    """Return what a client has to sign besides its content, or None if the server asks for no signature."""
    asked = message.content.get(CHALLENGE) if message.has_content() else None
    if not isinstance(asked, ConfigRecord):
        return None
    challenge, server_round = asked.get("challenge"), asked.get("server-round")
    if not isinstance(challenge, bytes) or not isinstance(server_round, int):
        return None
    meta = message.metadata
    return Occasion(meta.run_id, meta.message_type, server_round, meta.dst_node_id, challenge)


def array_digest(content: RecordDict) -> bytes:
    """Return SHA-256 over all arrays: record and array names, types, shapes and little-endian C-order bytes.

    Neither their order nor their byte order, memory order or serialisation matters. One pass, without a copy
    of arrays that are little-endian and contiguous. Raises ValueError for arrays that are not plain numbers.
    """
    digest = hashlib.sha256()
    for name, record in sorted(content.items()):
        if not isinstance(record, ArrayRecord):
            continue
        digest.update(packed(name.encode(), str(len(record)).encode()))
        for array_name in sorted(record):
            array = peek(record[array_name])
            dtype = array.dtype.newbyteorder("<")
            shape = ",".join(map(str, array.shape))
            digest.update(packed(array_name.encode(), dtype.str.encode(), shape.encode()))
            digest.update(_raw(array.astype(dtype, copy=False)).data)
    return digest.digest()


def statement(occasion: Occasion, content: RecordDict) -> bytes:
    """Return what is signed: occasion, digest of the arrays, and every metric and setting of the reply.

    :func:`packed` fields: the tag, run id, message type, round, node id, challenge, array digest, then for
    every value of the other records, by name, the packed (record, kind, key, value). Raises ValueError for
    arrays that are not plain numbers.
    """
    return occasion.encode() + packed(array_digest(content), *_values(content))


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _values(content: RecordDict) -> Iterator[bytes]:
    for name, record in sorted(content.items()):
        if isinstance(record, ArrayRecord) or name == SIGNATURE:
            continue
        kind = b"metrics" if isinstance(record, MetricRecord) else b"config"
        if not record:
            yield packed(name.encode(), kind)
        for key, value in sorted(record.items()):
            yield packed(name.encode(), kind, key.encode(), _value(value))


def _value(value: object) -> bytes:
    """Return a value behind a letter for its type, so that 1, 1.0, True and "1" all differ."""
    if isinstance(value, list):
        return b"l" + packed(*map(_value, value))
    if isinstance(value, bool):
        return b"?1" if value else b"?0"
    if isinstance(value, int):
        return b"i" + str(value).encode()
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + value.encode()
    if isinstance(value, bytes):
        return b"b" + value
    raise ValueError(f"a value of type {type(value).__name__} cannot be signed")


# Signing and verifying -------------------------------------------------------------------------------------


def sign(content: RecordDict, occasion: Occasion, key: Ed25519PrivateKey) -> RecordDict:
    """Return new content: the same records and a signature of them; one that was there is replaced."""
    said = statement(occasion, content)
    proof = {"key": key.public_key().public_bytes_raw(), "signature": key.sign(said), "statement": said}
    signed = RecordDict()
    for name, record in content.items():
        if name != SIGNATURE:
            signed[name] = record
    signed[SIGNATURE] = ConfigRecord(dict(proof))
    return signed


def verified(content: RecordDict, occasion: Occasion, registered: Collection[bytes]) -> bytes:
    """Return the key (32 bytes) that signed this content on this occasion.

    Raises ReplyRefused, with what is wrong, unless that is a registered one. The arrays are read last: what
    is not signed at all costs next to nothing.
    """
    key, signature, said = _proof(content)
    if key not in registered:
        raise ReplyRefused(f"signed with a key that is not registered: {fingerprint(key)}")
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, said)
    except (InvalidSignature, ValueError) as error:
        raise ReplyRefused(f"the signature is not one of the key {fingerprint(key)}") from error
    if not said.startswith(occasion.encode()):
        raise ReplyRefused(_difference(said, occasion.encode()))
    try:
        expected = statement(occasion, content)
    except Exception as error:  # whatever an unreadable array raises, it concerns this reply alone
        raise ReplyRefused(f"its content cannot be read: {error}") from error
    if said != expected:
        raise ReplyRefused(_difference(said, expected))
    return key


def _proof(content: RecordDict) -> tuple[bytes, bytes, bytes]:
    record = content.get(SIGNATURE)
    if record is None:
        raise ReplyRefused("the reply is not signed")
    if isinstance(record, ConfigRecord) and record.keys() == {"key", "signature", "statement"}:
        key, signature, said = record["key"], record["signature"], record["statement"]
        if (
            isinstance(key, bytes)
            and len(key) == KEY_BYTES
            and isinstance(signature, bytes)
            and isinstance(said, bytes)
        ):
            return key, signature, said
    raise ReplyRefused("the signature's record does not hold a key, a signature and a statement")


def _difference(said: bytes, expected: bytes) -> str:
    """Say in which field a validly signed statement is not the one that is expected."""
    try:
        signed, wanted = unpacked(said), unpacked(expected)
    except ValueError:
        return "what was signed is no statement about a reply"
    if len(signed) < len(_FIELDS) or signed[0] != TAG:
        return "what was signed is no statement about a reply"
    for name, was, now in zip(_FIELDS, signed, wanted, strict=False):
        if was == now:
            continue
        if name == "arrays":
            return "the arrays are not those that were signed"
        if name == "challenge":
            return "signed for another challenge: the reply to another message"
        return f"signed for {name} {_text(was)}, not {_text(now)}"
    changed = sorted(set(signed[len(_FIELDS) :]) ^ set(wanted[len(_FIELDS) :]))
    return (
        f"'{_name_of(changed[0])}' is not what was signed" if changed else "its values were signed otherwise"
    )


def _name_of(value: bytes) -> str:
    try:
        record, _, *rest = unpacked(value)
    except ValueError:
        return "a value"
    return ".".join(map(_text, [record, *rest[:1]]))


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


# Keys ------------------------------------------------------------------------------------------------------


def raw_public_key(key: PublicKey) -> bytes:
    """Return the 32 bytes of an Ed25519 public key, given as such, as an object, or as an OpenSSH line.

    Raises UserError for anything else.
    """
    if isinstance(key, Ed25519PublicKey):
        return key.public_bytes_raw()
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key
    line = key.encode() if isinstance(key, str) else key
    allowed = "expected an Ed25519 public key: an object, 32 bytes, or a line 'ssh-ed25519 AAAA... name'"
    if not isinstance(line, bytes):
        raise UserError(f"{allowed}; found {type(key).__name__}")
    try:
        found = load_ssh_public_key(line.strip())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{allowed}; found {_text(line.strip())!r}") from error
    if not isinstance(found, Ed25519PublicKey):
        raise UserError(f"{allowed}; found a key of another kind: {_text(line.strip())!r}")
    return found.public_bytes_raw()


def read_public_keys(keys: str | Path | Iterable[PublicKey]) -> dict[bytes, str]:
    """Return the names of the registered clients by their public keys.

    ``keys`` is a folder of ``NAME.pub`` files in OpenSSH format, or the keys themselves, whose names are the
    comments of OpenSSH lines, or else fingerprints. Raises UserError for none at all, for a file that is no
    Ed25519 key, and for two names with one key: they would be one client.
    """
    if isinstance(keys, str | Path):
        pairs = [(_key_in(path), path.stem) for path in sorted(Path(keys).glob("*.pub"))]
        where = f"{keys}: no *.pub file there; expected a folder of public keys, one per client"
    else:
        pairs = [(raw_public_key(key), _comment(key)) for key in keys]
        where = "no public key given: no client could take part"
    if not pairs:
        raise UserError(where)
    registered: dict[bytes, str] = {}
    for key, name in pairs:
        name = name or fingerprint(key)
        if key in registered:
            raise UserError(f"'{registered[key]}' and '{name}' have the same public key; give each its own")
        registered[key] = name
    return registered


def read_private_key(path: str | Path) -> Ed25519PrivateKey:
    """Read a private signing key from a PEM file (PKCS#8, not encrypted).

    Warns if others than its owner may read it. Raises UserError if it is missing or another kind of key.
    """
    path = Path(path)
    try:
        data, mode = path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise UserError(f"signing key {path}: {error.strerror or error}") from error
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"signing key {path}: expected an unencrypted PEM file (PKCS#8)") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"signing key {path}: expected an Ed25519 key, found {type(key).__name__}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("signing key %s is open to others than its owner; chmod 600 %s", path, path)
    return key


def fingerprint(key: bytes) -> str:
    """Return a public key's fingerprint as ``ssh-keygen -l`` shows it.

    >>> fingerprint(bytes(32))
    'SHA256:kmYcvdi2GkPeWxB6XLjrZB8JHsy2Hm8luHMFp9GMvqk'
    """
    kind = b"ssh-ed25519"
    wire = struct.pack(">I", len(kind)) + kind + struct.pack(">I", len(key)) + key
    return "SHA256:" + base64.b64encode(hashlib.sha256(wire).digest()).decode().rstrip("=")


def identity_of(key: bytes) -> int:
    """Return the number under which rules remember the holder of a public key, whatever its node id.

    The first 8 bytes of the key's SHA-256, big-endian.

    >>> hex(identity_of(bytes(32)))
    '0x66687aadf862bd77'
    """
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


def simulation_key(seed: int, partition: int) -> Ed25519PrivateKey:
    """Return the key with which a client of a simulation signs: the same for the same seed.

    It protects nothing, since whoever knows the seed knows all keys. It lets a simulation go through the
    very steps that a deployment goes through with keys of its own.
    """
    info = packed(b"fedplat simulation signing key", str(partition).encode())
    derived = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(str(seed).encode())
    return Ed25519PrivateKey.from_private_bytes(derived)


def simulation_keys(seed: int, clients: int) -> list[Ed25519PublicKey]:
    """Return the public keys of a simulation's clients, by partition; see :func:`simulation_key`."""
    return [simulation_key(seed, partition).public_key() for partition in range(clients)]


def _key_in(path: Path) -> bytes:
    try:
        return raw_public_key(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _comment(key: PublicKey) -> str:
    if isinstance(key, Ed25519PublicKey) or (isinstance(key, bytes) and len(key) == KEY_BYTES):
        return ""
    words = (key if isinstance(key, str) else key.decode("utf-8", "replace")).split(maxsplit=2)
    return words[2].strip() if len(words) > 2 else ""
