"""The federation's benchmark without one: its plan of kills, its tables, and what its checks notice."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fedplat.cli.common import load_config
from fedplat.deployment.plan import create
from fedplat.deployment.processes import Machines
from fedplat.errors import UserError
from fedplat.experiments.benchmarks import federation, federation_checks, federation_kills, federation_runs
from fedplat.experiments.benchmarks.common import Report, Section
from fedplat.experiments.benchmarks.federation import LOCAL, SIMULATION, Options, Outcome
from fedplat.experiments.benchmarks.federation_checks import DECAY, Story, named, trouble_of
from fedplat.experiments.benchmarks.federation_kills import Kill, Killer, Planned, plan, victim
from fedplat.serving import config_from as config_of_run
from fedplat.strategies import FedCredit

NAMES = [f"supernode-{i}" for i in range(4)]
KEPT = math.exp(-DECAY)


# What is run -----------------------------------------------------------------------------------------------


def test_every_engine_is_given_the_same_configuration() -> None:
    options = Options(rounds=3, seed=4, settings=("model.name=mlp", "model.hidden=[8, 8]"))
    words = federation_runs.run_config(options, "result")
    told = {}
    for part in ("scenario", "strategy", "overrides"):
        told[part] = words.partition(f'{part}="')[2].partition('"')[0]
    deployed = config_of_run({**told, "seed": 4}).to_dict()
    command = federation_runs.command_of(options, LOCAL, Path("out"))
    settings = [command[i + 1] for i, word in enumerate(command) if word == "--set"]
    local = load_config(options.scenario, settings, 4, ["fed-credit", "mean"]).to_dict()
    assert deployed["security"].pop("signing_keys") == "../signing-keys"
    local["security"].pop("signing_keys", None)
    assert deployed == local
    assert local["security"] == {"signed_updates": True}
    assert local["rounds"] == 3


def test_clients_are_killed_in_runs_whose_credibilities_can_be_computed_again() -> None:
    peaceful = federation_kills._peaceful(Options())
    config = load_config(peaceful.scenario, federation_runs.settings_of(peaceful), 1, peaceful.strategies)
    assert config.strategies == ("fed-credit",)
    assert config.attacks == ()
    settings = config.strategy_part("fed-credit").settings()
    assert (settings["attitude"], settings["decay"], settings["history"]) == ("none", DECAY, "sum")


def test_clients_are_trained_one_at_a_time_where_that_may_be_chosen() -> None:
    assert "--group-size" in federation_runs.command_of(Options(), LOCAL, Path("out"))
    assert "--group-size" not in federation_runs.command_of(Options(), SIMULATION, Path("out"))


def test_settings_that_a_run_config_cannot_carry_are_refused() -> None:
    with pytest.raises(UserError, match="cannot have quotation marks"):
        federation_runs.run_config(Options(settings=('data.name="mnist"',)), "result")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parts": ("kill",)}, "did you mean 'kills'"),
        ({"clients": (3, 4)}, "found 3,4"),
        ({"clients": (21,)}, "from 2 to 20"),
        ({"minutes": 0.0}, "got 0"),
        ({"strategies": ("meen",)}, "did you mean 'mean'"),
        ({"scenario": "quickstrat"}, "quickstart"),
    ],
)
def test_what_no_federation_can_run_is_told_at_once(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        federation.check(Options(**changes))


def test_both_sets_of_options_can_be_run() -> None:
    federation.check(Options())
    federation.check(Options(**federation.QUICK))


def test_a_command_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    create(tmp_path / "fed", supernodes=1)
    with Machines(tmp_path / "fed") as machines:
        assert federation_runs.run_command(machines, "good", ["true"], 30) < 30
        with pytest.raises(UserError, match="bad ended with exit status 3: no luck"):
            federation_runs.run_command(machines, "bad", ["sh", "-c", "echo no luck; exit 3"], 30)
        with pytest.raises(UserError, match="slow ended with nothing after 0 s"):
            federation_runs.run_command(machines, "slow", ["sleep", "60"], 0.1)
        assert machines.running == {}


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert federation_kills.next_round(path) == 0
    path.write_text('{"round": 0}\n{"round": 1}\n{"rou')
    assert [line["round"] for line in federation_runs.lines_of(path)] == [0, 1]
    assert federation_kills.next_round(path) == 2


# Kills -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_planned_half_a_minute_to_a_minute_and_a_half_apart(seed: int) -> None:
    planned = plan(seed, 600, NAMES)
    moments = [0.0, *(kill.at for kill in planned)]
    gaps = [b - a for a, b in pairwise(moments)]
    assert all(30 <= gap <= 90 for gap in gaps)
    assert 600 - 90 < moments[-1] <= 600
    assert all(sorted(kill.order) == NAMES for kill in planned)


def test_the_plan_follows_from_the_seed() -> None:
    assert plan(1, 600, NAMES) == plan(1, 600, NAMES)
    assert plan(1, 600, NAMES) != plan(2, 600, NAMES)
    assert len({kill.order[0] for seed in range(10) for kill in plan(seed, 600, NAMES)}) == 4


@pytest.mark.parametrize("down", [[], ["supernode-0"], ["supernode-0", "supernode-3"]])
def test_nobody_is_killed_twice_and_never_more_than_two_are_down(down: list[str]) -> None:
    for kill in plan(3, 600, NAMES):
        name = victim(kill.order, down)
        assert name not in down
        assert (name is None) == (len(down) == 2)


class PlayedMachines:
    """Machines whose SuperNodes come back at once, or never."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.killed: list[str] = []

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def rejoin(self, name: str, timeout: float) -> int:
        if self.error:
            raise UserError(self.error)
        return 2


