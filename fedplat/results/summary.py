"""What a run came to: the figures that the tables and the report are made of, from the records on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError
from .edges import edges_summary
from .folder import RunFolder, write_json
from .simulated import add_target, device_clients, missed, simulated_summary
from .values import finite, mean

Record = dict[str, Any]

_LAST = 5
_RATES = ("precision", "recall", "f1", "false_positive_rate", "false_negative_rate", "honest_left_out")
_REASON_LENGTH = 160
_VERSIONS = ("fedplat", "commit", "python", "flwr", "torch", "torchvision", "numpy", "scikit-learn")


def write_summary(folder: RunFolder, clean: RunFolder | None = None) -> Record:
    """Write ``summary.json`` into a run folder and return what it says; losses are against ``clean``."""
    summary = summarise(folder)
    if clean is not None:
        add_clean_run(summary, folder, clean)
    write_json(folder.path / "summary.json", summary)
    return summary


def summarise(folder: RunFolder) -> Record:
    """Return the summary of a run, finished or not, as plain values.

    Accuracies and weights are shares between 0 and 1, seconds are wall time, bytes are those of the arrays
    sent. A figure that is not known, or not finite because a strategy diverged, is None. Under "simulated"
    are figures of emulated devices, and ``target`` is the accuracy whose cost is compared, None without.
    """
    config, classes = folder.config, folder.environment.get("classes", ())
    strategies = {}
    left_out, devices = {}, {}
    for name in config.strategies:
        strategies[name] = strategy_summary(folder.rounds(name), classes) | {
            "finished": folder.log(name).finished
        }
        left_out[name] = replies_left_out(folder.clients(name))
        devices[name] = device_clients(folder.clients(name)) if strategies[name]["simulated"] else []
    return {
        "scenario": config.name,
        "description": config.description,
        "digest": config.digest(),
        "seed": config.seed,
        "rounds": config.rounds,
        "finished": all(row["finished"] for row in strategies.values()),
        "versions": {key: folder.environment[key] for key in _VERSIONS if folder.environment.get(key)},
        "target": add_target(strategies),
        "strategies": strategies,
        "left_out": left_out,
        **({"devices": devices} if any(devices.values()) else {}),
    }


def add_clean_run(summary: Record, folder: RunFolder, clean: RunFolder) -> None:
    """Add each strategy's ``accuracy_loss`` against the same strategy in a run without attackers.

    Raises UserError unless the two runs differ in nothing but attacks, strategies and name.
    """
    here, there = folder.config.to_dict(), clean.config.to_dict()
    aside = {"name", "description", "attacks", "strategies", "strategy", "timeout"}
    differing = sorted(
        k for k in here.keys() | there.keys() if k not in aside and here.get(k) != there.get(k)
    )
    if differing:
        raise UserError(f"{clean.path} is another situation: it differs in {', '.join(differing)}")
    if there.get("attacks"):
        raise UserError(f"{clean.path} is no clean run: it has attackers")
    others = summarise(clean)["strategies"]
    for name, row in summary["strategies"].items():
        same = name in others and _settings_of(here, name) == _settings_of(there, name)
        reached = others[name]["accuracy"] if same else None
        if reached is not None and row["accuracy"] is not None:
            row["accuracy_loss"] = reached - row["accuracy"]
    summary["clean_run"] = str(clean.path)


def _settings_of(config: Record, strategy: str) -> Record:
    settings: Record = (config.get("strategy") or {}).get(strategy) or {}
    return settings


def strategy_summary(records: Sequence[Record], classes: Sequence[str] = ()) -> Record:
    """Return the figures of one strategy from its ``rounds.jsonl``.

    ``accuracy``, ``loss`` and ``worst_class`` are those of the last evaluation. ``best_over_rounds`` is
    chosen by looking at the test set, so it is no estimate of what the strategy reaches. ``attackers_weight``
    is the mean over the rounds of the share of the new model that came from attackers, ``attack_success`` the
    rate of each attack at the last evaluation, ``detection`` see :func:`_detection`, ``epsilon`` the privacy
    spent by the end. ``own_tests`` and ``own_tests_after`` are means, worst tenths and spreads over the
    clients at the last evaluation, {} without own tests. ``simulated`` see
    :func:`~fedplat.results.simulated.simulated_summary`.
    """
    trained = [record for record in records if record["round"] > 0]
    evaluated = [record for record in records if record.get("accuracy") is not None]
    last: Record = evaluated[-1] if evaluated else {}
    seconds: Counter[str] = Counter()
    for record in records:
        seconds.update(
            {phase: value for phase, value in record["seconds"].items() if finite(value) is not None}
        )
    late = [record["accuracy"] for record in evaluated if record["round"] > 0][-_LAST:]
    best = max(evaluated, key=lambda record: finite(record["accuracy"]) or 0.0, default={})
    return {
        "rounds": records[-1]["round"] if records else 0,
        "evaluated_after_round": last.get("round"),
        "accuracy": finite(last.get("accuracy")),
        "accuracy_mean_of_last": mean(late),
        "mean_is_over": len(late),
        "best_over_rounds": {"accuracy": finite(best.get("accuracy")), "round": best.get("round")},
        "loss": finite(last.get("loss")),
        "diverged": any(finite(record.get("loss")) is None for record in evaluated),
        "worst_class": _worst_class(last.get("per_class_accuracy"), classes),
        "attackers_weight": mean(
            record["attack"].get("weight") for record in trained if record.get("attack")
        ),
        "attack_success": {
            name: finite(rate) for name, rate in (last.get("attack") or {}).get("success", {}).items()
        },
        "detection": _detection(trained),
        "own_tests": {key: finite(value) for key, value in (last.get("own_tests") or {}).items()},
        "own_tests_after": {key: finite(value) for key, value in (last.get("own_tests_after") or {}).items()},
        "epsilon": next((e for e in map(_epsilon, reversed(trained)) if e is not None), None),
        "refused": sum(record["refused"] for record in trained),
        "failed": sum(record["failed"] for record in trained),
        "seconds": {
            "total": sum(seconds.values()),
            "per_round": {
                "all": _per(sum(sum(record["seconds"].values()) for record in trained), len(trained)),
                "train": _per(seconds["train"], len(trained)),
                "aggregate": _per(seconds["aggregate"], len(trained)),
                "evaluate": _per(seconds["evaluate"] + seconds["evaluate-clients"], len(evaluated)),
            },
        },
        "bytes_down": sum(record["bytes_down"] for record in trained),
        "bytes_up": sum(record["bytes_up"] for record in trained),
        "simulated": simulated_summary(records),
        **({"edges": edges} if (edges := edges_summary(records)) else {}),
    }


def replies_left_out(rows: Iterable[Record]) -> list[Record]:
    """Return who had replies refused or failed, in how many rounds and why, by client.

    What an emulated device did not deliver has one reason for all rounds, such as "late", since the numbers
    in it differ every time.
    """
    found: dict[int, Record] = {}
    for row in rows:
        if row["status"] not in ("refused", "failed"):
            continue
        client = found.setdefault(
            row["client"],
            {"client": row["client"], "attacker": bool(row.get("attack")), "refused": 0, "failed": 0}
            | {"first_round": row["round"], "reasons": {}},
        )
        client[row["status"]] += 1
        client["last_round"] = row["round"]
        reason = missed(row) or short_reason(row.get("reason") or row["status"])
        of_reason = client["reasons"].setdefault(
            reason, {"reason": reason, "rounds": 0, "first_round": row["round"]}
        )
        of_reason |= {"rounds": of_reason["rounds"] + 1, "last_round": row["round"]}
    for client in found.values():
        client["reasons"] = sorted(client["reasons"].values(), key=lambda item: -item["rounds"])
    return [found[number] for number in sorted(found)]


def short_reason(reason: str) -> str:
    """Return the first line of a reason, cut to a length that fits a table.

    >>> short_reason("ValueError: no data\\nTraceback (most recent call last): ...")
    'ValueError: no data'
    """
    lines = reason.strip().splitlines() or [""]
    line = lines[0].strip()
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1].rstrip() + "…"


def _detection(trained: Sequence[Record]) -> Record:
    """Return detection figures: rates as means over the last 5 rounds, and when every attacker was out.

    ``first_all_out`` is the first round in which no attacker had any weight, ``all_out_since`` the one from
    which that stayed so to the end. Nothing is said of a rule that never flagged anybody.
    """
    rounds = [(record["round"], record["detection"]) for record in trained if record.get("detection")]
    if not any(found["flagged"] for _, found in rounds):
        return {}
    late = [found for _, found in rounds[-_LAST:]]
    out = [(number, found["every_attacker_out"]) for number, found in rounds]
    since = None
    for number, all_out in reversed(out):
        if not all_out:
            break
        since = number
    return {
        **{key: mean(found[key] for found in late) for key in _RATES},
        "first_all_out": next((number for number, all_out in out if all_out), None),
        "all_out_since": since,
        "last": late[-1],
    }


def _epsilon(record: Record) -> float | None:
    return finite((record.get("diagnostics") or {}).get("epsilon"))


def _per(total: float, count: int) -> float | None:
    return total / count if count else None


def _worst_class(recalls: Sequence[float | None] | None, classes: Sequence[str]) -> Record | None:
    known = [(value, label) for label, value in enumerate(recalls or ()) if finite(value) is not None]
    if not known:
        return None
    value, label = min(known)
    name = {"name": classes[label]} if label < len(classes) else {}
    return {"class": label, **name, "accuracy": value}
