"""A client signs what it sends, so that the server knows whose reply it is and that nobody changed it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedplat.compat import make_message
from fedplat.errors import UserError
from fedplat.security.signatures import occasion_of, read_private_key, sign, simulation_key

KeyOf = Callable[[Context], Ed25519PrivateKey]


class SigningMod:
    """Signs training replies with the client's Ed25519 key, where the server asks for it.

    ``key`` is the client's key, or a function that returns it for a context. What is signed is the run, the
    round, the node, the server's challenge and everything in the reply; see
    :func:`fedplat.security.signatures.statement`. The server asks by a challenge, which
    :class:`fedplat.strategies.SignedUpdates` puts into its messages. To be the outermost mod, so that what is
    signed is what is sent. Errors, evaluation and replies to servers that do not ask pass as they are.

        app = ClientApp(mods=[SigningMod.from_node_config()])
    """

    def __init__(self, key: Ed25519PrivateKey | KeyOf) -> None:
        if isinstance(key, Ed25519PrivateKey):
            # Its bytes, since the object itself cannot be copied to the processes of a simulation.
            self._key_of: KeyOf = partial(_same_key, key.private_bytes_raw())
        elif callable(key):
            self._key_of = key
        else:
            what = "an Ed25519PrivateKey or a function that returns one for a context"
            raise UserError(f"a signing key is {what}, not {type(key).__name__}")

    @classmethod
    def from_node_config(cls, entry: str = "signing-key") -> Self:
        """Return a mod that reads the key from the PEM file which the node's configuration names.

        A client without that entry, or whose file is no Ed25519 key, answers with an error that says so.
        """
        return cls(partial(_key_from_file, entry))

    @classmethod
    def for_simulation(cls, seed: int) -> Self:
        """Return a mod whose keys follow from the seed and the partition; they protect nothing.

        See :func:`fedplat.security.signatures.simulation_key`.
        """
        return cls(partial(_key_of_partition, seed))

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client and sign its reply."""
        occasion = occasion_of(message)
        if occasion is None or message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        key = self._key_of(context)  # before training, which would be in vain without it
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        return make_message(reply.metadata, sign(reply.content, occasion, key))


def _same_key(raw: bytes, context: Context) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(raw)


def _key_from_file(entry: str, context: Context) -> Ed25519PrivateKey:
    path = context.node_config.get(entry)
    if not isinstance(path, str) or not path:
        raise UserError(
            f"this client has no signing key: start it with --node-config '{entry}=\"/path/to/key.pem\"'"
        )
    return read_private_key(path)


def _key_of_partition(seed: int, context: Context) -> Ed25519PrivateKey:
    partition = context.node_config.get("partition-id")
    if not isinstance(partition, int):
        raise UserError("keys for a simulation need a partition-id in the node's configuration")
    return simulation_key(seed, partition)
