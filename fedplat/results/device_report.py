"""What the report says about emulated devices: what they had, what they did not deliver, and who and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..emulation.situation import HARDWARE, SCHEDULE
from .simulated import MISSED, misses_of, worst
from .tables import NOTHING, markdown_table
from .wording import named_part, settings_text

if TYPE_CHECKING:
    from .folder import RunFolder

Row = Mapping[str, Any]

SIMULATED_PICTURE = "simulated.png"
FOLDER = "devices"
"""Where in a run folder the devices are kept, which are the same for every strategy."""

_MOST_WORST = 8


def devices_said(config: Row) -> dict[str, str]:
    """Say in words which devices the clients were on, from the resolved configuration; {} if on none."""
    devices, availability = config.get("devices") or {}, config.get("availability") or {}
    emulation = dict(config.get("emulation") or {})
    said = {}
    if (compression := config.get("compression") or {}).get("name", "none") != "none":
        said["Compression"] = named_part("compressors", compression)
    chance = emulation.pop("drop_probability", 0)
    named = devices.get("name", "unlimited") != "unlimited", availability.get("name", "always") != "always"
    if not any(named) and not chance:
        return said
    said["Devices"] = named_part("devices", {"name": "unlimited", **devices}, skip=("hardware",))
    if hardware := devices.get("hardware"):
        said["Devices' hardware"] = settings_text(hardware)
    said["Devices are there"] = named_part("availability", {"name": "always", **availability})
    said["Deadline"] = _deadline(emulation)
    if chance:
        said["Dropping out"] = f"{100 * chance:g} % of the participations, between training and upload"
    return said


def devices_text(folder: RunFolder, summary: Row) -> str:
    """Return the section on devices of ``report.md``, "" for a run without emulated devices."""
    known = {name: row["simulated"] for name, row in summary["strategies"].items() if row.get("simulated")}
    if not known:
        return ""
    tables = [(SCHEDULE, "what each device had in each round"), (HARDWARE, "how fast and thirsty each was")]
    links = [
        f"[{FOLDER}/{name}]({FOLDER}/{name}) ({what})"
        for name, what in tables
        if (folder.path / FOLDER / name).exists()
    ]
    parts = [
        "All times and energies here are simulated: what the rounds would have taken on the devices. "
        "Every strategy met the same devices" + (f", which are in {' and '.join(links)}." if links else ".")
    ]
    if deadline := devices_said(folder.config.to_dict()).get("Deadline"):
        parts.append(f"Deadline of a round: {deadline}.")
    parts.append(_outcomes(known))
    if (folder.path / SIMULATED_PICTURE).exists():
        parts.append(f"![Accuracy over simulated time, energy and bytes]({SIMULATED_PICTURE})")
    for name in known:
        if (picture := outcomes_picture(folder, name)).exists():
            parts.append(f"![What became of every client, {name}]({picture.parent.name}/{picture.name})")
    parts.append(_worst_clients(summary.get("devices") or {}))
    return "\n\n".join(parts)


def outcomes_picture(folder: RunFolder, strategy: str) -> Path:
    """Return where the picture is of what became of every client in every round."""
    return folder.log(strategy).path / "devices.png"


def _deadline(emulation: Row) -> str:
    seconds = emulation.get("deadline_s")
    if seconds is None:
        text = "none, a round lasts until its last device is done"
    else:
        late = "waited for" if emulation.get("late") == "wait" else "dropped"
        text = f"{seconds:g} simulated seconds, late replies are {late}"
    asked = {"all": "; also devices that are away are asked"}.get(emulation.get("ask", ""), "")
    enforced = "; memory limits are real and not estimates" if emulation.get("enforce") else ""
    return text + asked + enforced


def _outcomes(known: Mapping[str, Row]) -> str:
    """Return the table of outcomes; of a strategy's clients over all rounds."""
    counts = ["asked", "delivered", "late", "out_of_memory", "dropped", "away", "violations"]
    # With a policy that waits, late ones deliver; a column of noughts says nothing but for these two.
    shown = [key for key in counts if key in counts[:2] or any(row[key] for row in known.values())]
    heads = [
        "strategy", *(key.replace("_", " ") for key in shown), "available per round", "simulated s",
        "J training", "J links", "memory used %", "downlink used %", "uplink used %",
    ]  # fmt: skip
    rows = [
        [
            name, *(f"{row[key]:,}" for key in shown), _number(row["available"]), _number(row["seconds"]),
            _number(row["joules_compute"], digits=4), _number(row["joules_transfer"], digits=4),
            *(_number(row[key], 100) for key in ("memory_used", "down_used", "up_used")),
        ]
        for name, row in known.items()
    ]  # fmt: skip
    notes = ["Outcomes are counted over all rounds and clients."]
    if "violations" in shown:
        notes.append("A violation is a task that does not fit into the memory, or a missed deadline.")
    notes.append(
        "Memory used is what the training takes by what the device has; links are used as far as they were "
        "busy in the time of the round; all three are means."
    )
    return f"{markdown_table(heads, rows)}\n\n{' '.join(notes)}"


def _worst_clients(devices: Mapping[str, Sequence[Row]]) -> str:
    rows = []
    for name, clients in devices.items():
        for client in worst(clients, _MOST_WORST):
            missed = [
                f"{text} {count}x" for key, text in MISSED.items() if (count := client[key.replace("-", "_")])
            ]
            share = f"{misses_of(client)} of {client['asked']}"
            rows.append([name, str(client["client"]), ", ".join(missed), why_text(client["why"]), share])
    if not rows:
        return "Every device that was asked delivered, or failed for another reason."
    heads = ["strategy", "client", "what went wrong", "typically", "rounds missed"]
    more = [
        f"{name}: {hidden} more"
        for name, clients in devices.items()
        if (hidden := sum(1 for client in clients if misses_of(client)) - _MOST_WORST) > 0
    ]
    rest = f"\n\nClients that missed fewer rounds are in summary.json ({'; '.join(more)})." if more else ""
    return f"The clients that missed most rounds:\n\n{markdown_table(heads, rows, text_columns=4)}{rest}"


def why_text(why: Row) -> str:
    """Return in words what a device was short of.

    >>> why_text({"memory_bytes": 320e6, "memory_budget": 200e6})
    'needs 320 MB, has 200 MB'
    >>> why_text({"seconds": 60.0, "seconds_down": 5.0, "seconds_compute": 40.0, "seconds_up": 15.0})
    'late after 5 s down, 40 s training, 15 s up'
    """
    texts = []
    spent = [
        f"{_number(seconds)} s {what}"
        for key, what in (("down", "down"), ("compute", "training"), ("up", "up"))
        if (seconds := why.get(f"seconds_{key}"))
    ]
    if spent:
        texts.append(f"late after {', '.join(spent)}")
    if "memory_bytes" in why:
        needed, there = why["memory_bytes"], why["memory_budget"]
        texts.append(f"needs {_number(needed, 1e-6)} MB, has {_number(there, 1e-6)} MB")
    return "; ".join(texts) or NOTHING


def _number(value: float | None, scale: float = 1.0, digits: int = 3) -> str:
    """Return a number with so many significant digits, whole ones never cut.

    >>> _number(12345.6), _number(0.01234), _number(None)
    ('12,346', '0.0123', '–')
    """
    if value is None:
        return NOTHING
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
