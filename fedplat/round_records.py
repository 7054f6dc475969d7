"""What a run writes down of a round: a line of ``rounds.jsonl``, and one per client of ``clients.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flwr.serverapp.strategy import Strategy

from .clients.attacks import Attack
from .emulation.grid import EmulatedGrid
from .evaluation import PART, SUCCESS
from .personal_metrics import AFTER, over_clients, own_test_figures
from .results.detection import detection
from .rounds import Round
from .strategies.hierarchy import FIRST_EDGE_ID, EdgeGrid
from .strategies.reports import ClientReport
from .strategies.wrapper import client_of, diagnostics_of, reports_of
from .verdicts import HONEST, is_malicious


def client_records(
    current: Round, strategy: Strategy, attacks: Mapping[int, Attack], edges: EdgeGrid | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a round for ``clients.jsonl``, by client.

    Those of ``edges`` are about the last round of each edge, and say which edge a client was at.
    """
    if current.number == 0:
        return []
    reports = _reports(current, strategy)
    edge_of: dict[int, int] = {}
    if edges is not None:
        weights = {report.client: report.weight for report in _edge_reports(current, strategy, edges)}
        pairs = edges.client_reports(weights)
        reports = [report for _, report in pairs]
        edge_of = {report.node_id: edge for edge, report in pairs}
    return [
        {
            "round": current.number,
            "client": report.client,
            "status": report.status,
            "reason": report.reason,
            "samples": report.num_examples,
            "weight": report.weight,
            "verdict": report.verdict,
            "update_norm": report.update_norm,
            **_truth(attacks.get(report.client)),
            **({} if report.submodel == "full" else {"submodel": report.submodel}),
            **({} if edges is None else {"edge": edge_of[report.node_id]}),
            **({"own_test_after": report.metrics[AFTER]} if AFTER in report.metrics else {}),
            **report.scores,
        }
        for report in sorted(reports, key=lambda report: report.client)
    ]


def _reports(current: Round, strategy: Strategy) -> list[ClientReport]:
    """Return what became of each node that was asked, also where the strategy does not tell."""
    reports = list(reports_of(strategy))
    known = {report.node_id for report in reports}
    for node_id, reason in current.failures.items():
        if node_id not in known:
            reports.append(ClientReport(node_id, client_of(strategy, node_id), "failed", reason))
    return reports


def _edge_reports(current: Round, strategy: Strategy, edges: EdgeGrid) -> list[ClientReport]:
    """Return what became of each edge at the cloud; strategies that do not tell weigh them by samples."""
    reports = _reports(current, strategy)
    if any(report.status == "accepted" for report in reports):
        return reports
    told = {report.node_id: report for report in reports}
    whole = sum(edge.samples for number, edge in enumerate(edges.edges) if FIRST_EDGE_ID + number not in told)
    return [
        replace(told[node], client=number)
        if (node := FIRST_EDGE_ID + number) in told
        else ClientReport(node, number, "accepted", "", edge.samples, edge.samples / max(whole, 1))
        for number, edge in enumerate(edges.edges)
    ]


def _truth(attack: Attack | None) -> dict[str, Any]:
    """Return what a client is, for comparison with what a rule takes it for."""
    return {"truth": attack.kind if attack else HONEST, "attack": attack.label if attack else ""}


def round_record(
    current: Round, clients: list[dict[str, Any]], strategy: Strategy, attackers: int
) -> dict[str, Any]:
    """Return the line of a round for ``rounds.jsonl``; ``attackers`` is the number of malicious clients."""
    metrics: Mapping[str, Any] = current.server_metrics or {}
    malicious = [row for row in clients if is_malicious(row["truth"])]
    attack = {
        "attackers": attackers,
        "selected": len(malicious),
        "weight": sum(row["weight"] for row in malicious),
        "success": {k.removeprefix(SUCCESS): v for k, v in metrics.items() if k.startswith(SUCCESS)},
    }
    parts = {k.removeprefix(PART): v for k, v in metrics.items() if k.startswith(PART)}
    own_tests = own_test_figures(metrics)
    return {
        "round": current.number,
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "per_class_accuracy": metrics.get("per-class-accuracy"),
        "attack": attack if attackers else {},
        "detection": detection(clients) if clients else {},
        "diagnostics": dict(diagnostics_of(strategy)),
        "train": {key: value for key, value in (current.train_metrics or {}).items() if key != AFTER},
        **{
            status: sum(row["status"] == status for row in clients)
            for status in ("accepted", "refused", "failed")
        },
        **({"submodels": parts} if parts else {}),
        **({"own_tests": own_tests} if own_tests else {}),
        "bytes_down": current.bytes_down,
        "bytes_up": current.bytes_up,
        "seconds": current.seconds,
    }


