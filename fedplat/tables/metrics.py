"""The figures that a table can show of a run: each is a function of what the run left in its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..results.summary import strategy_summary
from ..results.values import finite, mean

Record = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecords:
    """One strategy's run: the lines of ``rounds.jsonl`` and ``clients.jsonl``, the number of clients, and
    the deadline of a round in simulated seconds, if there is one."""

    rounds: Sequence[dict[str, Any]]
    clients: Sequence[Record] = ()
    num_clients: int = 0
    deadline_s: float | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return the figures of the usual comparison."""
        return strategy_summary(self.rounds)

    @property
    def simulated(self) -> dict[str, Any]:
        """Return the figures of emulated devices, {} without any."""
        found: dict[str, Any] = self.summary["simulated"]
        return found


@dataclass(frozen=True)
class Metric:
    """A figure: its heading, unit, how it is written, and whether more of it is ``higher`` or ``lower`` best.

    ``of`` gives it for a run, None if the run does not say; without ``of`` it is made from other cells, see
    :data:`COMPARED`.
    """

    heading: str
    unit: str
    explanation: str
    of: Callable[[RunRecords], float | None] | None
    better: str = ""
    scale: float = 1.0
    digits: int = 2

    @property
    def title(self) -> str:
        """Return heading and unit."""
        return f"{self.heading}, {self.unit}" if self.unit else self.heading

    def text(self, value: float) -> str:
        """Return a value as it is shown."""
        shown = value * self.scale
        return f"{shown:,.{self.digits}f}" if abs(shown) < 1e5 else f"{shown:.2e}"


def _accuracy(run: RunRecords) -> float | None:
    return finite(run.summary["accuracy"])


def _success(run: RunRecords) -> float | None:
    known = [rate for rate in run.summary["attack_success"].values() if rate is not None]
    return max(known, default=None)


def _found(key: str) -> Callable[[RunRecords], float | None]:
    return lambda run: finite(run.summary["detection"].get(key))


def _simulated(key: str, factor: float = 1.0) -> Callable[[RunRecords], float | None]:
    def value(run: RunRecords) -> float | None:
        found = finite(run.simulated.get(key))
        return None if found is None else found * factor

    return value


def _edges(key: str) -> Callable[[RunRecords], float | None]:
    """Return what gives the mean over the rounds of a figure about edges; None for a run without edges."""
    return lambda run: mean(record["edges"].get(key) for record in run.rounds if record.get("edges"))


def _decision_ms(run: RunRecords) -> float | None:
    seconds = mean(record["seconds"].get("decide") for record in run.rounds)
    return None if seconds is None else 1000 * seconds


def _megabytes(*ways: str) -> Callable[[RunRecords], float | None]:
    def value(run: RunRecords) -> float | None:
        return sum(run.summary[way] for way in ways) / run.num_clients / 1e6 if run.num_clients else None

    return value


def _own(models: str, key: str) -> Callable[[RunRecords], float | None]:
    """Return what gives a figure over the clients' own tests, of the global model or the clients' own."""
    return lambda run: finite(run.summary[models].get(key))


def _less(before: float, now: float) -> float:
    return before - now


def _saved(before: float, now: float) -> float | None:
    return 1 - now / before if before else None


def submodel_accuracy(run: RunRecords) -> float | None:
    """Return the mean over the clients of the last evaluated round of the accuracy of what each had.

    That is the accuracy of its level: which units of a level a client had is not looked at. Clients whose
    sub-model was not measured are left out, and None is returned if they are the most.

    >>> rounds = [{"round": 1, "accuracy": 0.8, "submodels": {"width-0.5": 0.6}}]
    >>> rows = [{"round": 1, "client": 0, "status": "accepted", "submodel": "width-0.5"},
    ...         {"round": 1, "client": 1, "status": "accepted"}]
    >>> submodel_accuracy(RunRecords(rounds, rows))
    0.7
    """
    evaluated = [record for record in run.rounds if record.get("accuracy") is not None]
    if not evaluated:
        return None
    whole = evaluated[-1]["accuracy"]
    levels = {"full": whole, "width-1": whole, **evaluated[-1].get("submodels", {})}
    held = [
        _level(row.get("submodel", "full"))
        for row in run.clients
        if row["round"] == evaluated[-1]["round"] and row["status"] == "accepted"
    ]
    known = [value for level in held if (value := finite(levels.get(level))) is not None]
    return mean(known) if 2 * len(known) > len(held) else None


