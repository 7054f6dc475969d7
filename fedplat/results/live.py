"""The page about a run or a table, served to browsers on this machine while its folder grows."""

from __future__ import annotations

import errno
import hashlib
import html
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import UserError
from .folder import RunFolder, without_nan

LOCAL = "127.0.0.1"
_NAMES = frozenset({"localhost", LOCAL})
_KEPT = (".jsonl", ".toml", ".json")
_REST, _LONGEST_REST = 3.0, 10.0
"""Data that took long to put together is put together again after so many times that long, or seconds."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_WAITING = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';
 connect-src 'self'; img-src data:">
<link rel="icon" href="data:,">
<title>fedplat: waiting</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 40rem; padding: 0 1rem }}
</style>
</head>
<body>
<h1>Waiting</h1>
<p id="what" role="status">{text}</p>
<script>
setInterval(async () => {{
  try {{
    const answer = await fetch("data.json");
    const told = await answer.json();
    if (told.waiting === undefined) location.reload();
    else document.getElementById("what").textContent = told.waiting;
  }} catch (error) {{
    document.getElementById("what").textContent = "fedplat watch has ended.";
  }}
}}, 2000);
</script>
</body>
</html>
"""


class Tail:
    """The complete lines of a file of JSON lines that grows; what was read once is not read again.

    A file that was written anew, as when a run goes on from its last checkpoint, is read from the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._offset = 0
        self._file = -1
        self.bytes_read = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows there are now; the list is the caller's own, the rows are not."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._rows, self._offset, self._file = [], 0, found.st_ino
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            self._rows, self._offset, self._file = [], 0, -1
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self.bytes_read += len(whole)
        self._rows += [json.loads(line) for line in whole.splitlines()]
        self._offset += len(whole)
        return list(self._rows)


class FollowedRun(RunFolder):
    """A run folder whose records are read as they are added."""

    def __init__(self, path: Path, config: Any, environment: dict[str, Any]) -> None:
        super().__init__(path, config, environment)
        self._tails: dict[Path, Tail] = {}

    def rounds(self, strategy: str) -> list[dict[str, Any]]:
        """Return the rounds of a strategy so far."""
        return self._rows(strategy, "rounds.jsonl")

    def clients(self, strategy: str) -> Iterator[dict[str, Any]]:
        """Yield the client rows of a strategy so far."""
        return iter(self._rows(strategy, "clients.jsonl"))

    def edges(self, strategy: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a strategy's edge servers so far."""
        return iter(self._rows(strategy, "edges.jsonl"))

    def refresh(self) -> None:
        """Look again at what is not added to but replaced: the environment, and which strategies are done."""
        self.environment = json.loads((self.path / "environment.json").read_text())
        self.finished = all(self.log(name).finished for name in self.config.strategies)

    def _rows(self, strategy: str, name: str) -> list[dict[str, Any]]:
        path = self.log(strategy).path / name
        return self._tails.setdefault(path, Tail(path)).rows()


