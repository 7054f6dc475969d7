"""The benchmarks' own correctness, on tiny sizes: nothing here depends on how long anything takes."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedplat.errors import UserError
from fedplat.experiments.benchmarks import (
    aggregator_rules,
    aggregators,
    common,
    engine_flower,
    engines,
    scale,
    workload,
)
from fedplat.experiments.benchmarks import engine_plain as plain
from fedplat.experiments.benchmarks.children import TurnError, family, growth_of, in_child
from fedplat.experiments.benchmarks.common import Report, Section
from fedplat.experiments.benchmarks.workload import Turn, Workload, before_forks, data_here, vector_of

WORK = Workload("softmax", 3, 10, 15, "digits")


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    before_forks()


def printed(section: Section) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(common.table_of(section))
    return out.getvalue()


# Turns, ratios, tables -------------------------------------------------------------------------------------


def test_everybody_takes_a_turn_before_anybody_takes_the_next() -> None:
    order: list[str] = []
    things = {name: lambda name=name: order.append(name) for name in "abc"}
    common.take_turns(things, 2)
    assert order == list("abcabc")


def test_what_fails_is_left_out_with_its_reason() -> None:
    def broken() -> None:
        raise TurnError("no")

    results, failures = common.take_turns({"good": lambda: 1, "broken": broken}, 3)
    assert results == {"good": [1, 1, 1]}
    assert failures == {"broken": "no"}


def test_what_has_taken_long_gets_no_further_turn() -> None:
    results, _ = common.take_turns({"slow": lambda: time.sleep(0.01)}, 3, patience=0.001)
    assert results == {"slow": [None]}


def test_ratios_are_medians_over_the_median_of_ours() -> None:
    found = common.compared({"ours": [1.0, 2.0, 90.0], "other": [5.0, 3.0]}, "ours")
    assert found["ours"] == {"seconds": 2.0, "spread": 44.5, "ratio": 1.0}
    assert found["other"] == {"seconds": 4.0, "spread": 0.5, "ratio": 2.0}


def test_ratios_are_unknown_without_ours() -> None:
    assert np.isnan(common.compared({"other": [1.0]}, "ours")["other"]["ratio"])


def test_a_table_shows_every_row_and_a_dash_for_what_is_missing() -> None:
    section = Section("a title", ("engine", "x ours"), [{"engine": "one", "x ours": 2.0}, {"engine": "two"}])
    lines = printed(section).splitlines()
    assert lines[0].strip() == "a title"
    assert [line.split() for line in lines if "one" in line or "two" in line] == [
        ["one", "2.00x"],
        ["two", "–"],
    ]


def test_json_has_options_machine_and_raw_numbers(tmp_path: Path) -> None:
    report = Report("engines", {"seed": 1})
    report.add(Section("t", ("engine", "s"), [{"engine": "one", "s": 0.123456}], ["note"], ["two: absent"]))
    common.write_json([report], tmp_path / "deep" / "out.json")
    (found,) = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert found["benchmark"] == "engines"
    assert found["options"] == {"seed": 1}
    assert found["sections"] == [
        {
            "title": "t",
            "columns": ["engine", "s"],
            "rows": [{"engine": "one", "s": 0.123456}],
            "notes": ["note"],
            "skipped": ["two: absent"],
        }
    ]
    assert {"cores", "memory_gb", "python", "torch", "numpy", "flwr", "threads_env"} <= set(found["machine"])


def test_the_machine_is_told_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps(common.machine())
    assert os.uname().nodename not in told
    assert str(Path.home()) not in told


def test_an_unwritable_file_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the results"):
        common.write_json([Report("x", {})], tmp_path / "file" / "out.json")


# Processes -------------------------------------------------------------------------------------------------


def test_a_child_returns_its_value_and_changes_nothing_here() -> None:
    here: list[int] = []

    def work() -> list[int]:
        here.append(1)
        return here

    assert in_child(work, 30).value == [1]
    assert here == []


def test_a_childs_error_is_told_with_its_place() -> None:
    with pytest.raises(TurnError, match=r"ZeroDivisionError: .* \(test_benchmarks.py, line \d+\)"):
        in_child(lambda: 1 // 0, 30)


def test_a_child_that_dies_is_told() -> None:
    with pytest.raises(TurnError, match="exit code 3"):
        in_child(lambda: os._exit(3), 30)


def test_a_child_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def work() -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        note.write_text(str(child))
        time.sleep(60)

    with pytest.raises(TurnError, match="not done after 1 s"):
        in_child(work, 1.0)
    grandchild = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(100):  # a killed process may linger until somebody asks for its status
        if not grandchild.exists() or grandchild.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the grandchild still runs")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
def test_memory_of_a_child_is_seen() -> None:
    def work() -> int:
        block = np.ones(8_000_000)
        time.sleep(0.6)  # for the sampling to come by
        return len(block)

    child = in_child(work, 30, watch_memory=True)
    assert child.own_peak > 64e6
    assert child.tree_peak >= child.own_peak
    assert os.getpid() in family(os.getpid())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_growth_counts_what_is_freed_again() -> None:
    def measured() -> tuple[Any, float, int]:
        return growth_of(lambda: float(np.ones(4_000_000).sum()))

    value, _, growth = in_child(measured, 30).value
    assert value == 4e6
    assert 30e6 < growth < 45e6


# Engines ---------------------------------------------------------------------------------------------------


@pytest.fixture
def digits_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No MNIST, wherever the tests run."""
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    workload._situation.cache_clear()
    yield
    workload._situation.cache_clear()


