"""What a run writes down of a round: a line of ``rounds.jsonl``, and one per client of ``clients.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import Strategy

from .clients.attacks import Attack
from .emulation.grid import EmulatedGrid
from .evaluation import PART, SUCCESS
from .results.detection import detection
from .rounds import Round
from .strategies.reports import ClientReport
from .strategies.wrapper import client_of, diagnostics_of, reports_of
from .verdicts import HONEST, is_malicious


def client_records(current: Round, strategy: Strategy, attacks: Mapping[int, Attack]) -> list[dict[str, Any]]:
    """Return the rows of a round for ``clients.jsonl``, by client."""
    reports = list(reports_of(strategy))
    if current.number == 0:
        return []
    known = {report.node_id for report in reports}
    for node_id, reason in current.failures.items():
        if node_id not in known:
            client = client_of(strategy, node_id)
            reports.append(ClientReport(node_id, client, "failed", reason))
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
            **report.scores,
        }
        for report in sorted(reports, key=lambda report: report.client)
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
    return {
        "round": current.number,
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "per_class_accuracy": metrics.get("per-class-accuracy"),
        "attack": attack if attackers else {},
        "detection": detection(clients) if clients else {},
        "diagnostics": dict(diagnostics_of(strategy)),
        "train": dict(current.train_metrics or {}),
        **{
            status: sum(row["status"] == status for row in clients)
            for status in ("accepted", "refused", "failed")
        },
        **({"submodels": parts} if parts else {}),
        "bytes_down": current.bytes_down,
        "bytes_up": current.bytes_up,
        "seconds": current.seconds,
    }


def add_devices(record: dict[str, Any], clients: list[dict[str, Any]], grid: EmulatedGrid) -> None:
    """Add to a round and its clients what the devices spent; traffic becomes that over their links."""
    devices = {device.client: device for device in grid.devices_in(record["round"])}
    record["simulated"] = grid.record(record["round"])
    record["bytes_down"] = sum(device.bytes_down for device in devices.values())
    record["bytes_up"] = sum(device.bytes_up for device in devices.values())
    for row in clients:
        if device := devices.get(row["client"]):
            row["device"] = device.record()
