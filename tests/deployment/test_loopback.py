"""A federation on this machine: TLS, keys, signed updates, a run to the end, a client killed in between.

It all happens once; the tests look at what was seen.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

import fedplat
from fedplat.deployment import processes
from fedplat.deployment.plan import add_supernodes, create
from fedplat.deployment.processes import Machines
from fedplat.deployment.settings import read_settings
from fedplat.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS, LOST_IN, LOST = 7, 3, "supernode-1"
DECAY = 0.5


@dataclass
class Story:
    """What was seen."""

    status: str = ""
    node_ids: dict[str, int] = field(default_factory=dict)
    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)
    refused: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    log: str = ""
    attempts: int = 0
    rounds: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    too_short: str = ""
    left: list[int] = field(default_factory=list)

    def of(self, client: int) -> dict[int, dict[str, Any]]:
        """Return a client's lines by round."""
        return {line["round"]: line for line in self.clients if line["client"] == client}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder, seen = tmp_path_factory.mktemp("loopback") / "a federation", Story()
    port = free_ports(6)
    made = create(folder, supernodes=3, port=port, first_node_port=port + 1)
    stranger = create(folder.with_name("other"), supernodes=1, port=port, first_node_port=port + 5)
    marks: list[str] = []
    with Machines(folder, timeout=400) as machines:
        machines.start_all()
        seen.node_ids, seen.before = dict(machines.node_ids), machines.statuses()

        (fourth,) = add_supernodes(folder)
        address = read_settings(fourth)["SUPERLINK"]
        program = str(Path(sys.executable).parent / "flower-supernode")
        base = [program, "--superlink", address, "--port", str(port + 4), "--max-retries", "2"]
        key = ["--auth-supernode-private-key", str(stranger.supernodes[0] / "key")]
        for name, command in {
            "unregistered": [str(fourth / "start.sh")],
            "plain": [*base, "--insecure"],
            "other-authority": [*base, *key, "--root-certificates", str(stranger.supernodes[0] / "ca.crt")],
            "keyless": [*base, "--root-certificates", str(fourth / "ca.crt")],
        }.items():
            (folder / name).mkdir()
            process = machines.launch(name, command)
            seen.refused[name] = process.wait(120), text_of(machines.log(name))
            machines.kill(name)

        run = machines.submit(
            Path(fedplat.__file__).parent / "flower_app",
            f'scenario="quickstart" strategy="fed-credit" rounds={ROUNDS} out="result" '
            f'overrides="partition.clients=3 attacks=[] strategy.fed-credit.attitude=none '
            f"strategy.fed-credit.decay={DECAY} security.signed_updates=true "
            f'security.signing_keys=../signing-keys"',
        )
        result = made.superlink / "work" / "result" / "fed-credit"
        until(lambda: len(lines_of(result / "rounds.jsonl")) > LOST_IN - 1, machines, 400)
        with pytest.raises(UserError) as caught:
            machines.wait_for_run(run, 0.1)
        seen.too_short = str(caught.value)
        until(lambda: training(machines.log(LOST), LOST_IN), machines, 200)
        machines.kill(LOST)
        seen.attempts = machines.rejoin(LOST, 400)
        seen.status = machines.wait_for_run(run, 800)
        seen.after, seen.log = machines.statuses(), text_of(machines.log(LOST))
        marks += machines._marks.values()
    seen.left = [pid for mark in marks for pid in processes._marked(mark)]
    seen.rounds, seen.clients = lines_of(result / "rounds.jsonl"), lines_of(result / "clients.jsonl")
    return seen


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row, below those that outgoing connections take."""
    random = Random()
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def until(true: Callable[[], bool], machines: Machines, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(
                f"not in {seconds:g} s; the SuperLink printed\n{text_of(machines.log('superlink'))[-3000:]}"
            )
        time.sleep(0.1)


def training(log: Path, number: int) -> bool:
    """Return whether a SuperNode has started a ClientApp for a round."""
    _, told, rest = text_of(log).partition(f"ROUND {number}]")
    return bool(told) and "Start `flwr-clientapp`" in rest


def text_of(path: Path) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", path.read_text(errors="replace"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_registered_supernodes_come_online_over_tls(story: Story) -> None:
    assert story.before == dict.fromkeys(story.node_ids.values(), "online")
    assert len(story.before) == 3


def test_the_run_ends_with_all_its_rounds(story: Story) -> None:
    assert story.status == "finished:completed"
    assert [line["round"] for line in story.rounds] == list(range(ROUNDS + 1))
    assert story.rounds[-1]["accuracy"] > story.rounds[0]["accuracy"] + 0.2


def test_the_lost_client_is_named_in_the_round_in_which_it_was_lost(story: Story) -> None:
    lost = story.of(1)
    assert lost[LOST_IN]["status"] == "failed"
    assert "Unavailable" in lost[LOST_IN]["reason"]
    assert lost[LOST_IN]["weight"] == 0
    for other in (0, 2):
        assert {line["status"] for line in story.of(other).values()} == {"accepted"}
        assert sorted(story.of(other)) == list(range(1, ROUNDS + 1))
    assert [line["failed"] for line in story.rounds[1:]] == [int(n == LOST_IN) for n in range(1, ROUNDS + 1)]


def test_restarted_with_its_key_it_is_the_same_node(story: Story) -> None:
    assert story.after == story.before
    ids = re.findall(r"SuperNode ID: (\d+)", story.log)
    assert ids == [str(story.node_ids[LOST])] * 2
    assert story.attempts == 1 + story.log.count("Failed to activate SuperNode")
    assert story.of(1)[ROUNDS]["status"] == "accepted"


def test_its_credibility_goes_on_from_what_it_was(story: Story) -> None:
    lines = story.of(1)
    back = min(number for number in lines if number > LOST_IN)
    left = lines[LOST_IN - 1]["credibility"]
    # Each round without it only decays; the one it is back in adds its similarity as well.
    expected = left * math.exp(-DECAY) ** (back - LOST_IN + 1) + lines[back]["similarity"]
    assert lines[back]["credibility"] == pytest.approx(expected)
    fresh = math.exp(-DECAY) + lines[back]["similarity"]
    assert abs(lines[back]["credibility"] - fresh) > 1e-3


def test_who_does_not_belong_is_refused_and_told_why(story: Story) -> None:
    for name, reason in {
        "unregistered": "[code: 2004] Failed to activate SuperNode",
        "plain": "Giving up reconnection",
        "other-authority": "CERTIFICATE_VERIFY_FAILED",
        "keyless": "All SuperNodes must be registered",
    }.items():
        status, printed = story.refused[name]
        assert status == 1, name
        assert "Exit Code: 305" in printed, name
        assert reason in printed, name
        assert "SuperNode ID" not in printed, name


def test_a_wait_that_is_too_short_says_what_is_missing(story: Story) -> None:
    assert "is running" in story.too_short
    assert "superlink last printed" in story.too_short


def test_nothing_is_left_running(story: Story) -> None:
    assert story.left == []