def trained(engine: Any) -> Turn:
    return in_child(engine, 60).value


def test_our_engine_and_the_loops_train_the_same_model() -> None:
    initial = vector_of({k: v.numpy() for k, v in plain.PlainTrainer(WORK).state().items()})
    turns = {
        "ours": trained(lambda: engine_flower.local_engine(WORK, 2, 60)),
        "loop": trained(lambda: plain.loop(WORK, 2, 1)),
        "processes": trained(lambda: plain.process_per_core(WORK, 2)),
    }
    found = engines.agreement({name: turn.model for name, turn in turns.items()}, initial)
    assert all(relative < 1e-4 for _, relative in found.values())
    assert all(len(turn.seconds) == 2 for turn in turns.values())
    # The start is no model that anybody could come to agree on: training changed it.
    assert np.abs(turns["ours"].model - initial).max() > 1e-3


def test_a_model_trained_on_other_batches_is_noticed() -> None:
    initial = vector_of({k: v.numpy() for k, v in plain.PlainTrainer(WORK).state().items()})
    right = trained(lambda: plain.loop(WORK, 1, 1)).model

    def wrong_engine() -> Turn:
        Workload.order = lambda self, partition, number: torch.arange(15).flip(0)  # type: ignore[method-assign]
        return plain.loop(WORK, 1, 1)

    wrong = trained(wrong_engine).model
    found = engines.agreement({"ours": right, "wrong": wrong}, initial)
    assert found["wrong"][1] > engines.TOLERANCE


@pytest.mark.parametrize("model", [None, np.zeros(3, np.float32), np.full(4, np.nan, np.float32)])
def test_a_missing_or_misshapen_model_never_agrees(model: Any) -> None:
    start, good = np.zeros(4, np.float32), np.ones(4, np.float32)
    found = engines.agreement({"good": good, "bad": model}, start)
    assert not found["bad"][1] <= engines.TOLERANCE


def fake_engines(models: dict[str, float]) -> Any:
    size = 650

    def engines_of(work: Workload, options: engines.Options) -> dict[str, Any]:
        return {
            name: lambda value=value: Turn([9.0, 1.0], [9.0, 0.5], np.full(size, value, np.float32))
            for name, value in models.items()
        }

    return engines_of


def options(**changes: Any) -> engines.Options:
    small = {"parts": ("training",), "models": ("softmax",), "clients": (3,), "batches": (10,), "samples": 15}
    return engines.Options(**{**small, "engines": ("fedplat", "loop"), "repeats": 1, **changes})


@pytest.mark.usefixtures("digits_only")
def test_a_run_with_a_wrong_engine_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "engines", fake_engines({engines.OURS: 5.0, engines.LOOPS[0]: 6.0}))
    report = Report("engines", {})
    with pytest.raises(engines.DisagreementError, match=r"loop, 1 thread differs from the others' by 0\.\d+"):
        engines.measure(options(), report)
    assert len(report.sections) == 1  # the table is there all the same


@pytest.mark.usefixtures("digits_only")
def test_the_first_round_is_left_out_and_the_best_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "engines", fake_engines(dict.fromkeys([engines.OURS, *engines.LOOPS], 5.0)))
    report = Report("engines", {})
    engines.measure(options(), report)
    (section,) = report.sections
    assert [row["s per round"] for row in section.rows] == [1.0] * 5
    assert section.rows[-1]["engine"] == "best hand-written loop: 1 thread"
    assert "engine overhead: 50.0 % of a round" in section.notes[-1]
    assert "MNIST is not on this disk" in section.notes[0]


def test_absent_engines_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed", lambda name: False)
    assert [line.split(":")[0] for line in engines.missing(engines.Options())] == [
        "Flower Ray simulation",
        "pfl",
        "BlazeFL",
    ]
    assert set(engines.engines(WORK, engines.Options())) == {engines.OURS, *engines.LOOPS}