def _level(kind: str) -> str:
    """Return the level of a client's sub-model, whose kind may also say which part of it, or whose.

    >>> _level("width-0.5@3,17"), _level("width-0.25/client-4"), _level("full")
    ('width-0.5', 'width-0.25', 'full')
    """
    return kind.partition("@")[0].partition("/")[0]


def utilisation(run: RunRecords) -> float | None:
    """Return the share used of a client's tighter limit, memory or deadline: a mean over clients and rounds.

    A client that was asked and did not deliver has used nothing; None for a run without emulated devices.

    >>> rows = [{"status": "accepted", "device": {"memory_bytes": 3, "memory_budget": 4, "seconds": 2.0,
    ...                                            "outcome": "delivered"}},
    ...         {"status": "failed", "reason": "nothing fits"}]
    >>> utilisation(RunRecords([], rows, deadline_s=10.0))
    0.375
    """
    if not any(row.get("device") for row in run.clients):
        return None
    return mean(_tighter(row.get("device"), run.deadline_s) for row in run.clients)


def _tighter(device: Record | None, deadline: float | None) -> float:
    if device is None or device["outcome"] != "delivered":
        return 0.0
    shares = [device["memory_bytes"] / device["memory_budget"] if device["memory_budget"] else 0.0]
    if deadline:
        shares.append((finite(device["seconds"]) or 0.0) / deadline)
    return max(shares)


def clients_accuracy(run: RunRecords) -> float | None:
    """Return the mean over clients of the accuracy, on the test set, of the model that each would use.

    Where clients differ (FedBN's norms) that is told per client; elsewhere it is the global model.

    >>> clients_accuracy(RunRecords([{"accuracy": 0.1, "submodels": {"client-0": 0.5, "client-1": 0.7}}]))
    0.6
    """
    last: Record = next((record for record in reversed(run.rounds) if record.get("accuracy") is not None), {})
    own = [finite(v) for name, v in last.get("submodels", {}).items() if name.startswith("client-")]
    return mean(own) if own else finite(last.get("accuracy"))


def _diagnostic(name: str) -> Callable[[RunRecords], float | None]:
    """Return what gives the last value that a strategy told of itself under a name."""
    return lambda run: next(
        (finite(r["diagnostics"][name]) for r in reversed(run.rounds) if name in r.get("diagnostics", {})),
        None,
    )


