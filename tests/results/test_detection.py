from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedplat.evaluation import success_rate
from fedplat.results.detection import detection, rates
from fedplat.results.summary import strategy_summary
from fedplat.verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED

from . import round_record


def row(
    truth: str, weight: float, verdict: str = "", status: str = "accepted", attack: str = ""
) -> dict[str, Any]:
    return {"truth": truth, "weight": weight, "verdict": verdict, "status": status, "attack": attack}


def test_a_rule_without_verdicts_flags_whom_it_gives_no_weight() -> None:
    found = detection(
        [
            row(UNTARGETED, 0, attack="sign-flip"),
            row(UNTARGETED, 0.2, attack="sign-flip"),
            row(TARGETED, 0, attack="label-flip"),
            row(UNRELIABLE, 0, attack="blur"),
            row(HONEST, 0.4),
            row(HONEST, 0.4),
        ]
    )
    assert found["flagged"] == 3
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == pytest.approx(2 / 3)
    assert found["false_positive_rate"] == pytest.approx(1 / 3)  # an unreliable client is not malicious
    assert found["false_negative_rate"] == pytest.approx(1 / 3)
    assert found["honest_left_out"] == 0
    assert not found["every_attacker_out"]
    assert found["by_attack"] == {
        "sign-flip": {"clients": 2, "left_out": 1},
        "label-flip": {"clients": 1, "left_out": 1},
        "blur": {"clients": 1, "left_out": 1},
    }
    assert "by_kind" not in found


def test_verdicts_are_judged_by_kind() -> None:
    found = detection(
        [
            row(UNTARGETED, 0, UNTARGETED),
            row(TARGETED, 0, UNTARGETED),
            row(TARGETED, 0.3, HONEST),
            row(UNRELIABLE, 0.1, UNRELIABLE),
            row(HONEST, 0.6, UNRELIABLE),
        ]
    )
    assert (found["precision"], found["recall"]) == (1, pytest.approx(2 / 3))
    assert found["by_kind"][UNTARGETED] == {"precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3)}
    assert found["by_kind"][TARGETED] == {"precision": None, "recall": 0, "f1": 0}
    assert found["by_kind"][UNRELIABLE] == {"precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3)}


def test_a_refused_reply_is_flagged_and_a_failed_one_not_counted() -> None:
    found = detection([row(UNTARGETED, 0, status="refused"), row(HONEST, 0, status="failed"), row(HONEST, 1)])
    assert (found["precision"], found["recall"], found["honest_left_out"]) == (1, 1, 0)
    assert found["every_attacker_out"]


def test_without_attackers_there_is_no_recall_and_nobody_counts_as_out() -> None:
    found = detection([row(HONEST, 0.5), row(HONEST, 0.5)])
    assert (found["precision"], found["recall"], found["every_attacker_out"]) == (None, None, False)
    assert rates(0, 0, 0) == {"precision": None, "recall": None, "f1": None}


def test_success_is_relative_to_all_samples_of_the_sources() -> None:
    confusion = np.array([[8, 2, 0], [5, 3, 1], [0, 0, 10]])
    support = np.array([10, 10, 10])  # one sample of class 1 has no prediction
    assert success_rate({1: 0}, confusion, support) == 0.5
    assert success_rate({1: 0, 0: 1, 2: 2}, confusion, support) == 0.35
    assert np.isnan(success_rate({1: 1}, confusion, support))


def test_a_summary_tells_since_when_every_attacker_is_out() -> None:
    out = [False, True, False, True, True, True]
    rows = [
        [row(UNTARGETED, 0 if gone else 0.1), row(HONEST, 0.5), row(HONEST, 0 if gone else 0.4)]
        for gone in out
    ]
    records = [round_record(n, 0.5, detection=detection(found)) for n, found in enumerate(rows, start=1)]
    found = strategy_summary(records)["detection"]
    assert (found["first_all_out"], found["all_out_since"]) == (2, 4)
    assert found["recall"] == pytest.approx(4 / 5)  # over the last 5 rounds
    assert found["precision"] == pytest.approx(0.5)
    assert strategy_summary([round_record(1, 0.5, detection=detection(rows[0]))])["detection"] == {}
