"""The bridge between an edge's SuperNode and its server: who is let in, and what if one side ends."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedplat.deployment import edge_bridge
from fedplat.deployment.edge_bridge import (
    ADDRESS,
    SECRET,
    Bridge,
    NobodyError,
    Request,
    WrongSecretError,
    ask,
    make_bridge,
)
from fedplat.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(edge_bridge, "_LOOK_S", 0.02)
    monkeypatch.setattr(edge_bridge, "_HANDSHAKE_S", 1.0)
    make_bridge(tmp_path / "bridge")
    return tmp_path / "bridge"


@contextmanager
def serving(folder: Path, answer: Callable[[Request], object]) -> Iterator[Bridge]:
    with Bridge(folder) as bridge:
        thread = threading.Thread(target=lambda: [answer(request) for request in bridge.requests()])
        thread.start()
        yield bridge
    thread.join()


def echo(request: Request) -> None:
    request.answer({"said": request.header}, request.content[::-1])


def address(folder: Path) -> tuple[str, int]:
    host, _, port = (folder / ADDRESS).read_text().strip().rpartition(":")
    return host, int(port)


def test_a_message_and_its_answer_come_through_whole(folder: Path) -> None:
    content = os.urandom(3 << 20)
    with serving(folder, echo):
        header, answer = ask(folder, {"type": "train", "edge": 1}, content, timeout=10)
        assert (header, answer) == ({"said": {"type": "train", "edge": 1}}, content[::-1])
        assert ask(folder, {}, b"", timeout=10) == ({"said": {}}, b"")


def test_secret_and_address_are_for_their_owner_only_and_the_port_for_this_machine(folder: Path) -> None:
    with serving(folder, echo):
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / SECRET, folder / ADDRESS)]
        assert modes == [0o700, 0o600, 0o600]
        assert address(folder)[0] == "127.0.0.1"
    assert not (folder / ADDRESS).exists()


def test_who_has_another_secret_is_refused_and_told_so(folder: Path, tmp_path: Path) -> None:
    make_bridge(tmp_path / "other")
    asked: list[Request] = []
    with serving(folder, asked.append):
        (tmp_path / "other" / ADDRESS).write_bytes((folder / ADDRESS).read_bytes())
        with pytest.raises(WrongSecretError, match="has another secret"):
            ask(tmp_path / "other", {}, b"", timeout=10)
    assert not asked


def test_a_server_without_the_secret_gets_no_message(folder: Path) -> None:
    heard = bytearray()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(edge_bridge._HELLO + b"n" * 32)
            heard.extend(connection.recv(64))
            connection.sendall(b"p" * 32)
            heard.extend(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=[server])
        thread.start()
        (folder / ADDRESS).write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        with pytest.raises(WrongSecretError, match="does not have its secret"):
            ask(folder, {}, b"a model", timeout=10)
        thread.join()
    assert len(heard) == 64


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 64, b""])
def test_what_is_no_server_of_an_edge_is_recognised(said: bytes, folder: Path) -> None:
    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=[server])
        thread.start()
        (folder / ADDRESS).write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        with pytest.raises(NobodyError, match="is none"):
            ask(folder, {}, b"", timeout=10)
        thread.join()


def test_one_who_stays_silent_keeps_nobody_out(folder: Path) -> None:
    with serving(folder, echo), socket.create_connection(address(folder)):
        assert ask(folder, {}, b"ab", timeout=10)[1] == b"ba"


def test_without_a_server_one_is_told_how_to_start_it(folder: Path) -> None:
    with pytest.raises(NobodyError, match=r"does not run: start it with operator/serve\.sh"):
        ask(folder, {}, b"", timeout=10)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (folder / ADDRESS).write_text(f"127.0.0.1:{port}\n")
    with pytest.raises(NobodyError, match="does not run any more"):
        ask(folder, {}, b"", timeout=10)


def test_a_server_that_ends_while_it_works_is_noticed_at_once(folder: Path) -> None:
    def end(request: Request) -> None:
        request.connection.close()

    with serving(folder, end), pytest.raises(NobodyError, match="went away before it answered"):
        ask(folder, {}, b"", timeout=60)


def test_a_wait_has_an_end_and_a_late_answer_harms_nobody(folder: Path) -> None:
    late = threading.Event()

    def slowly(request: Request) -> None:
        late.wait(10)
        request.answer({}, b"late" * 1_000_000)

    with serving(folder, slowly):
        with pytest.raises(NobodyError, match=r"no answer within 0\.05 s"):
            ask(folder, {}, b"", timeout=0.05)
        late.set()
        assert ask(folder, {}, b"", timeout=10)[1][:4] == b"late"


def test_a_message_that_nobody_waits_for_any_more_is_passed_over(folder: Path) -> None:
    first, go_on, seen = threading.Event(), threading.Event(), []

    def one_by_one(request: Request) -> None:
        seen.append(request.header["n"])
        first.set()
        go_on.wait(10)
        request.answer({})

    with serving(folder, one_by_one):
        waiting = threading.Thread(target=ask, args=[folder, {"n": 1}, b""], kwargs={"timeout": 10})
        waiting.start()
        first.wait(10)
        with pytest.raises(NobodyError):
            ask(folder, {"n": 2}, b"", timeout=0.05)
        go_on.set()
        ask(folder, {"n": 3}, b"", timeout=10)
        waiting.join()
    assert seen == [1, 3]


def test_a_bridge_has_one_server(folder: Path) -> None:
    with serving(folder, echo):
        with pytest.raises(UserError, match="at work here already"):
            Bridge(folder).__enter__()
        assert ask(folder, {}, b"ab", timeout=10)[1] == b"ba"
    with serving(folder, echo):
        assert ask(folder, {}, b"ab", timeout=10)[1] == b"ba"


def test_a_file_left_by_a_server_that_was_killed_is_in_nobodys_way(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (folder / ADDRESS).write_text(f"127.0.0.1:{port}\n")
    with serving(folder, echo):
        assert ask(folder, {}, b"ab", timeout=10)[1] == b"ba"


def test_a_secret_that_others_can_read_or_guess_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / SECRET).chmod(0o640)
    with pytest.raises(UserError, match=r"others can read or change it \(mode 0640\): chmod 600"):
        Bridge(folder)
    (folder / SECRET).chmod(0o600)
    (folder / SECRET).write_text("short\n")
    with pytest.raises(UserError, match="at least 32 characters, found 5"):
        ask(folder, {}, b"", timeout=1)
    with pytest.raises(UserError, match="cannot be read"):
        Bridge(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nothing is ever overwritten"):
        make_bridge(folder)
