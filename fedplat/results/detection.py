"""How well a rule told attackers from honest clients in one round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED, is_malicious

Row = Mapping[str, Any]


def detection(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the detection figures of a round from its rows of ``clients.jsonl``.

    A rule *flags* the clients it calls malicious; one that gives no verdicts flags those whose reply has no
    weight in the new model. A reply that was refused is flagged, one that failed is not counted. Unreliable
    clients are not malicious, so flagging one is a false positive. ``by_kind`` compares the verdict itself
    with what a client is, ``by_attack`` tells how many clients of each attack had no weight. A rate whose
    denominator is zero is None.

    >>> rows = [
    ...     {"status": "accepted", "truth": "malicious-targeted", "weight": 0.0, "verdict": ""},
    ...     {"status": "accepted", "truth": "honest", "weight": 0.5, "verdict": ""},
    ...     {"status": "accepted", "truth": "honest", "weight": 0.0, "verdict": ""},
    ... ]
    >>> found = detection(rows)
    >>> found["precision"], found["recall"], found["false_positive_rate"]
    (0.5, 1.0, 0.5)
    """
    judged = [row for row in rows if row["status"] != "failed"]
    gives_verdicts = any(row["verdict"] for row in judged)

    def flagged(row: Row) -> bool:
        if gives_verdicts and row["status"] == "accepted":
            return is_malicious(row["verdict"])
        return bool(row["weight"] == 0)

    wrong = [row for row in judged if is_malicious(row["truth"])]
    right = [row for row in judged if not is_malicious(row["truth"])]
    caught, accused = sum(map(flagged, wrong)), sum(map(flagged, right))
    figures: dict[str, Any] = {
        "flagged": caught + accused,
        **rates(caught, caught + accused, len(wrong)),
        "false_positive_rate": ratio(accused, len(right)),
        "false_negative_rate": ratio(len(wrong) - caught, len(wrong)),
        "honest_left_out": ratio(
            sum(row["weight"] == 0 for row in judged if row["truth"] == HONEST),
            sum(row["truth"] == HONEST for row in judged),
        ),
        "every_attacker_out": bool(wrong) and all(row["weight"] == 0 for row in wrong),
    }
    if gives_verdicts:
        figures["by_kind"] = {
            kind: rates(
                sum(row["verdict"] == kind == row["truth"] for row in judged),
                sum(row["verdict"] == kind for row in judged),
                sum(row["truth"] == kind for row in judged),
            )
            for kind in (UNRELIABLE, UNTARGETED, TARGETED)
        }
    attacks = dict.fromkeys(row["attack"] for row in judged if row.get("attack"))
    figures["by_attack"] = {
        name: _left_out(row for row in judged if row["attack"] == name) for name in attacks
    }
    return figures


def rates(hits: int, positives: int, relevant: int) -> dict[str, float | None]:
    """Return precision hits / positives, recall hits / relevant, and their harmonic mean.

    >>> rates(3, 4, 6)
    {'precision': 0.75, 'recall': 0.5, 'f1': 0.6}
    """
    return {
        "precision": ratio(hits, positives),
        "recall": ratio(hits, relevant),
        "f1": ratio(2 * hits, positives + relevant),
    }


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, None if the whole is zero."""
    return part / whole if whole else None


def _left_out(rows: Iterable[Row]) -> dict[str, int]:
    weights = [row["weight"] for row in rows]
    return {"clients": len(weights), "left_out": sum(weight == 0 for weight in weights)}