def add_own_tests(
    record: dict[str, Any], clients: list[dict[str, Any]], measured: Mapping[int, tuple[float, bool]]
) -> None:
    """Add to a round that was evaluated how good the clients' own models are for them: mean, worst, spread.

    ``measured`` has, by client, the accuracy of its own model and whether it counts, which a malicious one
    does not; without it, it is what clients said in their replies about the models that they had trained.
    """
    if record["accuracy"] is None:
        return
    for row in clients:
        if row["client"] in measured:
            row["own_test_after"] = measured[row["client"]][0]
    told = [
        (row["own_test_after"], not is_malicious(row["truth"])) for row in clients if "own_test_after" in row
    ]
    figures = over_clients(value for value, counts in list(measured.values()) or told if counts)
    if figures:
        record["own_tests_after"] = figures


def add_devices(record: dict[str, Any], clients: list[dict[str, Any]], grid: EmulatedGrid) -> None:
    """Add to a round and its clients what the devices spent; traffic becomes that over their links."""
    devices = {device.client: device for device in grid.devices_in(record["round"])}
    record["simulated"] = grid.record(record["round"])
    record["bytes_down"] = sum(device.bytes_down for device in devices.values())
    record["bytes_up"] = sum(device.bytes_up for device in devices.values())
    for row in clients:
        if device := devices.get(row["client"]):
            row["device"] = device.record()


def add_edges(
    record: dict[str, Any],
    current: Round,
    strategy: Strategy,
    edges: EdgeGrid,
    attacks: Mapping[int, Attack],
    emulated: EmulatedGrid | None,
) -> list[dict[str, Any]]:
    """Add to a round what became of its edges, and return the rows of ``edges.jsonl``, by edge.

    The traffic of a round is that of clients; that of edges and cloud is under "edges". The wall time for
    decisions is a phase of its own.
    """
    if current.number == 0:
        return []
    deciding = edges.deciding
    took = emulated.edges_in(current.number) if emulated else {}
    figures, each = deciding.figures(), deciding.edges()
    if emulated:
        simulated = record["simulated"]
        figures["cost"] = deciding.prices.cost(simulated["seconds"], simulated["joules"])
    else:
        record["bytes_down"], record["bytes_up"] = edges.bytes_down, edges.bytes_up
    record["edges"] = {**figures, "bytes_down": current.bytes_down, "bytes_up": current.bytes_up}
    record["seconds"]["decide"] = deciding.seconds
    record["seconds"]["train"] = max(record["seconds"].get("train", 0.0) - deciding.seconds, 0.0)
    spent = [diagnostics_of(edge.strategy).get("epsilon") for edge in edges.edges]
    if known := [epsilon for epsilon in spent if epsilon is not None]:
        record["diagnostics"]["epsilon"] = max(known)
    reports = {report.client: report for report in _edge_reports(current, strategy, edges)}
    rows = []
    for number, edge in enumerate(edges.edges):
        report = reports.get(number, ClientReport(FIRST_EDGE_ID + number, number, "failed", edge.why))
        rows.append(
            {
                "round": current.number,
                "edge": number,
                "status": report.status,
                "reason": report.reason,
                "clients": len(edges.at(number)),
                "delivered": int(each.clients[number]),
                "samples": edge.samples,
                "weight": report.weight,
                "verdict": report.verdict,
                "update_norm": report.update_norm,
                "divergence": float(each.divergence[number]),
                "quorum": bool(each.quorum[number]),
                "healthy": bool(each.healthy[number]),
                **_truth(attacks.get(number)),
                **(
                    {"seconds": took[number].seconds, "joules": took[number].joules} if number in took else {}
                ),
                **report.scores,
            }
        )
    return rows