def killer(machines: Any, tmp_path: Path, *kills: Planned) -> Killer:
    (tmp_path / "rounds.jsonl").write_text('{"round": 0}\n{"round": 1}\n')
    return Killer(machines, list(kills), tmp_path / "rounds.jsonl")


def test_a_kill_is_made_when_it_is_due_and_its_return_noted(tmp_path: Path) -> None:
    machines = PlayedMachines()
    it = killer(machines, tmp_path, Planned(0.0, ("b", "a")), Planned(900.0, ("a", "b")))
    it.look()
    it.join(10)
    (kill,) = it.kills
    assert (kill.name, kill.round, kill.attempts, kill.trouble) == ("b", 2, 2, "")
    assert kill.back is not None
    assert machines.killed == ["b"]
    assert [kill.at for kill in it.planned] == [900.0]


def test_a_third_kill_is_left_out_while_two_are_down(tmp_path: Path) -> None:
    machines = PlayedMachines("not online: it\nlast printed")
    it = killer(machines, tmp_path, *[Planned(0.0, tuple("abc"))] * 3)
    it.look()
    it.join(10)
    assert machines.killed == ["a", "b"]
    assert it.spared == 1
    assert [kill.trouble for kill in it.kills] == ["not online: it"] * 2


# What the checks notice ------------------------------------------------------------------------------------


def line(number: int, client: int, credibility: float, similarity: float = 1.0) -> dict[str, Any]:
    scores = {"credibility": credibility, "similarity": similarity}
    return {"round": number, "client": client, "status": "accepted", "reason": "", "weight": 0.5, **scores}


def failed(number: int, client: int) -> dict[str, Any]:
    reason = "Error: Node Unavailable — The destination node failed"
    return {"round": number, "client": client, "status": "failed", "reason": reason, "weight": 0}


def good_story() -> Story:
    """Two clients and three rounds; client 1 is lost in round 2 and back in round 3."""
    first = KEPT + 1
    return Story(
        total=3,
        status="finished:completed",
        online={11: "online", 22: "online"},
        node_ids={"supernode-0": 11, "supernode-1": 22},
        rounds=[{"round": n, "accuracy": n / 10, "seconds": {"train": 1.5}} for n in range(4)],
        clients=[
            *(line(1, 0, first), line(1, 1, first)),
            *(line(2, 0, KEPT * first + 1), failed(2, 1)),
            *(line(3, 0, KEPT * (KEPT * first + 1) + 1), line(3, 1, KEPT * KEPT * first + 0.5, 0.5)),
        ],
        asked={1: 2.0, 2: 2.0, 3: 2.0},
        keys={"supernode-0": ("aa", "aa"), "supernode-1": ("bb", "bb")},
    )


def test_a_run_that_lost_nothing_has_no_trouble() -> None:
    story = good_story()
    assert trouble_of(story) == []
    assert federation_checks.count_lines(story) == {"accepted": 5, "failed": 1, "credibilities": 5}
    assert federation_kills._summary([], story, 1).startswith("nothing lost: 3 rounds, each once; 1 kills;")


def changed(**changes: Any) -> Story:
    story = good_story()
    for name, value in changes.items():
        setattr(story, name, value)
    return story