@pytest.mark.usefixtures("digits_only")
def test_a_model_that_does_not_fit_the_data_is_skipped_with_the_reason() -> None:
    report = Report("engines", {})
    engines.measure(options(models=("cnn-hfl",)), report)
    (section,) = report.sections
    assert section.rows == []
    assert "cnn-hfl" in section.skipped[0]


@pytest.mark.usefixtures("digits_only")
def test_without_mnist_the_digits_are_used_and_told() -> None:
    name, note = data_here(1)
    assert name == "digits"
    assert "MNIST" in note


def test_clients_that_do_nothing_return_what_they_got() -> None:
    sizes = ((1000, 3), (2000, 2))
    for kind in ("ours", "bare"):
        found = in_child(lambda kind=kind: engine_flower.carry(kind, sizes, 2, 30), 60).value
        assert [len(seconds) for seconds in found] == [2, 2]


def test_idle_clients_have_a_row_per_engine_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "installed", lambda name: False)
    report = Report("engines", {})
    engines.measure(options(parts=("no-op",), idle=((1000, 3), (2000, 2))), report)
    (section,) = report.sections
    assert [(row["engine"], row["parameters"]) for row in section.rows] == [
        (name, size) for size in (1000, 2000) for name in (engines.OURS, "bare grid", engines.COPY)
    ]
    assert section.skipped == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told() -> None:
    report = Report("engines", {})
    engines.measure(options(parts=("gpu",)), report)
    assert report.sections[0].skipped == ["torch finds no CUDA GPU here"]


# Aggregators -----------------------------------------------------------------------------------------------


# Not Bulyan: where its choices tie, which they do by construction, Flower takes others.
@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "krum", "multi-krum"])
@pytest.mark.parametrize("serialised", [False, True])
def test_flowers_rules_give_the_same_result(rule: str, serialised: bool) -> None:
    matrix = aggregator_rules.round_of(12, 40, 1)
    theirs = aggregator_rules.flower_rule(rule, matrix, serialised)
    assert theirs is not None
    assert np.allclose(theirs(), aggregator_rules.fedplat_rule(rule, matrix)(), atol=1e-6)


def test_rules_that_a_library_does_not_have_are_left_out() -> None:
    assert set(aggregators.libraries("fed-credit", ("fedplat", "flower"))) == {"fedplat"}
    assert set(aggregators.libraries("bulyan", ("flower",))) == {"Flower", "Flower, from bytes"}


def test_aggregators_are_measured_without_byzfl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregators, "installed", lambda name: False)
    report = Report("aggregators", {})
    aggregators.measure(
        aggregators.Options(rules=("mean", "fed-credit"), clients=(11,), parameters=(2000,), repeats=1),
        report,
    )
    mean, credit = report.sections
    assert [row["library"] for row in mean.rows] == ["fedplat", "Flower", "Flower, from bytes", "one read"]
    assert [row["library"] for row in credit.rows] == ["fedplat", "one read"]
    assert all(row["max difference"] < 1e-6 for row in mean.rows[1:3])
    assert mean.skipped == ["ByzFL: not installed (pip install 'fedplat[bench]')"]


def test_a_cell_over_the_limit_is_skipped_with_its_estimate() -> None:
    guess = aggregators.Guess(10, 1000, 1.0, 10)
    told = aggregators.too_much("Flower", "krum", 100, 1000, guess, limit=20)
    assert told == "would take some 100 s, more than --limit 20"
    assert aggregators.too_much("Flower", "mean", 100, 1000, guess, limit=20) == ""


def test_a_cell_over_the_memory_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregators, "memory", lambda name: 3_000_000_000)
    told = aggregators.too_much("Flower", "median", 100, 10_000_000, None, limit=20)
    assert told == "needs some 12.0 GB more, and 3.0 GB are free"


@pytest.mark.parametrize("clients", [3, 10, 11, 50, 100, 200])
def test_the_number_of_liars_suits_every_rule(clients: int) -> None:
    assert clients >= 4 * aggregator_rules.liars(clients) + 3


# Scale -----------------------------------------------------------------------------------------------------


def test_scale_tells_seconds_and_memory_of_every_strategy() -> None:
    report = Report("scale", {})
    scale.measure(scale.Options(clients=(5,), models=("softmax",), rounds=2, repeats=1), report)
    (section,) = report.sections
    assert [(row["strategy"], row["clients"]) for row in section.rows] == [("mean", 5), ("fed-credit", 5)]
    assert all(row["ms per client"] > 0 and set(row) == set(scale.COLUMNS) for row in section.rows)
    assert section.skipped == []
