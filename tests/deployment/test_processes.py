"""Machines as processes: nothing outlives its end, and every wait has one. Small scripts play Flower."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from fedplat.deployment import processes
from fedplat.deployment.plan import Federation, create
from fedplat.deployment.processes import Machines
from fedplat.errors import UserError


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    monkeypatch.setattr(processes, "_POLL", 0.02)
    monkeypatch.setattr(processes, "_RUN_POLL", 0.02)
    monkeypatch.setattr(processes, "_REJOIN_PAUSE", 0.02)
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    return create(tmp_path / "fed", supernodes=2, port=unused_port())


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def play(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")


def answers(made: Federation, *replies: str) -> None:
    """Let ``flwr`` give these answers one after another, the last one for ever."""
    for number, reply in enumerate(replies):
        (made.operator / f"answer-{number}").write_text(reply)
    play(
        made.operator / "flwr.sh",
        'here=$(dirname "$0"); n=$(cat "$here/count" 2>/dev/null || echo 0)\n'
        'echo "Some words first"; cat "$here/answer-$n"\n'
        f'[ $n -ge {len(replies) - 1} ] || echo $((n + 1)) >"$here/count"',
    )


def nodes(*statuses: str) -> str:
    listed = ", ".join(f'{{"node-id": "{i + 1}", "status": "{s}"}}' for i, s in enumerate(statuses))
    return f'{{"success": true, "nodes": [{listed}]}}'


def running(mark_file: Path) -> bool:
    """Return whether the process whose id is in the file is alive."""
    try:
        stat = Path(f"/proc/{mark_file.read_text().strip()}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("gently", [True, False])
def test_a_grandchild_in_a_session_of_its_own_ends_with_its_machine(
    gently: bool, made: Federation, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    trap = "trap '' TERM" if not gently else ""
    play(
        made.supernodes[0] / "start.sh",
        f"{trap}\nsetsid sh -c 'echo $$ >{pid}; exec sleep 60' &\nsetsid sleep 60 &\nwait; wait; sleep 60",
    )
    with Machines(made.folder) as machines:
        process = machines.start("supernode-0")
        while not pid.exists() or not pid.read_text().strip():
            time.sleep(0.01)
        assert running(pid)
        mark = machines._marks["supernode-0"]
        assert len(processes._marked(mark)) >= 3
        if not gently:
            machines.kill("supernode-0")
            assert process.poll() == -9
    assert process.poll() is not None
    assert not running(pid)
    assert processes._marked(mark) == []
    assert machines.running == {}


def test_processes_end_when_the_block_is_left_by_an_error(made: Federation) -> None:
    play(made.superlink / "start.sh", "exec sleep 60")
    started = []

    def broken() -> None:
        with Machines(made.folder) as machines:
            started.append(machines.start("superlink"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert started[0].poll() is not None


def test_a_superlink_that_ends_is_told_with_its_last_words(made: Federation) -> None:
    play(made.superlink / "start.sh", "echo the data base is broken; exit 7")
    with Machines(made.folder) as machines:
        machines.start("superlink")
        with pytest.raises(UserError, match="superlink ended with exit status 7") as caught:
            machines.wait_for_superlink(30)
    assert "the data base is broken" in str(caught.value)


def test_a_superlink_that_does_not_answer_is_waited_for_no_longer_than_asked(made: Federation) -> None:
    play(made.superlink / "start.sh", "exec sleep 60")
    with Machines(made.folder, timeout=0.2) as machines:
        machines.start("superlink")
        with pytest.raises(UserError, match=r"https://localhost:.*/health does not answer"):
            machines.wait_for_superlink()


def test_the_supernodes_that_are_missing_are_named_with_their_last_words(made: Federation) -> None:
    for place in (made.superlink, *made.supernodes):
        play(place / "start.sh", f"echo I am {place.name}; exec sleep 60")
    answers(made, nodes("registered", "registered"), nodes("online", "registered"))
    with Machines(made.folder, timeout=30) as machines:
        machines.node_ids = {"supernode-0": 1, "supernode-1": 2}
        for name in ("superlink", "supernode-0", "supernode-1"):
            machines.start(name)
        machines.wait_for_supernodes(["supernode-0"])
        with pytest.raises(UserError, match=r"not online: supernode-1\b") as caught:
            machines.wait_for_supernodes(["supernode-0", "supernode-1"], 0.5)
    assert "I am supernode-1" in str(caught.value)
    assert "I am supernode-0" not in str(caught.value)


def test_a_supernode_that_is_refused_while_the_lost_one_counts_as_online_tries_again(
    made: Federation,
) -> None:
    play(made.superlink / "start.sh", "exec sleep 60")
    play(
        made.supernodes[0] / "start.sh",
        'cd "$(dirname "$0")"; echo try >>tries; [ $(wc -l <tries) -ge 3 ] || exit 1; exec sleep 60',
    )
    play(
        made.operator / "flwr.sh",
        f'sleep 0.1; if [ $(wc -l <"{made.supernodes[0]}/tries") -ge 3 ]; then s=later; else s=before; fi\n'
        'echo "{\\"success\\": true, \\"nodes\\": '
        '[{\\"node-id\\": \\"1\\", \\"status\\": \\"online\\", \\"online-at\\": \\"$s\\"}]}"',
    )
    (made.supernodes[0] / "tries").touch()
    with Machines(made.folder, timeout=30) as machines:
        machines.node_ids = {"supernode-0": 1}
        machines.start("superlink")
        assert machines.rejoin("supernode-0") == 3
    play(made.supernodes[0] / "start.sh", "echo you are not wanted; exit 1")
    with Machines(made.folder) as machines:
        machines.node_ids = {"supernode-0": 1}
        machines.start("superlink")
        with pytest.raises(UserError, match="you are not wanted"):
            machines.rejoin("supernode-0", 0.3)


def test_a_run_is_waited_for_until_it_has_ended_whatever_its_end(made: Federation) -> None:
    play(made.superlink / "start.sh", "exec sleep 60")
    runs = [
        f'{{"success": true, "runs": [{{"status": "{s}"}}]}}'
        for s in ("pending", "running", "finished:failed")
    ]
    answers(made, *runs)
    with Machines(made.folder, timeout=30) as machines:
        machines.start("superlink")
        assert machines.wait_for_run(5) == "finished:failed"
    (made.operator / "count").write_text("1")
    play(made.operator / "flwr.sh", f"echo '{runs[1]}'")
    with Machines(made.folder) as machines, pytest.raises(UserError, match="after 0 s: run 5 is running"):
        machines.wait_for_run(5, 0.1)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('echo "[code: 23] Public key already in use."', "exit status 0: .*already in use"),
        ('echo "{\\"success\\": false, \\"error-message\\": \\"no such run\\"}"; exit 1', "no such run"),
        ("echo broken >&2; exit 3", "exit status 3: broken"),
        ("exit 4", "exit status 4: nothing"),
        ("exec sleep 30", "no answer in 0 s"),
    ],
)
def test_a_flwr_command_that_fails_says_why(script: str, told: str, made: Federation) -> None:
    play(made.operator / "flwr.sh", script)
    with pytest.raises(UserError, match=told):
        Machines(made.folder, timeout=0.4).statuses()


def test_what_cannot_be_started_is_a_mistake_told(made: Federation) -> None:
    machines = Machines(made.folder)
    with pytest.raises(UserError, match=r"cannot be started: No such file"):
        machines.start("supernode-7")
    os.chmod(made.superlink / "start.sh", 0o644)
    with pytest.raises(UserError, match="cannot be started"):
        machines.start("superlink")
    play(made.supernodes[0] / "start.sh", "exec sleep 60")
    with machines:
        machines.start("supernode-0")
        with pytest.raises(UserError, match="running already"):
            machines.start("supernode-0")


def test_a_machine_may_be_started_again_after_it_ended(made: Federation) -> None:
    play(made.superlink / "start.sh", "echo again")
    with Machines(made.folder) as machines:
        for _ in range(2):
            assert machines.start("superlink").wait(30) == 0
        assert machines.log("superlink").read_text() == "again\nagain\n"


def test_scripts_are_valid_shell(made: Federation) -> None:
    for path in made.folder.rglob("*.sh"):
        subprocess.run(["sh", "-n", path], check=True)