def with_line(index: int, **values: Any) -> list[dict[str, Any]]:
    lines = copy.deepcopy(good_story().clients)
    lines[index] |= values
    return lines


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"status": "finished:failed"}, "the run is finished:failed"),
        ({"rounds": good_story().rounds[:-1]}, "[0, 1, 2], not 0 to 3"),
        ({"rounds": [*good_story().rounds, {"round": 2}]}, "[0, 1, 2, 3, 2], not 0 to 3"),
        ({"asked": {1: 2.0, 2: 3.0, 3: 2.0}}, "round 2 asked 3 clients and has lines for [0, 1]"),
        ({"asked": {1: 2.0, 2: 2.0}}, "lines on clients for rounds [3]"),
        ({"clients": good_story().clients[:-1]}, "round 3 asked 2 clients and has lines for [0]"),
        ({"clients": with_line(5, client=0)}, "round 3 asked 2 clients and has lines for [0, 0]"),
        ({"clients": with_line(3, reason="")}, "round 2: client 1 failed: without a reason"),
        ({"clients": with_line(3, status="refused")}, "round 2: client 1 refused: Error: Node"),
        ({"clients": with_line(5, credibility=KEPT + 0.5)}, "round 3: client 1 has a credibility of 1.10653"),
        ({"online": {11: "online", 22: "offline"}}, "supernode-1, node 22, is offline"),
        ({"online": {11: "online", 33: "online"}}, "supernode-1, node 22, is not known any more"),
        ({"online": {11: "online", 22: "online", 33: "online"}}, "3 nodes are registered, not 2"),
        ({"keys": {"supernode-0": ("aa", "bb")}}, "supernode-0 is bound to the signing key bb"),
    ],
)
def test_what_was_lost_is_told(changes: dict[str, Any], told: str) -> None:
    (found,) = trouble_of(changed(**changes))[:1]
    assert told in found
    assert federation_kills._summary([found], good_story(), 1).startswith("LOST: ")


def test_credibilities_are_those_of_the_rule_itself() -> None:
    """A client that has never replied keeps its first credibility, as the rule has it."""
    rule = FedCredit(attitude="none", decay=DECAY).aggregator
    lines = []
    for number, (nodes, similar) in enumerate([([5], [0.9]), ([5, 6], [0.8, -0.3]), ([6], [0.7])], 1):
        similarity = torch.tensor(similar, dtype=torch.float64)
        *_, after = rule.judged(nodes, torch.ones(len(nodes)).long().numpy(), similarity)  # type: ignore[attr-defined]
        rule.remember(nodes, (), similarity, after)  # type: ignore[attr-defined]
        lines += [line(number, node, float(c), s) for node, c, s in zip(nodes, after, similar, strict=True)]
    assert federation_checks.credibility_trouble(Story(3, clients=lines)) == ([], 4)


def test_keys_and_numbers_of_clients_come_from_what_is_on_disk(tmp_path: Path) -> None:
    made = create(tmp_path / "fed", supernodes=2)
    registered = {name: key for key, name in federation_checks._keys(made).items()}
    folder = tmp_path / "fed-credit"
    log = federation_checks.StrategyLog(folder)
    state = {"own": {"keys": {11: registered["supernode-0"].hex(), 22: "ab"}}, "strategy": {}}
    log.append({"round": 0, "bytes_down": 0}, [])
    log.append({"round": 1, "bytes_down": 24}, [line(1, 0, KEPT + 1)])
    log.save_checkpoint({"round": 1, "arrays": {"w": torch.ones(3)}, "strategy": state})
    story = Story(1)
    story.read(folder, {"supernode-0": 11, "supernode-1": 22}, made)
    assert story.asked == {1: 2.0}
    assert story.keys["supernode-0"] == (registered["supernode-0"].hex(),) * 2
    assert story.keys["supernode-1"] == (registered["supernode-1"].hex(), "ab")


@pytest.mark.parametrize(
    ("client", "first", "told"),
    [
        (1, 2, "failed in 2 (Error: Node Unavailable), accepted in 3"),
        (1, 1, "accepted in 1, failed in 2 (Error: Node Unavailable), accepted in 3"),
        (0, 2, "accepted in 2, accepted in 3"),
        (7, 2, "not asked in 2, not asked in 3"),
    ],
)
def test_a_loss_is_told_as_the_results_name_it(client: int, first: int, told: str) -> None:
    # A kill after the reply leaves its round as it is; what follows tells whether the next was missed.
    assert named(good_story().of(client), first, 3) == told