@dataclass(frozen=True)
class Answer:
    """What a request gets: a body, its type, and a tag that changes when the body does."""

    body: bytes
    kind: str
    etag: str

    @classmethod
    def of(cls, text: str, kind: str) -> Answer:
        """Return an answer with this text."""
        body = text.encode()
        return cls(body, f"{kind}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:24]}"')


class Followed:
    """A folder that is followed: of a run, of a table, or one that is not there yet.

    Everything is put together again only when a file in the folder has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._seen: object = None
        self._run: tuple[object, FollowedRun] | None = None
        self._data: dict[str, Any] = {}
        self._answer = Answer.of("{}", "application/json")
        self._not_before = 0.0

    def data(self) -> Answer:
        """Return what the page polls: its data as JSON, or ``{"waiting": why}``."""
        with self._lock:
            self._refresh()
            return self._answer

    def page(self) -> Answer:
        """Return the page."""
        from .page import page_html

        with self._lock:
            self._refresh()
            if waiting := self._data.get("waiting"):
                return Answer.of(_WAITING.format(text=html.escape(waiting)), "text/html")
            return Answer.of(page_html(self._data, live=True), "text/html")

    def _refresh(self) -> None:
        if time.monotonic() < self._not_before:
            return
        seen = _signature(self.folder)
        if seen == self._seen:
            return
        began = time.monotonic()
        data = self._read()
        if "waiting" in data and self._data and "waiting" not in self._data:
            data = self._data  # what was there is still worth looking at
        self._data = data
        text = json.dumps(without_nan(data), separators=(",", ":"), allow_nan=False)
        self._answer, self._seen = Answer.of(text, "application/json"), seen
        took = time.monotonic() - began
        self._not_before = time.monotonic() + (min(_REST * took, _LONGEST_REST) if took > 1.0 else 0.0)

    def _read(self) -> dict[str, Any]:
        from .page import is_table, page_data, table_data

        try:
            if (self.folder / "config.toml").exists():
                return page_data([self._followed_run()])
            if (self.folder / "cells").is_dir() and not (self.folder / "table.json").exists():
                return {"waiting": _unwritten_table(self.folder)}
            if is_table(self.folder):
                return table_data(self.folder)
        except UserError as error:
            return {"waiting": str(error)}
        if not self.folder.exists():
            return {
                "waiting": f"There is no {self.folder} yet. As soon as a run starts there, it is shown here."
            }
        return {
            "waiting": f"{self.folder} holds no run and no table yet. As soon as it does, it is shown here."
        }

    def _followed_run(self) -> FollowedRun:
        source = self.folder / "config.toml"
        found = source.stat()
        identity = (found.st_ino, found.st_mtime_ns)
        if self._run is None or self._run[0] != identity:
            run = FollowedRun.existing(self.folder)
            assert isinstance(run, FollowedRun)
            self._run = identity, run
        self._run[1].refresh()
        return self._run[1]


def _unwritten_table(folder: Path) -> str:
    done, rounds = (sum(1 for _ in folder.glob(f"cells/*/*/{name}")) for name in ("model.pt", "rounds.jsonl"))
    return (
        f"The table in {folder} is not written yet; so far {done} of its runs are done and {rounds - done} "
        f"begun. It is shown here as soon as there is a table.json."
    )


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when a run or a table writes something that the page shows."""
    found: list[tuple[str, int, int]] = []
    for parent, inner, files in os.walk(folder):
        inner[:] = sorted(name for name in inner if name != "tensorboard")
        for name in sorted(files):
            if (name.endswith(_KEPT) or name == "model.pt") and not name.startswith("."):
                path = os.path.join(parent, name)
                try:
                    status = os.stat(path)
                except FileNotFoundError:
                    continue
                found.append((path, status.st_mtime_ns, status.st_size))
    return tuple(found)


class PageServer(ThreadingHTTPServer):
    """Serves ``/`` and ``/data.json`` of one folder on the loopback address, to requests for this machine."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.followed = Followed(folder)
        try:
            super().__init__((LOCAL, port), _Handler)
        except OverflowError:
            raise UserError(f"--port {port}: expected a number from 0 (any that is free) to 65535") from None
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            why = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by you"
            raise UserError(f"--port {port}: it {why}; --port {next_free_port(port)} is free") from None

    @property
    def address(self) -> str:
        """Return the address of the page."""
        return f"http://localhost:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away in the middle of an answer."""


def next_free_port(port: int) -> int:
    """Return the first free port after one, 0 (the system chooses) if the next hundred are taken."""
    for candidate in range(max(port, 1023) + 1, min(max(port, 1023) + 100, 65535) + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            try:
                trial.bind((LOCAL, candidate))
            except OSError:
                continue
            return candidate
    return 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: PageServer

    def do_GET(self) -> None:
        """Answer a request."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer a request without the body."""
        self._answer()

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "fedplat"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no log."""

    def _answer(self) -> None:
        # A page elsewhere whose name was made to point to this machine has its own name in Host.
        if _host_name(self.headers.get("Host", "")) not in _NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, "open this page as localhost or 127.0.0.1")
            return
        wanted = {"/": self.server.followed.page, "/data.json": self.server.followed.data}
        if (make := wanted.get(self.path.partition("?")[0])) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there are / and /data.json")
            return
        try:
            answer = make()
        except Exception as error:
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
            return
        if answer.etag in self.headers.get("If-None-Match", ""):
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": answer.etag})
            return
        self._send(HTTPStatus.OK, answer.body, {"ETag": answer.etag, "Content-Type": answer.kind})

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, f"{why}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> _host_name("localhost:8765"), _host_name("127.0.0.1"), _host_name("evil.example:8765")
    ('localhost', '127.0.0.1', 'evil.example')
    """
    return host.strip().lower().rpartition(":")[0] if ":" in host else host.strip().lower()
