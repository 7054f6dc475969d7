"""The way from an edge's SuperNode to the edge's own server: two programs of one machine, over its loopback.

Flower starts a new ClientApp for every message of the cloud, while the server that knows the edge's clients
runs on. The server listens on a port of the loopback and writes it into a folder that only its owner can
enter; both sides prove to each other that they can read the ``secret`` there, before anything else is said.
What travels are lengths, JSON and Flower's own wire format, which hold data and never code.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import UserError
from .keys import PRIVATE, make_folder, write_new

log = logging.getLogger("fedplat")

SECRET, ADDRESS = "secret", "address"
_HELLO = b"fedplat edge 1\n"
_NONCE = 32
_REFUSED = b"\0" * _NONCE
_LENGTH = struct.Struct(">Q")
_HANDSHAKE_S, _STALLED_S, _LOOK_S = 10.0, 120.0, 0.5
_CHUNK = 1 << 20

Header = Mapping[str, Any]


class WrongSecretError(UserError):
    """The other side does not have the secret of this side."""


class NobodyError(UserError):
    """There is no server, or it went away."""


def make_bridge(folder: Path) -> None:
    """Make the folder of a bridge with a new secret; raises UserError if it has one."""
    make_folder(folder)
    write_new(folder / SECRET, secrets.token_hex(_NONCE).encode() + b"\n", PRIVATE)


def read_secret(folder: Path) -> bytes:
    """Return the secret; raises UserError if it is missing, too short, or others can read it."""
    path = folder / SECRET
    try:
        mode, text = path.stat().st_mode & 0o777, path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if mode & 0o077:
        raise UserError(f"{path}: others can read or change it (mode {mode:04o}): chmod 600 {path}")
    if len(text) < _NONCE:
        raise UserError(f"{path}: expected at least {_NONCE} characters, found {len(text)}")
    return text


@dataclass(frozen=True)
class Request:
    """A message that came over the bridge, to be answered once."""

    header: Header
    content: bytes
    connection: socket.socket

    @property
    def gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def answer(self, header: Header, content: bytes = b"") -> bool:
        """Send the answer and close; return whether it could be sent."""
        with contextlib.closing(self.connection):
            try:
                self.connection.settimeout(_STALLED_S)
                _send(self.connection, header, content)
            except OSError as error:
                log.warning("an answer to the cloud could not be handed over: %s", error.strerror or error)
                return False
        return True


class Bridge:
    """The server's end. Requests are taken in their order by whoever goes through :meth:`requests`.

    Connections are let in by threads of their own, so that one that stays silent keeps nobody out. Raises
    UserError if there is no secret, and on entering if a server is at work on this bridge already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._secret = read_secret(self.folder)
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._server: socket.socket | None = None
        self._closed = threading.Event()

    def __enter__(self) -> Bridge:
        if _somebody_at(self.folder, self._secret):
            raise UserError(f"{self.folder}: an edge's server is at work here already")
        self._server = socket.create_server(("127.0.0.1", 0))
        host, port = self._server.getsockname()
        # Written aside and moved, so that nobody reads half of it.
        beside = self.folder / f"{ADDRESS}.{os.getpid()}"
        beside.unlink(missing_ok=True)
        write_new(beside, f"{host}:{port}\n".encode(), PRIVATE)
        beside.replace(self.folder / ADDRESS)
        threading.Thread(target=self._accept, args=[self._server], name="edge-bridge", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; requests that wait get no answer. A second call does nothing."""
        if self._server is None or self._closed.is_set():
            return
        self._closed.set()
        (self.folder / ADDRESS).unlink(missing_ok=True)
        # Closing alone does not wake the thread that accepts.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait().connection.close()

    def requests(self) -> Iterator[Request]:
        """Yield request after request until the bridge is closed; those nobody waits for are passed over."""
        while not self._closed.is_set():
            try:
                request = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if request.gone:
                request.connection.close()
                log.warning("a message of the cloud is passed over: nobody waits for its answer")
            else:
                yield request

    def _accept(self, server: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                if not self._closed.is_set():
                    time.sleep(_LOOK_S)
                continue
            threading.Thread(target=self._let_in, args=[connection], daemon=True).start()

    def _let_in(self, connection: socket.socket) -> None:
        try:
            if _prove_as_server(connection, self._secret):
                connection.settimeout(_STALLED_S)
                self._waiting.put(Request(*_receive(connection), connection))
                return
            log.warning("somebody without the secret of %s was refused", self.folder)
        except (OSError, ValueError) as error:
            log.debug("a connection to the edge's server ended: %s", error)
        connection.close()


def ask(folder: Path, header: Header, content: bytes, *, timeout: float) -> tuple[Header, bytes]:
    """Hand a message to the server of an edge, and return its answer.

    Raises NobodyError if there is no server or it ends, or gives no answer within ``timeout`` seconds, and
    WrongSecretError if one side does not have the other's secret.
    """
    secret = read_secret(folder)
    with _connected(folder, secret) as connection:
        try:
            connection.settimeout(_STALLED_S)
            _send(connection, header, content)
            connection.settimeout(max(timeout, 0.001))
            return _receive(connection)
        except TimeoutError as error:
            raise NobodyError(f"the edge's server gave no answer within {timeout:g} s") from error
        except (OSError, ValueError) as error:
            raise NobodyError("the edge's server went away before it answered") from error


def _connected(folder: Path, secret: bytes) -> socket.socket:
    """Return a connection to the server, after both have proved themselves."""
    start = "start it with operator/serve.sh in the edge's folder"
    try:
        host, _, port = (folder / ADDRESS).read_text().strip().rpartition(":")
        connection = socket.create_connection((host, int(port)), _HANDSHAKE_S)
    except FileNotFoundError as error:
        raise NobodyError(f"the edge's server does not run: {start}") from error
    except (OSError, ValueError) as error:
        raise NobodyError(f"the edge's server does not run any more: {start}") from error
    try:
        _prove_as_client(connection, secret)
    except UserError:
        connection.close()
        raise
    except (OSError, ValueError) as error:
        connection.close()
        raise NobodyError("what listens in place of the edge's server is none") from error
    return connection


def _somebody_at(folder: Path, secret: bytes) -> bool:
    try:
        _connected(folder, secret).close()
    except NobodyError:
        return False
    except WrongSecretError:
        # A port that was the server's may be somebody else's by now.
        return False
    return True


# Who is there ------------------------------------------------------------------------------------------


def _prove_as_server(connection: socket.socket, secret: bytes) -> bool:
    connection.settimeout(_HANDSHAKE_S)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO + own)
    answer = _exactly(connection, 2 * _NONCE)
    other, proof = answer[:_NONCE], answer[_NONCE:]
    right = hmac.compare_digest(proof, _proof(secret, b"client", own, other))
    connection.sendall(_proof(secret, b"server", own, other) if right else _REFUSED)
    return right


def _prove_as_client(connection: socket.socket, secret: bytes) -> None:
    connection.settimeout(_HANDSHAKE_S)
    if _exactly(connection, len(_HELLO)) != _HELLO:
        raise ValueError("not an edge's server")
    other, own = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(own + _proof(secret, b"client", other, own))
    proof = _exactly(connection, _NONCE)
    if proof == _REFUSED:
        raise WrongSecretError("the edge's server has another secret: both need the same file 'secret'")
    if not hmac.compare_digest(proof, _proof(secret, b"server", other, own)):
        raise WrongSecretError("what listens in place of the edge's server does not have its secret")


def _proof(secret: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    # The side is part of it, or else one could be made to answer its own question.
    return hmac.digest(secret, _HELLO + side + server + client, "sha256")


# What is said ------------------------------------------------------------------------------------------


def _send(connection: socket.socket, header: Header, content: bytes) -> None:
    for part in (json.dumps(dict(header)).encode(), content):
        connection.sendall(_LENGTH.pack(len(part)))
        connection.sendall(part)


def _receive(connection: socket.socket) -> tuple[Header, bytes]:
    """Return a header and a content; raises ValueError for what is neither, and OSError."""
    header, content = (_exactly(connection, *_LENGTH.unpack(_exactly(connection, 8))) for _ in range(2))
    told = json.loads(header)
    if not isinstance(told, dict):
        raise ValueError("expected an object in front of the content")
    return told, content


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes; memory grows with what came, not with what was announced."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _CHUNK))
        if not part:
            raise ConnectionError("the other side ended")
        data += part
    return bytes(data)


__all__ = ["ADDRESS", "SECRET", "Bridge", "NobodyError", "Request", "WrongSecretError", "ask", "make_bridge"]
