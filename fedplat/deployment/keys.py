"""Key pairs of a federation, and writing secrets so that nobody else can ever read them.

Two kinds: the key by which the SuperLink knows a SuperNode (an elliptic curve key on NIST P-384, in OpenSSH
format, which is what Flower reads), and the Ed25519 key with which a client signs its updates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from ..errors import UserError

NodeKey = ec.EllipticCurvePrivateKey
SigningKey = ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey

PRIVATE, PUBLIC, EXECUTABLE = 0o600, 0o644, 0o755
_MARK = b"PRIVATE KEY-----"


def make_node_key() -> NodeKey:
    """Return a fresh P-384 key for a SuperNode or a certificate."""
    return ec.generate_private_key(ec.SECP384R1())


def make_signing_key() -> SigningKey:
    """Return a fresh Ed25519 key for signing updates."""
    return ed25519.Ed25519PrivateKey.generate()


def openssh_private(key: NodeKey) -> bytes:
    """Return a private key in OpenSSH format, the only one in which a SuperNode takes its key."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def pem_private(key: NodeKey | SigningKey) -> bytes:
    """Return a private key as PKCS#8 in PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def openssh_line(key: PublicKey, name: str) -> bytes:
    """Return a public key as one OpenSSH line that ends with ``name`` as its comment.

    >>> openssh_line(make_signing_key().public_key(), "supernode-0").split()[0::2]
    [b'ssh-ed25519', b'supernode-0']
    """
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()


def fingerprint(key: PublicKey) -> bytes:
    """Return bytes that two keys share only if they are the same key."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def read_node_key(path: Path) -> NodeKey:
    """Read a SuperNode's private key; raises UserError if it is not an OpenSSH elliptic curve key."""
    return _read(
        path, ec.EllipticCurvePrivateKey, load_ssh_private_key, "an EC private key in OpenSSH format"
    )


def read_pem_key(path: Path) -> NodeKey:
    """Read the private key of a certificate; raises UserError if it is not an elliptic curve key in PEM."""
    return _read(path, ec.EllipticCurvePrivateKey, load_pem_private_key, "an EC private key in PEM")


def read_signing_key(path: Path) -> SigningKey:
    """Read a private signing key; raises UserError if it is not Ed25519 in PEM."""
    return _read(path, ed25519.Ed25519PrivateKey, load_pem_private_key, "an Ed25519 private key in PEM")


def read_node_public(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a SuperNode's public key; raises UserError if it is not an OpenSSH line of an EC key."""
    what = "an EC public key as an OpenSSH line"
    return _read(path, ec.EllipticCurvePublicKey, _load_line, what)


def read_signing_public(path: Path) -> ed25519.Ed25519PublicKey:
    """Read a public signing key; raises UserError if it is not an OpenSSH line of an Ed25519 key."""
    what = "an Ed25519 public key as an OpenSSH line"
    return _read(path, ed25519.Ed25519PublicKey, _load_line, what)


def read_file(path: Path) -> bytes:
    """Return a file's bytes; raises UserError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a folder that only its owner can enter, and its parents; one that is there stays as it is."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot make the folder: {error.strerror or error}") from error


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that must not exist yet, with its final permissions from the first moment on.

    Raises UserError if there is something under that name: keys are never overwritten.
    """
    try:
        # No O_TRUNC, and the mode is given here: a later chmod would leave a moment for others to open it.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise UserError(f"{path} exists already, and nothing is ever overwritten") from error
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror or error}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def stray_private_keys(folder: Path, allowed: Iterable[str]) -> list[Path]:
    """Return the files of a machine's folder that hold a private key and are not among ``allowed`` names."""
    expected = {folder / name for name in allowed}
    return sorted(
        path
        for path in (*folder.glob("*"), *folder.glob("*-keys/*"))
        if path not in expected and path.is_file() and path.stat().st_size < 65536 and _holds_key(path)
    )


def _holds_key(path: Path) -> bool:
    try:
        return _MARK in path.read_bytes()
    except OSError:
        return False


def _load_line(content: bytes, _: None) -> Any:
    return load_ssh_public_key(content)


def _read(path: Path, kind: Any, load: Callable[[bytes, None], Any], what: str) -> Any:
    try:
        key = load(read_file(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: expected {what}") from error
    if not isinstance(key, kind):
        raise UserError(f"{path}: expected {what}, found {type(key).__name__.lstrip('_')}")
    return key
