import json
from pathlib import Path

import pytest

from fedplat.results.summary import short_reason, strategy_summary, summarise, write_summary

from . import NAN, client_record, make_run, round_record


def test_headline_is_the_last_evaluation_and_not_the_best_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.9, 0.5, 0.4, 0.6]})
    row = summarise(folder)["strategies"]["mean"]
    assert row["accuracy"] == 0.6
    assert row["best_over_rounds"] == {"accuracy": 0.9, "round": 1}
    assert row["accuracy_mean_of_last"] == pytest.approx((0.9 + 0.5 + 0.4 + 0.6) / 4)
    assert row["worst_class"] == {"class": 1, "accuracy": 0.3}
    named = strategy_summary(folder.rounds("mean"), ["cat", "dog"])
    assert named["worst_class"] == {"class": 1, "name": "dog", "accuracy": 0.3}


def test_rounds_without_an_evaluation_are_passed_over() -> None:
    records = [round_record(n, 0.1 * n if n % 2 == 0 else None) for n in range(8)]
    row = strategy_summary(records)
    assert row["evaluated_after_round"] == 6
    assert row["accuracy"] == pytest.approx(0.6)
    assert row["accuracy_mean_of_last"] == pytest.approx(0.4)
    assert row["mean_is_over"] == 3
    assert not row["diverged"]


def test_times_bytes_and_weights_are_per_training_round() -> None:
    row = strategy_summary([round_record(n, 0.5) for n in range(5)])
    assert row["seconds"]["total"] == pytest.approx(4 * 2.75 + 0.25)
    assert row["seconds"]["per_round"] == {"all": 2.75, "train": 2.0, "aggregate": 0.5, "evaluate": 0.25}
    assert (row["bytes_down"], row["bytes_up"]) == (4_000_000, 8_000_000)
    assert row["attackers_weight"] == 0.25


@pytest.mark.parametrize("bad", [NAN, None])
def test_a_diverged_strategy_is_marked_and_leaves_valid_json(tmp_path: Path, bad: float | None) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.1]}, loss=bad)  # type: ignore[arg-type]
    write_summary(folder)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    assert summary["strategies"]["mean"]["loss"] is None
    assert summary["strategies"]["mean"]["diverged"] is True


def test_a_strategy_that_never_began_has_no_figures(tmp_path: Path) -> None:
    summary = summarise(make_run(tmp_path / "run", {"mean": [0.1, 0.2], "median": []}, finished=False))
    assert summary["finished"] is False
    assert summary["strategies"]["median"]["accuracy"] is None
    assert summary["strategies"]["median"]["rounds"] == 0
    assert summary["strategies"]["median"]["seconds"]["per_round"]["train"] is None


def test_replies_left_out_are_grouped_by_client_and_first_line_of_the_reason(tmp_path: Path) -> None:
    rows = [client_record(n, 1, "failed", f"ValueError: no\nTraceback, line {n}") for n in (1, 2, 4)]
    rows += [client_record(3, 1, "refused", "'num-examples' is 1000000000000, expected 1 to 1438")]
    rows += [client_record(2, 3, "refused", "numbers that are not finite"), client_record(2, 0)]
    summary = summarise(
        make_run(tmp_path / "run", {"mean": [0.1, 0.2, 0.2, 0.2, 0.2]}, clients={"mean": rows})
    )
    assert summary["left_out"]["mean"] == [
        {
            "client": 1, "attacker": False, "refused": 1, "failed": 3, "first_round": 1, "last_round": 4,
            "reasons": [
                {"reason": "ValueError: no", "rounds": 3, "first_round": 1, "last_round": 4},
                {
                    "reason": "'num-examples' is 1000000000000, expected 1 to 1438", "rounds": 1,
                    "first_round": 3, "last_round": 3,
                },
            ],
        },
        {
            "client": 3, "attacker": True, "refused": 1, "failed": 0, "first_round": 2, "last_round": 2,
            "reasons": [
                {"reason": "numbers that are not finite", "rounds": 1, "first_round": 2, "last_round": 2}
            ],
        },
    ]  # fmt: skip
    assert (summary["strategies"]["mean"]["refused"], summary["strategies"]["mean"]["failed"]) == (2, 3)


def test_a_long_reason_is_cut() -> None:
    assert len(short_reason("x" * 1000)) == 160
    assert short_reason("") == ""
