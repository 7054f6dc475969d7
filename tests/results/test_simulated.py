import json
from pathlib import Path
from typing import Any

import pytest

from fedplat.results.client_figure import score_names
from fedplat.results.simulated import Progress, add_target, device_clients, missed, simulated_summary, worst
from fedplat.results.summary import replies_left_out, strategy_summary, summarise, write_summary

from . import NAN, client_record, make_run, round_record
from .device_records import device_record, make_device_run, simulated


def records(accuracies: list[float | None], **changes: Any) -> list[dict[str, Any]]:
    return [
        round_record(n, accuracy, simulated=simulated(n, **(changes if n else {})))
        for n, accuracy in enumerate(accuracies)
    ]


def test_totals_and_counts_are_sums_and_shares_are_means_over_the_rounds() -> None:
    rows = records([0.1, 0.3, 0.4])
    rows[2]["simulated"] |= {"seconds": 30.0, "late": 3, "memory_used": 1.0, "down_used": None}
    found = simulated_summary(rows)
    assert (found["seconds"], found["per_round_seconds"]) == (90.0, 45.0)
    assert (found["joules"], found["joules_compute"], found["joules_transfer"]) == (1000.0, 800.0, 200.0)
    assert {key: found[key] for key in ("asked", "delivered", "late", "out_of_memory", "violations")} == {
        "asked": 8, "delivered": 6, "late": 4, "out_of_memory": 0, "violations": 2,
    }  # fmt: skip
    assert (found["memory_used"], found["down_used"], found["up_used"]) == (0.75, 0.25, 0.75)
    assert found["available"] == 4


def test_a_run_without_devices_has_no_simulated_figures(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "run", {"mean": [0.1, 0.9]}))
    assert summary["strategies"]["mean"]["simulated"] == {}
    assert summary["target"] is None
    assert "devices" not in summary


def test_simulated_and_wall_time_are_not_mixed() -> None:
    plain = strategy_summary([round_record(n, 0.5) for n in range(3)])
    on_devices = strategy_summary(records([0.5, 0.5, 0.5]))
    assert on_devices["seconds"] == plain["seconds"]
    assert on_devices["simulated"]["seconds"] == 120.0


def test_costs_to_an_accuracy_are_those_of_the_first_evaluation_that_reaches_it() -> None:
    found = simulated_summary(records([0.1, None, 0.8, 0.4, 0.95]))
    assert found["reached"] == [
        {"accuracy": 0.5, "round": 2, "seconds": 120.0, "joules": 1000.0, "bytes": 6e6},
        {"accuracy": 0.7, "round": 2, "seconds": 120.0, "joules": 1000.0, "bytes": 6e6},
        {"accuracy": 0.8, "round": 2, "seconds": 120.0, "joules": 1000.0, "bytes": 6e6},
        {"accuracy": 0.9, "round": 4, "seconds": 240.0, "joules": 2000.0, "bytes": 12e6},
        {"accuracy": 0.95, "round": 4, "seconds": 240.0, "joules": 2000.0, "bytes": 12e6},
    ]
    assert simulated_summary(records([0.6]))["reached"][0]["seconds"] == 0


def test_the_target_is_the_highest_that_all_reached_but_for_those_that_reached_none() -> None:
    rows = {
        "good": strategy_summary(records([0.1, 0.6, 0.96])),
        "fair": strategy_summary(records([0.1, 0.75, 0.6])),
        "broken": strategy_summary(records([0.1, 0.2, NAN])),
        "never began": strategy_summary([]),
    }
    assert add_target(rows) == 0.7
    assert rows["good"]["simulated"]["to_target"]["round"] == 2
    assert rows["fair"]["simulated"]["to_target"]["round"] == 1
    assert rows["broken"]["simulated"]["to_target"] is None
    assert rows["never began"]["simulated"] == {}
    assert add_target({"broken": strategy_summary(records([0.1, 0.2]))}) is None


@pytest.mark.parametrize("endless", [None, NAN, float("inf")])
def test_a_round_that_never_ends_leaves_no_total_and_valid_json(
    tmp_path: Path, endless: float | None
) -> None:
    rows = records([0.1, 0.6, 0.96])
    rows[2]["simulated"]["seconds"] = endless
    found = simulated_summary(rows)
    assert found["seconds"] is None
    assert found["per_round_seconds"] is None
    assert found["joules"] == 1000.0
    assert [cost["seconds"] for cost in found["reached"]] == [60.0, None, None, None, None]
    assert Progress.of(rows).seconds == [0.0, 60.0, None]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [("late", "late"), ("out-of-memory", "out of memory"), ("dropped", "dropped"), ("away", "away")],
)
def test_what_a_device_did_not_deliver_is_one_word(outcome: str, word: str) -> None:
    row = device_record(3, 1, outcome)
    assert missed(row) == word
    del row["device"]
    assert missed(row) == word


def test_other_failures_keep_their_reasons() -> None:
    assert missed(device_record(1, 1, "failed")) is None
    assert missed(device_record(1, 1)) is None
    assert missed(client_record(1, 1, "failed", "lateral thinking failed")) is None
    # A reply that came, and was refused, did not fail on its device.
    assert missed(device_record(1, 1) | {"status": "refused", "reason": "late: no"}) is None


def test_reasons_that_differ_in_their_numbers_only_are_one() -> None:
    rows = [device_record(n, 2, "late") for n in range(1, 51)]
    rows += [device_record(7, 1, "failed"), device_record(60, 2, "out-of-memory")]
    first, second = replies_left_out(rows)
    assert [item["reason"] for item in first["reasons"]] == ["ValueError: no data"]
    assert second["failed"] == 51
    assert second["reasons"] == [
        {"reason": "late", "rounds": 50, "first_round": 1, "last_round": 50},
        {"reason": "out of memory", "rounds": 1, "first_round": 60, "last_round": 60},
    ]


def test_clients_are_told_by_what_their_devices_did_and_lacked() -> None:
    rows = [device_record(n, 0, "late") for n in (1, 2)] + [device_record(3, 0)]
    rows += [device_record(n, 1, "out-of-memory") for n in (1, 2, 3)]
    rows += [device_record(1, 2), device_record(2, 2, "failed"), client_record(1, 3)]
    clients = device_clients(rows)
    assert [client["client"] for client in clients] == [0, 1, 2]
    counts = {"late": 2, "out_of_memory": 0, "dropped": 0, "away": 0}
    assert clients[0] == {
        "client": 0, "asked": 3, "delivered": 1, **counts,
        "why": {"seconds": 60.0, "seconds_down": 5.0, "seconds_compute": 40.0, "seconds_up": 15.0},
    }  # fmt: skip
    assert clients[1]["why"] == {"memory_bytes": 320_000_000, "memory_budget": 200_000_000}
    assert [client["client"] for client in worst(clients)] == [1, 0]
    assert [client["client"] for client in worst(clients, 1)] == [1]


def test_the_device_of_a_client_is_no_score() -> None:
    assert score_names([device_record(1, 0)]) == []


def test_the_summary_of_a_run_on_devices_is_written(tmp_path: Path) -> None:
    folder = make_device_run(
        tmp_path / "run", {"mean": [0.1, 0.92]}, lambda c, n: "late" if c == 1 else "delivered"
    )
    write_summary(folder)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["target"] == 0.9
    assert summary["strategies"]["mean"]["simulated"]["to_target"]["seconds"] == 60.0
    assert [client["late"] for client in summary["devices"]["mean"]] == [0, 1, 0, 0]