def test_the_tables_of_kills_have_all_their_columns() -> None:
    story = good_story()
    row = federation_kills._kill_row(Kill("supernode-1", 40.0, 2, 61.0, 7), [], story)
    said = "failed in 2 (Error: Node Unavailable), accepted in 3"
    assert list(row.values()) == [40.0, "supernode-1", 2, said, 61.0, 7]
    killed_again = federation_kills._kill_row(
        Kill("supernode-1", 40.0, 2), [Kill("supernode-0", 50.0, 2), Kill("supernode-1", 90.0, 3)], story
    )
    assert killed_again["what the results say"] == "failed in 2 (Error: Node Unavailable)"
    section = federation_kills._rounds_section(story, ["supernode-0", "supernode-1"])
    assert [r["supernode-1"] for r in section.rows] == ["–", "accepted", "failed", "accepted"]
    assert all(set(r) == set(section.columns) for r in section.rows)


# Engines ---------------------------------------------------------------------------------------------------


def outcome(weight: float = 1.0, **changes: Any) -> Outcome:
    rounds = [
        {"round": n, "accuracy": n / 4, "seconds": {"train": float(n), "evaluate": 0.5}}
        | {"bytes_down": 2_000_000 * n, "bytes_up": 1_000_000 * n}
        for n in range(4)
    ]
    clients = [line(n, c, 1.0) | {"verdict": ""} for n in (1, 2, 3) for c in (0, 1)]
    clients[3] |= changes
    return Outcome(rounds, clients, {"w": torch.full((3,), weight)})


def test_accuracies_stand_side_by_side() -> None:
    rows = federation.accuracy_rows("mean", {LOCAL: {"mean": outcome()}, "other": {"mean": outcome()}})
    assert rows[2] == {"strategy": "mean", "round": 2, LOCAL: 50.0, "other": 50.0}
    assert len(rows) == 4


def test_the_first_round_and_the_others_are_timed_apart() -> None:
    assert federation.time_row(outcome().rounds) == {
        "s first round": 1.5,
        "s median of others": 3.0,
        "s all rounds": 7.5,
        "MB down": 4.0,
        "MB up": 2.0,
    }


def test_engines_that_agree_are_told_so() -> None:
    rows = federation.agreement_rows({LOCAL: {"mean": outcome()}, "other": {"mean": outcome()}})
    assert [row["same bits"] for row in rows] == ["yes", "yes"]
    assert rows[1]["max difference"] == rows[1]["lines that differ"] == rows[1]["accuracies that differ"] == 0
    assert federation.disagreements(rows) == []


def test_another_model_and_other_lines_are_told() -> None:
    outcomes = {
        LOCAL: {"mean": outcome()},
        "close": {"mean": outcome(1 + 2**-22)},
        "far": {"mean": outcome(1.5, status="failed", reason="gone")},
        "broken": {"mean": outcome(float("nan"))},
    }
    rows = {row["engine"]: row for row in federation.agreement_rows(outcomes)}
    assert rows["close"]["same bits"] == "no"
    assert rows["close"]["max difference"] == 2**-22
    assert (rows["far"]["lines that differ"], rows["far"]["failed"]) == (1, 1)
    found = federation.disagreements(list(rows.values()))
    assert [text.split(",")[0] for text in found] == ["far", "broken"]
    assert "differs by 0.5 from local's, and 1 lines" in found[0]
    assert federation.unusual(outcomes) == ["far, mean, round 2: client 1 failed, gone"]


def test_models_with_the_same_holes_have_the_same_bits() -> None:
    hole = {"w": torch.tensor([float("nan"), 1.0])}
    assert federation.same_bits(hole, copy.deepcopy(hole))
    assert federation.difference(hole, copy.deepcopy(hole)) == 0
    assert federation.difference({"w": torch.ones(2)}, {"w": torch.ones(3)}) == math.inf


def test_the_results_are_kept_where_one_asks_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places: list[Path] = []

    def measure(options: Options, report: Report, folder: Path) -> list[str]:
        places.append(folder)
        report.add(Section("a table", ("a",), []))
        return ["round 2 is missing"]

    monkeypatch.setattr(federation, "measure_kills", measure)
    report = Report("federation", {})
    with pytest.raises(federation.DisagreementError, match="round 2 is missing"):
        federation.measure(Options(parts=("kills",), keep=tmp_path / "kept"), report)
    assert places == [tmp_path / "kept" / "kills"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_federation_comes_to_the_very_model_of_the_local_engine(tmp_path: Path) -> None:
    report = Report("federation", {})
    federation.measure(
        Options(**{**federation.QUICK, "parts": ("engines",), "keep": tmp_path / "kept"}), report
    )
    *_, agreement = report.sections
    engines = [LOCAL, SIMULATION, federation.DEPLOYMENT]
    assert [row["engine"] for row in agreement.rows] == engines * 2
    for row in agreement.rows:
        assert row["same bits"] == "yes"
        assert row["lines that differ"] == row["accuracies that differ"] == row["failed"] == 0