def _seconds(run: RunRecords) -> float | None:
    return finite(run.summary["seconds"]["per_round"]["all"])


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        "accuracy", "%", "of the model after the last round, on the test set", _accuracy, "higher", 100
    ),
    "accuracy-last": Metric(
        "accuracy, mean of the last rounds", "%", "over the last 5 evaluations",
        lambda run: finite(run.summary["accuracy_mean_of_last"]), "higher", 100,
    ),
    "accuracy-best": Metric(
        "best accuracy", "%",
        "over the rounds; picked by looking at the test set, so it says nothing about what is reached",
        lambda run: finite(run.summary["best_over_rounds"]["accuracy"]), "higher", 100,
    ),
    "worst-class": Metric(
        "worst class", "%", "accuracy on the class with the lowest",
        lambda run: finite((run.summary["worst_class"] or {}).get("accuracy")), "higher", 100,
    ),
    "clients-accuracy": Metric(
        "accuracy of clients' models", "%",
        "mean over clients of the model that each would use, on the test set",
        clients_accuracy, "higher", 100,
    ),
    "selection-entropy": Metric(
        "entropy of selection", "nats",
        "of FedIns' members, all clients together; 0: one member serves all images",
        _diagnostic("selection-entropy"), "higher",
    ),
    "loss": Metric("loss", "", "on the test set, after the last round",
                   lambda run: finite(run.summary["loss"]), "lower", 1, 3),
    "own-tests": Metric("own tests", "%", "of the global model on each client's own test samples, their mean",
                        _own("own_tests", "mean"), "higher", 100),
    "own-tests-worst": Metric("own tests, worst tenth", "%", "mean of the clients it serves worst",
                              _own("own_tests", "worst-10"), "higher", 100),
    "own-tests-spread": Metric("own tests, spread", "points", "standard deviation over clients",
                               _own("own_tests", "spread"), "lower", 100),
    "own-models": Metric("own models", "%", "of the clients' own models on their own test samples",
                         _own("own_tests_after", "mean"), "higher", 100),
    "own-models-worst": Metric("own models, worst tenth", "%", "mean of the clients whose models are worst",
                               _own("own_tests_after", "worst-10"), "higher", 100),
    "epsilon": Metric("epsilon", "", "privacy spent by the end, of the client that spent most",
                      lambda run: finite(run.summary["epsilon"]), "lower"),
    "drop": Metric("lost to the attack", "points", "accuracy of the reference cell, minus this",
                   None, "lower", 100),
    "attack-success": Metric("attack success", "%", "of the most successful attack, after the last round",
                             _success, "lower", 100, 1),
    "attackers-weight": Metric("attackers' weight", "%", "their share of new models, mean over the rounds",
                               lambda run: finite(run.summary["attackers_weight"]), "lower", 100, 1),
    "detection-precision": Metric("detection precision", "%", "mean of the last 5 rounds",
                                  _found("precision"), "higher", 100, 1),
    "detection-recall": Metric("detection recall", "%", "mean of the last 5 rounds",
                               _found("recall"), "higher", 100, 1),
    "detection-f1": Metric("detection F1", "%", "mean of the last 5 rounds", _found("f1"), "higher", 100, 1),
    "honest-left-out": Metric("honest left out", "%", "of the honest clients, mean of the last 5 rounds",
                              _found("honest_left_out"), "lower", 100, 1),
    "submodel-accuracy": Metric(
        "accuracy of clients' sub-models", "%", "mean over clients of the level that each had last",
        submodel_accuracy, "higher", 100,
    ),
    "utilisation": Metric(
        "utilisation", "%", "of the tighter of memory and deadline; clients that do not deliver count as 0",
        utilisation, "higher", 100, 1,
    ),
    "memory-used": Metric("memory used", "%", "of what devices have, mean over clients and rounds",
                          _simulated("memory_used"), "higher", 100, 1),
    "edge-cost": Metric(
        "cost", "", "seconds and joules of a round, half each, over those of random clients at random edges",
        _edges("cost"), "lower", 1, 3,
    ),
    "edges-met": Metric("edges met", "%", "with enough clients, and labels near the target",
                        _edges("healthy"), "higher", 100, 1),
    "quorum": Metric("quorum", "%", "edges with enough clients", _edges("quorum"), "higher", 100, 1),
    "divergence": Metric("divergence", "nats", "of the edges' labels from the target, mean over edges",
                         _edges("divergence_mean"), "lower", 1, 3),
    "asked": Metric("asked", "", "clients asked for their state by who decides, per round",
                    _edges("probed"), "lower", 1, 1),
    "decision-ms": Metric("decision", "ms", "wall time of deciding who reports where, on this machine",
                          _decision_ms, "lower", 1, 1),
    "megabytes": Metric("traffic per client", "MB", "down and up, over all rounds",
                        _megabytes("bytes_down", "bytes_up"), "lower"),
    "megabytes-up": Metric("sent per client", "MB", "up, over all rounds", _megabytes("bytes_up"), "lower"),
    "megabytes-down": Metric("received per client", "MB", "down, over all rounds", _megabytes("bytes_down"),
                             "lower"),
    "saved-up": Metric("saved up", "%", "of what clients of the reference cell send, measured",
                       None, "higher", 100, 1),
    "saved-down": Metric("saved down", "%", "of what clients of the reference cell receive, measured",
                         None, "higher", 100, 1),
    "simulated-hours": Metric("simulated time", "h", "of all rounds, on the emulated devices",
                              _simulated("seconds", 1 / 3600), "lower", 1, 3),
    "joules": Metric("energy", "J", "of all devices and rounds", _simulated("joules"), "lower", 1, 1),
    "seconds": Metric("wall time per round", "s", "on this machine, with what else ran there",
                      _seconds, "lower"),
}  # fmt: skip
"""What ``metrics`` of a table file may name. A metric of one's own is a line here."""

COMPARED: dict[str, tuple[str, Callable[[float, float], float | None]]] = {
    "drop": ("accuracy", _less),
    "saved-up": ("megabytes-up", _saved),
    "saved-down": ("megabytes-down", _saved),
}
"""Metrics made from two cells: of which metric, and how from the reference cell's value and this one's."""

NEEDS_CLIENTS = frozenset({"submodel-accuracy", "utilisation"})


def values_of(run: RunRecords, metrics: Iterable[str]) -> dict[str, float | None]:
    """Return a run's figures, by metric, unscaled; those made from several cells are left out."""
    found = {}
    for name in metrics:
        if (of := METRICS[name].of) is not None:
            found[name] = of(run) if run.rounds else None
    return found
