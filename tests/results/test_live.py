"""The server of ``fedplat watch``, asked over HTTP, and what it reads of a growing folder."""

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedplat.cli import main
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.live import FollowedRun, PageServer, Tail, next_free_port

from . import client_record, make_run, round_record


@pytest.fixture
def _small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is quick to make: its data are the rounds."""
    page = ModuleType("fedplat.results.page")

    def page_data(runs: Sequence[RunFolder]) -> dict[str, Any]:
        return {name: len(runs[0].rounds(name)) for name in runs[0].config.strategies}

    page.__dict__["page_data"] = page_data
    page.__dict__["page_html"] = lambda data, live: f"<title>{json.dumps(data)}, {live}</title>"
    page.__dict__["is_table"] = lambda folder: (folder / "table.json").exists()
    page.__dict__["table_data"] = lambda folder: json.loads((folder / "table.json").read_text())
    monkeypatch.setitem(sys.modules, "fedplat.results.page", page)


@contextmanager
def serving(folder: Path) -> Iterator[PageServer]:
    with PageServer(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"localhost:{server.server_port}", **headers}.items():
            if value:
                connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def data_of(server: PageServer) -> dict[str, Any]:
    status, _, body = ask(server, "/data.json")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


@pytest.mark.usefixtures("_small_page")
def test_a_folder_is_followed_from_before_it_is_there_to_its_last_round(tmp_path: Path) -> None:
    with serving(tmp_path / "run") as server:
        assert "There is no" in data_of(server)["waiting"]
        assert b"There is no" in ask(server, "/")[2]
        folder = make_run(tmp_path / "run", {"mean": [], "median": []}, finished=False)
        assert data_of(server) == {"mean": 0, "median": 0}
        for number in range(3):
            folder.log("mean").append(round_record(number, 0.1), [client_record(number, 0)])
            assert data_of(server) == {"mean": number + 1, "median": 0}
        folder.log("mean").rewind(1)
        assert data_of(server) == {"mean": 2, "median": 0}
        assert ask(server, "/")[2] == b'<title>{"mean": 2, "median": 0}, True</title>'


@pytest.mark.usefixtures("_small_page")
def test_a_folder_without_a_run_says_so_and_a_table_is_shown_as_one(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "holds no run and no table yet" in data_of(server)["waiting"]
        make_run(tmp_path / "cells" / "a", {"mean": [0.1]})
        make_run(tmp_path / "cells" / "b", {"median": [0.1]}, finished=False)
        assert "1 of its runs are done and 1 begun" in data_of(server)["waiting"]
        (tmp_path / "table.json").write_text('{"cells": 3}')
        assert data_of(server) == {"cells": 3}


@pytest.mark.usefixtures("_small_page")
def test_what_was_shown_stays_when_the_folder_goes_away(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1]}, finished=False)
    with serving(folder.path) as server:
        assert data_of(server) == {"mean": 1}
        folder.path.rename(tmp_path / "elsewhere")
        assert data_of(server) == {"mean": 1}


@pytest.mark.usefixtures("_small_page")
def test_the_reason_why_a_folder_cannot_be_shown_is_told_as_text(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "<b>"\nrounds = 0\n')
    with serving(tmp_path) as server:
        assert "rounds" in data_of(server)["waiting"]
        page = ask(server, "/")[2].decode()
    assert "<b>" not in page
    assert "rounds" in page


@pytest.mark.usefixtures("_small_page")
def test_data_that_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1]}, finished=False)
    with serving(folder.path) as server:
        _, headers, _ = ask(server, "/data.json")
        tag = headers["ETag"]
        status, headers, body = ask(server, "/data.json", If_None_Match=tag)
        assert (status, body, headers["ETag"]) == (304, b"", tag)
        folder.log("mean").append(round_record(1, 0.2), [])
        status, headers, body = ask(server, "/data.json", If_None_Match=tag)
        assert (status, json.loads(body)) == (200, {"mean": 2})
        assert headers["ETag"] != tag


@pytest.mark.usefixtures("_small_page")
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "192.168.0.7", "", "localhost.evil.example"]
)
def test_a_request_under_another_hosts_name_is_refused(tmp_path: Path, host: str) -> None:
    with serving(tmp_path) as server:
        for path in ("/", "/data.json"):
            assert ask(server, path, Host=host)[0] == 403


@pytest.mark.usefixtures("_small_page")
def test_only_this_machine_is_served_under_either_of_its_names(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        for host in ("localhost", "LOCALHOST:1", f"127.0.0.1:{server.server_port}"):
            assert ask(server, "/", Host=host)[0] == 200


@pytest.mark.usefixtures("_small_page")
@pytest.mark.parametrize(
    "path",
    [
        "/config.toml",
        "/../secret",
        "/%2e%2e/secret",
        "/data.json/..",
        "/..//data.json",
        "/mean/rounds.jsonl",
        "*",
    ],
)
def test_nothing_but_the_page_and_its_data_is_there(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = make_run(tmp_path / "run", {"mean": [0.1]})
    with serving(folder.path) as server:
        status, _, body = ask(server, path)
    assert status == 404
    assert b"secret" not in body


@pytest.mark.usefixtures("_small_page")
def test_other_methods_are_refused_and_head_has_no_body(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert ask(server, "/", "POST")[0] == 501
        status, headers, body = ask(server, "/data.json?now=1", "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0
        assert headers["X-Frame-Options"] == "DENY"


@pytest.mark.usefixtures("_small_page")
def test_a_fault_is_told_and_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", {"mean": [0.1]})
    page = sys.modules["fedplat.results.page"]
    with serving(tmp_path / "run") as server:
        with monkeypatch.context() as broken:
            broken.setattr(page, "page_data", lambda runs: 1 / 0)
            status, _, body = ask(server, "/data.json")
            assert (status, body) == (500, b"ZeroDivisionError: division by zero\n")
        assert data_of(server) == {"mean": 1}
    assert "Traceback" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_with_one_that_is_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: it is in use; --port \d+ is free") as told:
            PageServer(tmp_path, port)
        free = next_free_port(port)
        assert f"--port {free} is free" in str(told.value)
        PageServer(tmp_path, free).server_close()


def test_lines_are_read_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"round": 0}\n{"rou')
    assert tail.rows() == [{"round": 0}]
    with path.open("a") as file:
        file.write('nd": 1}\n')
    assert tail.rows() == [{"round": 0}, {"round": 1}]
    assert tail.rows() == [{"round": 0}, {"round": 1}]
    assert tail.bytes_read == path.stat().st_size
    other = tmp_path / "other"
    other.write_text('{"round": 0}\n{"round": 7}\n{"round": 8}\n')
    other.replace(path)
    assert tail.rows() == [{"round": 0}, {"round": 7}, {"round": 8}]
    path.unlink()
    assert tail.rows() == []


def test_a_followed_run_has_the_same_records_as_one_that_is_read_whole(tmp_path: Path) -> None:
    rows = [client_record(1, client) for client in range(4)]
    whole = make_run(tmp_path / "run", {"mean": [0.1, 0.5]}, clients={"mean": rows}, finished=False)
    followed = FollowedRun.existing(whole.path)
    assert followed.rounds("mean") == whole.rounds("mean")
    assert list(followed.clients("mean")) == list(whole.clients("mean")) == rows
    assert list(followed.edges("mean")) == []


def test_the_real_page_and_its_data_are_served(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1], "median": []}, finished=False)
    with serving(folder.path) as server:
        assert data_of(server)["status"]["done"] == {"mean": 0, "median": 0}
        folder.log("mean").append(round_record(1, 0.4), [client_record(1, n) for n in range(4)])
        assert data_of(server)["status"]["done"] == {"mean": 1, "median": 0}
        page = ask(server, "/")[2].decode()
    assert page.lower().startswith("<!doctype html>")
    assert "data-live" in page


@pytest.mark.slow
def test_an_open_page_follows_the_run_and_keeps_how_its_table_is_sorted(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    path = tmp_path / "run"
    troubles: list[str] = []
    with serving(path) as server, playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser)
        page = chromium.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda told: troubles.append(told.text) if told.type == "error" else None)
        page.goto(server.address)
        assert "There is no" in page.inner_text("#what")
        folder = make_run(path, {"mean": [0.1, 0.5], "median": [0.1, 0.7]}, finished=False)
        page.wait_for_selector("#status b:has-text('running')", timeout=60_000)
        order = "[...document.querySelectorAll('#tables tbody th')].map(head => head.innerText)"
        page.locator("#tables th button").nth(1).click()
        page.wait_for_selector("#tables th[aria-sort]")
        sort = page.get_attribute("#tables th[aria-sort]", "aria-sort")
        assert len(page.evaluate(order)) == 2
        for number, accuracy in ((2, 0.8), (3, 0.9), (4, 0.95)):
            folder.log("mean").append(round_record(number, accuracy), [])
            folder.log("median").append(round_record(number, accuracy / 2), [])
        page.wait_for_selector("#tables td:has-text('95.00')", timeout=60_000)
        assert page.get_attribute("#tables th[aria-sort]", "aria-sort") == sort
        first = "mean" if sort == "descending" else "median"
        assert page.evaluate(order)[0].startswith(first)
        for name in ("mean", "median"):
            folder.log(name).save_model({})
        page.wait_for_selector("#status b:text-is('finished')", timeout=60_000)
        chromium.close()
    assert troubles == []


def test_ctrl_c_ends_the_command_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedplat", "watch", str(tmp_path / "later"), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://localhost:" in line
    port = int(line.split("http://localhost:")[1].split("/")[0])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")


def test_a_taken_port_is_a_mistake_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PageServer(tmp_path, 0) as server:
        assert main(["watch", str(tmp_path), "--port", str(server.server_port), "--no-open"]) == 2
    assert "is in use" in capsys.readouterr().err
