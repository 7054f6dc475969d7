"""Masks of secure aggregation: keys, sealed shares, and keystreams as elements of a ring.

A mask is the ChaCha20 keystream of a key of its own, read as unsigned integers. Flower's mask generator folds
a seed to 32 bits and feeds it to a Mersenne Twister, so anyone can try all masks; it is not used here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Ring = NDArray[np.uint32] | NDArray[np.uint64]

KEY_BYTES = 32

_NONCE_BYTES = 12
_CHUNK_BYTES = 1 << 18  # a chunk of keystream and what it is added to stay in a core's cache
_TAG = b"fedplat secure aggregation 1 "


class ProtocolError(ValueError):
    """A step of secure aggregation that must not be taken, with the reason."""


@dataclass(frozen=True)
class Session:
    """One round of secure aggregation: a random token drawn for it by the server, and its number.

    Every key is derived for one session, one purpose and one pair of nodes, so nothing said in one of them
    means anything in another.
    """

    token: bytes
    server_round: int

    def info(self, purpose: bytes, *node_ids: int) -> bytes:
        """Return what a key is bound to; every part has a fixed length."""
        ids = b"".join(node_id.to_bytes(8, "big") for node_id in node_ids)
        return b"".join([_TAG, purpose, b" ", self.token, self.server_round.to_bytes(8, "big"), ids])


# Keys ------------------------------------------------------------------------------------------------------


def new_private_key() -> bytes:
    """Return a fresh X25519 private key, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """Return the public key, 32 bytes, of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def pair_key(private: bytes, public: bytes, info: bytes) -> bytes:
    """Return the key that the owners of two key pairs share; the same 32 bytes for both.

    Raises ProtocolError for a public key that would give everybody the same result.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise ProtocolError("a public key is not valid") from error
    return derived(secret, info)


def derived(secret: bytes, info: bytes) -> bytes:
    """Return a key, 32 bytes, derived from a secret for one purpose: HKDF-SHA256."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def commitment(seed: bytes, info: bytes) -> bytes:
    """Return 32 bytes by which a random seed is recognised, and which tell nothing else of it."""
    return hashlib.sha256(info + seed).digest()


# Sealed messages -------------------------------------------------------------------------------------------


def seal(key: bytes, plain: bytes, info: bytes) -> bytes:
    """Return a message encrypted by ChaCha20-Poly1305, 28 bytes longer, under a fresh random nonce.

    Keys are used for one message. The nonce is random all the same: should a message be written twice since
    the first was lost, a fixed one would give both away.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, info)


def unseal(key: bytes, sealed: bytes, info: bytes) -> bytes | None:
    """Return the message, or None if it is not what the owner of the key wrote for this purpose."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], info)
    except (InvalidTag, ValueError):
        return None


# Masks -----------------------------------------------------------------------------------------------------


def add_mask(vector: Ring, key: bytes, subtract: bool = False) -> None:
    """Add the mask of a key to a vector (d,) of ring elements in place, or subtract it; sums wrap around.

    A key must serve one mask only.

    >>> vector = np.array([1, 2, 3], np.uint32)
    >>> add_mask(vector, bytes(32))
    >>> add_mask(vector, bytes(32), subtract=True)
    >>> vector.tolist()
    [1, 2, 3]
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    size = _CHUNK_BYTES // vector.itemsize
    little = vector.dtype.newbyteorder("<")  # the same mask on every machine
    mask = np.empty(size, little)
    combine = np.subtract if subtract else np.add
    for start in range(0, len(vector), size):
        part = vector[start : start + size]
        raw = mask.data.cast("B")[: part.nbytes]
        stream.update_into(_zeros()[: part.nbytes], raw)
        combine(part, mask[: len(part)], out=part)


def add_pair_masks(vector: Ring, node_id: int, keys: Iterable[tuple[int, bytes]], undo: bool = False) -> None:
    """Add a node's masks with each of some peers in place, given as (peer, key); or take them away again.

    Of two nodes the one with the lower id adds the mask and the other subtracts it, so that the sum of both
    vectors is free of it.
    """
    for peer, key in keys:
        add_mask(vector, key, subtract=(node_id > peer) != undo)


@lru_cache(maxsize=1)
def _zeros() -> memoryview:
    return memoryview(bytes(_CHUNK_BYTES))
