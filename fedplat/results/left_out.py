"""The table of the replies that a strategy did not get or take, short also for many clients and rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .simulated import MISSED
from .tables import markdown_table

Clients = Sequence[Mapping[str, Any]]

_MOST_ROWS = 100
_MOST_REASONS = 3
_MOST_CLIENTS = 15
HEADS = ["strategy", "client", "reason", "rounds refused", "rounds failed", "from round to round"]


def left_out_text(left_out: Mapping[str, Clients]) -> str:
    """Return the table of the clients whose replies were refused or failed, and why, equal rows joined.

    What emulated devices did not deliver is one row per strategy and reason, whichever the clients.
    """
    rows: list[list[str]] = []
    for strategy, clients in left_out.items():
        rows += [[strategy, *row] for row in devices_left_out(clients)]
        rows += [[strategy, *row] for row in others_left_out(clients)]
    if not rows:
        return "None: every reply of every client was accepted."
    table = markdown_table(HEADS, rows[:_MOST_ROWS], text_columns=3)
    hidden = len(rows) - _MOST_ROWS
    return table if hidden <= 0 else f"{table}\n\n{hidden} more rows are in summary.json."


def devices_left_out(clients: Clients) -> list[list[str]]:
    """Return a row for each reason that emulated devices did not deliver for."""
    rows = []
    for reason in MISSED.values():
        found = [(c, item) for c in clients for item in c["reasons"] if item["reason"] == reason]
        if found:
            items = [item for _, item in found]
            rounds = str(sum(item["rounds"] for item in items))
            rows.append([_names([_name(client) for client, _ in found]), reason, "0", rounds, _span(items)])
    return rows


def others_left_out(clients: Clients) -> list[list[str]]:
    """Return a row for each set of reasons of other kinds; clients with the same share one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for client in clients:
        told = [item for item in client["reasons"] if item["reason"] not in MISSED.values()]
        if not told:
            continue
        reasons = [f"{item['reason']} ({item['rounds']}x)" for item in told[:_MOST_REASONS]]
        more = len(told) - _MOST_REASONS
        reasons += [f"and {more} other reasons, see summary.json"] if more > 0 else []
        failed = sum(item["rounds"] for item in told) - client["refused"]
        key = ("; ".join(reasons), str(client["refused"]), str(failed), _span(told))
        groups.setdefault(key, []).append(_name(client))
    return [[", ".join(names), *rest] for rest, names in groups.items()]


def _name(client: Mapping[str, Any]) -> str:
    return f"{client['client']} (attacker)" if client["attacker"] else str(client["client"])


def _names(numbers: Sequence[str]) -> str:
    hidden = len(numbers) - _MOST_CLIENTS
    if hidden <= 1:
        return ", ".join(numbers)
    return f"{len(numbers)} clients: {', '.join(numbers[:_MOST_CLIENTS])} and {hidden} more"


def _span(items: Clients) -> str:
    return f"{min(item['first_round'] for item in items)} to {max(item['last_round'] for item in items)}"
