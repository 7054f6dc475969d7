"""Signed updates: around any strategy, a reply counts only if a registered client's key signed it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat.compat import make_message
from fedplat.errors import UserError
from fedplat.security.signatures import (
    CHALLENGE,
    CHALLENGE_BYTES,
    Occasion,
    PublicKey,
    identity_of,
    read_public_keys,
    verified,
)
from fedplat.security.validation import ReplyRefused, refusal

from .composed import FederatedStrategy
from .wrapper import StrategyWrapper, innermost

log = logging.getLogger("fedplat")


class SignedUpdates(StrategyWrapper):
    """Lets a strategy see only replies that registered clients signed, with a fresh challenge each round.

    ``keys`` are the registered public keys, or a folder of ``NAME.pub`` files; see
    :func:`fedplat.security.signatures.read_public_keys`. A folder is read again before every round, unless
    nothing in it can be read, which is warned of. The clients sign with
    :class:`fedplat.clients.mods.signing.SigningMod`. Of several wrappers this one is the outermost, since it
    has to see what the clients sent.

    Refused, with the reason, is a reply that is not signed or by a key not registered, whose arrays, metrics
    or settings were changed, or that was made for another run, round, message or node. A node is bound to the
    key it first signed with, and the other way round:

    - another key is taken from a node only once its own is no longer registered: rules meet a new client;
    - a key of another node is taken only when that node is no longer connected, for instance because its
      client registered anew: rules then remember the client, whose key is its identity, under its new node;
    - two nodes that come with one key in the same round are both refused, unless it is bound to one of them.

    The strategy's ``identities`` are set accordingly; what a client calls itself plays no part. A refused
    reply counts against the node's own key, never against the key that the reply names. Evaluation is not
    signed; it changes no model.

    Raises UserError for keys that cannot be read.
    """

    def __init__(self, strategy: Strategy, keys: str | Path | Iterable[PublicKey]) -> None:
        super().__init__(strategy)
        self._folder = Path(keys) if isinstance(keys, str | Path) else None
        self._registered = read_public_keys(keys)
        self._key_of: dict[int, bytes] = {}
        self._asked: dict[int, Occasion] = {}
        self._online: Set[int] = frozenset()

    @property
    def names(self) -> dict[int, str]:
        """The registered names of the nodes whose keys are known so far; empty where a key was withdrawn."""
        return {node: self._registered.get(key, "") for node, key in self._key_of.items()}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages with a record that asks for a signature."""
        self._read_folder_again()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._online = frozenset(grid.get_node_ids())
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        question = ConfigRecord({"challenge": challenge, "server-round": server_round})
        self._asked = {}
        # By the identity of the old contents, which are kept so that no new one gets the same.
        contents: dict[int, tuple[RecordDict, RecordDict]] = {}
        asking = []
        for message in messages:
            meta, old = message.metadata, message.content
            if id(old) not in contents:
                contents[id(old)] = old, _with(old, question)
            asking.append(make_message(meta, contents[id(old)][1]))
            self._asked[meta.dst_node_id] = Occasion(
                meta.run_id, meta.message_type, server_round, meta.dst_node_id, challenge
            )
        return asking

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Verify every reply and let the inner strategy combine those that stand; errors pass untouched."""
        coming = list(replies)
        signed: dict[int, bytes] = {}
        refused: dict[int, str] = {}
        for index, message in enumerate(coming):
            if message.has_content():
                try:
                    signed[index] = self._signer(message)
                except ReplyRefused as error:
                    refused[index] = str(error)
        refused |= self._objections({i: coming[i].metadata.src_node_id for i in signed}, signed)
        for index, key in signed.items():
            if index not in refused:
                self._bind(coming[index].metadata.src_node_id, key)
        self._tell_identities()
        for index, reason in refused.items():
            log.info("reply of node %d refused: %s", coming[index].metadata.src_node_id, reason)
            coming[index] = refusal(coming[index], reason)
        return super().aggregate_train(server_round, coming)

    def own_state(self) -> dict[str, Any]:
        """Return which node signs with which key."""
        return {"keys": {node: key.hex() for node, key in self._key_of.items()}}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Put back which node signs with which key."""
        self._key_of = {node: bytes.fromhex(key) for node, key in state["keys"].items()}
        self._tell_identities()

    def _signer(self, message: Message) -> bytes:
        occasion = self._asked.get(message.metadata.src_node_id)
        if occasion is None:
            raise ReplyRefused("the node was not asked in this round")
        return verified(message.content, occasion, self._registered.keys())

    def _objections(self, nodes: Mapping[int, int], signed: Mapping[int, bytes]) -> dict[int, str]:
        """Return, by index, why validly signed replies are not let through; in whatever order they came."""
        users: dict[bytes, set[int]] = {}
        keys: dict[int, set[bytes]] = {}
        for index, key in signed.items():
            users.setdefault(key, set()).add(nodes[index])
            keys.setdefault(nodes[index], set()).add(key)
        found: dict[int, str] = {}
        answered: set[int] = set()
        for index, key in signed.items():
            node = nodes[index]
            if reason := self._objection(node, key, users[key], len(keys[node])):
                found[index] = reason
            elif node in answered:
                found[index] = "a second reply to one message"
            else:
                answered.add(node)
        return found

    def _objection(self, node: int, key: bytes, users: Set[int], keys: int) -> str:
        own = self._key_of.get(node)
        if own == key:
            return ""
        name = self._registered[key]
        owner = next((n for n, k in self._key_of.items() if k == key), None)
        if owner is not None and (owner in self._online or owner in users):
            return f"signed with the key '{name}' of node {owner}, which is connected"
        if own in self._registered:
            return f"changed its key: '{self._registered[own]}' before, now '{name}'"
        if len(users) > 1:
            return f"{len(users)} nodes signed with the key '{name}' in one round"
        return "signed with several keys in one round" if keys > 1 else ""

    def _bind(self, node: int, key: bytes) -> None:
        self._key_of = {n: k for n, k in self._key_of.items() if k != key or n == node}
        self._key_of[node] = key

    def _tell_identities(self) -> None:
        inner = innermost(self.strategy)
        if isinstance(inner, FederatedStrategy):
            inner.identities = {node: identity_of(key) for node, key in self._key_of.items()}

    def _read_folder_again(self) -> None:
        if self._folder is None:
            return
        try:
            self._registered = read_public_keys(self._folder)
        except UserError as error:
            log.warning("the keys registered before stay in use: %s", error)


def _with(content: RecordDict, question: ConfigRecord) -> RecordDict:
    new = RecordDict()
    for name, record in content.items():
        new[name] = record
    new[CHALLENGE] = question
    return new
