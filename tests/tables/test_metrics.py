"""Metrics, worked out by hand."""

import pytest

from fedplat.tables.metrics import (
    COMPARED,
    METRICS,
    RunRecords,
    clients_accuracy,
    submodel_accuracy,
    utilisation,
    values_of,
)

from ..results import round_record

ROUNDS = [
    round_record(0, 0.1),
    round_record(1, 0.5, attack={"attackers": 1, "weight": 0.2, "success": {"a": 0.3, "b": 0.6}}),
    round_record(2, 0.7, attack={"attackers": 1, "weight": 0.4, "success": {"a": 0.1, "b": 0.25}}),
]


def test_figures_are_those_of_the_records() -> None:
    values = values_of(RunRecords(ROUNDS, num_clients=4), METRICS)
    assert values["accuracy"] == 0.7
    assert values["accuracy-last"] == pytest.approx(0.6)
    assert values["accuracy-best"] == 0.7
    assert values["worst-class"] == pytest.approx(0.35)
    assert values["attack-success"] == 0.25
    assert values["attackers-weight"] == pytest.approx(0.3)
    # Two rounds of 3 MB, over four clients.
    assert values["megabytes"] == pytest.approx(1.5)
    assert values["megabytes-up"] + values["megabytes-down"] == pytest.approx(1.5)
    assert values["seconds"] == pytest.approx(2.75)
    assert values["simulated-hours"] is None
    assert values["detection-f1"] is None
    assert "drop" not in values


def test_a_run_without_rounds_has_no_figures() -> None:
    assert set(values_of(RunRecords([]), METRICS).values()) == {None}


def test_the_clients_of_the_last_evaluated_round_count_with_the_level_they_had() -> None:
    rounds = [round_record(2, 0.9, submodels={"width-0.5": 0.5, "width-0.25": 0.1}), round_record(3, None)]
    rows = [
        {"round": 1, "client": 0, "status": "accepted", "submodel": "width-0.25"},
        {"round": 2, "client": 0, "status": "accepted", "submodel": "width-0.5@3,17"},
        {"round": 2, "client": 1, "status": "accepted"},
        {"round": 2, "client": 4, "status": "accepted", "submodel": "width-1/client-4"},
        {"round": 2, "client": 5, "status": "accepted", "submodel": "width-0.5/client-5"},
        {"round": 2, "client": 2, "status": "failed", "reason": "nothing fits"},
        {"round": 3, "client": 6, "status": "accepted", "submodel": "width-0.25"},
    ]
    assert submodel_accuracy(RunRecords(rounds, rows)) == pytest.approx(0.7)
    never = {"round": 2, "client": 3, "status": "accepted", "submodel": "never-tested"}
    assert submodel_accuracy(RunRecords(rounds, [*rows, never])) == pytest.approx(0.7)
    assert submodel_accuracy(RunRecords(rounds, [*rows, *[never] * 4])) is None


def test_figures_about_edges_are_means_over_the_rounds_that_have_them() -> None:
    edges = [{"cost": 0.8, "healthy": 1.0, "divergence_mean": None}, {"cost": 1.0, "healthy": 0.5}]
    rounds = [round_record(0, 0.1), *(round_record(i + 1, 0.5, edges=each) for i, each in enumerate(edges))]
    found = values_of(RunRecords(rounds), ["edge-cost", "edges-met", "divergence", "quorum"])
    assert found == {"edge-cost": 0.9, "edges-met": 0.75, "divergence": None, "quorum": None}
    assert set(values_of(RunRecords([round_record(1, 0.5)]), ["edge-cost", "edges-met"]).values()) == {None}


def test_own_tests_are_those_of_the_last_evaluated_round() -> None:
    rounds = [
        round_record(1, 0.5, own_tests={"mean": 0.4, "worst-10": 0.1, "spread": 0.2}),
        round_record(
            2, 0.6, own_tests={"mean": 0.6, "worst-10": 0.3, "spread": 0.1}, own_tests_after={"mean": 0.9}
        ),
        round_record(3, None),
    ]
    names = ["own-tests", "own-tests-worst", "own-tests-spread", "own-models", "own-models-worst"]
    assert list(values_of(RunRecords(rounds), names).values()) == [0.6, 0.3, 0.1, 0.9, None]


def test_models_that_differ_between_clients_count_alike_and_one_for_all_counts_as_it_is() -> None:
    rounds = [
        round_record(1, 0.1, submodels={"client-0": 0.9}),
        round_record(2, 0.1, submodels={"client-0": 0.5, "client-12": 0.7, "width-0.5": 0.2}),
    ]
    assert clients_accuracy(RunRecords(rounds)) == pytest.approx(0.6)
    assert clients_accuracy(RunRecords([round_record(1, 0.4, submodels={"width-0.5": 0.2})])) == 0.4
    assert clients_accuracy(RunRecords([])) is None


def test_the_last_figure_that_a_strategy_tells_counts() -> None:
    rounds = [round_record(i, 0.5, diagnostics=d) for i, d in enumerate([{}, {"selection-entropy": 2.0}, {}])]
    assert values_of(RunRecords(rounds), ["selection-entropy"]) == {"selection-entropy": 2.0}
    assert values_of(RunRecords(rounds[:1]), ["selection-entropy"]) == {"selection-entropy": None}


def test_metrics_that_compare_are_known_and_come_from_others() -> None:
    assert set(COMPARED) == {name for name, metric in METRICS.items() if metric.of is None}
    _, drop = COMPARED["drop"]
    source, saved = COMPARED["saved-up"]
    assert drop(0.9, 0.7) == pytest.approx(0.2)
    assert source == "megabytes-up"
    assert saved(4.0, 1.0) == 0.75
    assert saved(0.0, 0.0) is None


def test_utilisation_is_of_the_tighter_limit_and_nothing_for_those_who_do_not_deliver() -> None:
    device = {"outcome": "delivered", "memory_bytes": 1, "memory_budget": 4, "seconds": 8.0}
    rows = [
        {"device": device},
        {"device": {**device, "memory_bytes": 4}},
        {"device": {**device, "outcome": "late"}},
        {"reason": "nothing fits"},
    ]
    assert utilisation(RunRecords([], rows, deadline_s=10.0)) == pytest.approx((0.8 + 1.0) / 4)
    assert utilisation(RunRecords([], rows)) == pytest.approx((0.25 + 1.0) / 4)
    assert utilisation(RunRecords([], [{"status": "accepted"}])) is None


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_every_metric_says_what_it_is(metric: object) -> None:
    assert isinstance(metric, type(METRICS["accuracy"]))
    assert metric.heading
    assert metric.explanation
    assert metric.better in ("", "higher", "lower")
