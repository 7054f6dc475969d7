"""Everything a run folder shows its reader, made again at any time from the records in it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import tables
from .device_report import devices_said, devices_text
from .edges import draw_edges, edges_picture, edges_text, topology_said
from .folder import RunFolder, write_atomically
from .left_out import left_out_text
from .summary import write_summary
from .wording import bullets, named_part, settings_text, value_text

_WHO_AND_WHEN = ("fraction", "count", "clients", "edges", "richest_in", "start", "on", "off")
_SAID_ELSEWHERE = (
    "execution",
    "samples_per_client",
    "attackers",
    "classes",
    "label_counts",
    "parameters",
    "data_note",
)


def write_report(folder: RunFolder, clean: RunFolder | None = None) -> dict[str, Any]:
    """Write summary.json, report.md, table.csv, table.tex, the pictures and report.html; return the summary.

    ``clean`` is a run of the same situation without attackers, to state the loss of accuracy against.
    """
    from .client_figure import draw_clients, score_names
    from .device_figures import draw_devices
    from .figures import draw_curves
    from .page import write_page

    summary = write_summary(folder, clean)
    runs = {name: folder.rounds(name) for name in folder.config.strategies}
    draw_curves(runs, folder.path / "accuracy.png", _title(summary), folder.config.rounds)
    for name in folder.config.strategies:
        rows = list(folder.clients(name))
        if score_names(rows) or any(row["verdict"] for row in rows):
            draw_clients(rows, clients_picture(folder, name), f"{_title(summary)}: {name}")
        if edges := list(folder.edges(name)):
            draw_edges(edges, edges_picture(folder, name), f"{_title(summary)}: the edges of {name}")
    draw_devices(folder, runs, _title(summary))
    for name, text in (
        ("table.csv", tables.csv_text(summary)),
        ("table.tex", tables.latex(summary)),
        ("report.md", report_text(folder, summary)),
    ):
        write_atomically(folder.path / name, text.encode())
    write_page([folder], page_of(folder), summary)
    return summary


def report_text(folder: RunFolder, summary: Mapping[str, Any]) -> str:
    """Return ``report.md``."""
    config, environment = folder.config.to_dict(), folder.environment
    parts = [f"# {summary['scenario']}"]
    if not summary["finished"]:
        parts.append("**This run is not finished:** the figures are those of the rounds done so far.")
    parts += [summary["description"]] if summary["description"] else []
    parts += [tables.markdown(summary), tables.explanation(summary)]
    parts.append("![Accuracy and loss over the rounds](accuracy.png)")
    for name in folder.config.strategies:
        if (picture := clients_picture(folder, name)).exists():
            parts.append(f"![The clients over the rounds, {name}]({picture.parent.name}/{picture.name})")
    parts.append(
        "The table is also in `table.csv` (unrounded) and `table.tex`; `summary.json` has more figures."
    )
    parts += ["## The situation", bullets(situation(config, environment))]
    if note := environment.get("data_note"):
        parts.append(f"Note on the data: {note}")
    if devices := devices_text(folder, summary):
        parts += ["## Devices", devices]
    if edges := edges_text(folder, summary):
        parts += ["## Edges", edges]
    parts += ["## Replies left out", left_out_text(summary["left_out"])]
    parts += ["## Run it again", _again(folder)]
    facts = {key: value for key, value in environment.items() if key not in _SAID_ELSEWHERE}
    parts += ["## Environment", bullets({key: value_text(value) for key, value in facts.items()})]
    return "\n\n".join(parts) + "\n"


def situation(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Say in words what every strategy of a run faced, from the resolved configuration."""
    partition = dict(config["partition"])
    samples = environment.get("samples_per_client") or []
    # The natural partition may be asked for all clients there are, by the number 0.
    clients = len(samples) or partition["clients"]
    partition.pop("clients")
    said = {
        "Data": named_part("datasets", config["data"], skip=("root", "download")),
        "Clients": f"{clients}{_sizes(samples)}",
        "Partition": named_part("partitions", partition),
        "Model": named_part("models", config["model"]) + _parameters(environment),
        "Local training": settings_text(config["training"]),
        **({"Execution": execution["summary"]} if (execution := environment.get("execution")) else {}),
        **(
            {"Models of the clients' own": named_part("personal", config["personal"])}
            if config.get("personal")
            else {}
        ),
        "Who takes part": named_part("selectors", config["selection"]),
    }
    said |= devices_said(config)
    said |= topology_said(config)
    for index, attack in enumerate(config.get("attacks") or [], start=1):
        label = "Attack" if len(config["attacks"]) == 1 else f"Attack {index}"
        said[label] = f"{_who(attack)}: {named_part('attacks', attack, skip=_WHO_AND_WHEN)}{_when(attack)}"
    if attackers := environment.get("attackers"):
        said["Attackers"] = f"{len(attackers)} of {clients} clients: {_attackers(attackers)}"
    elif not config.get("attacks"):
        said["Attackers"] = "none"
    said |= _protection(config)
    for name in config["strategies"]:
        chosen = (config.get("strategy") or {}).get(name) or {}
        said[f"Strategy {name}"] = named_part(
            "strategies", {"name": name, **chosen}, skip=("topology",)
        ).removeprefix(f"{name}, ")
    every = config["evaluation"]["every"]
    often = "every round" if every == 1 else f"every {every} rounds and the last"
    said["Rounds"] = f"{config['rounds']}, the model is evaluated after {often}; seed {config['seed']}"
    return said


def _protection(config: Mapping[str, Any]) -> dict[str, str]:
    """Say in words what protects the clients; nothing where nothing does."""
    said = {}
    if (config.get("security") or {}).get("signed_updates"):
        said["Signed updates"] = "Ed25519, verified by the server"
    if (aggregation := dict(config.get("aggregation") or {})).pop("secure_groups", 0):
        groups = config["aggregation"]["secure_groups"]
        said["Secure aggregation"] = (
            f"{groups} groups, whose sums are all that is seen ({settings_text(aggregation)})"
        )
    if (privacy := dict(config.get("privacy") or {})).pop("mode", "none") != "none":
        said["Differential privacy"] = f"{config['privacy']['mode']} ({settings_text(privacy)})"
    return said


def _attackers(labels: Mapping[str, str]) -> str:
    """Say in words which clients carry out which attack.

    >>> _attackers({"3": "sign-flip", "5": "blur", "7": "sign-flip"})
    'sign-flip 3, 7; blur 5'
    """
    groups: dict[str, list[str]] = {}
    for client, label in labels.items():
        groups.setdefault(label, []).append(client)
    return "; ".join(f"{label} {', '.join(clients)}" for label, clients in groups.items())


def _who(attack: Mapping[str, Any]) -> str:
    """Say in words which clients an attack asks for.

    >>> _who({"fraction": 0.3}), _who({"count": 2, "richest_in": 1}), _who({"clients": [3, 5]})
    ('30 % of the clients', '2 clients, those richest in class 1', 'clients 3, 5')
    """
    if (share := attack.get("fraction")) is not None:
        who = f"{100 * share:g} % of the clients"
    elif (count := attack.get("count")) is not None:
        who = f"{count} clients"
    elif (edges := attack.get("edges")) is not None:
        who = f"edges {value_text(edges)}"
    else:
        who = f"clients {value_text(attack['clients'])}"
    label = attack.get("richest_in")
    return who if label is None else f"{who}, those richest in class {label}"


def _when(attack: Mapping[str, Any]) -> str:
    """Say in words in which rounds an attack is on, unless it is always on."""
    start, on, off = attack.get("start", 1), attack.get("on", 1), attack.get("off", 0)
    said = [f"from round {start}"] if start > 1 else []
    said += [f"{on} rounds of every {on + off}"] if off else []
    return "".join(f", {text}" for text in said)


def clients_picture(folder: RunFolder, strategy: str) -> Path:
    """Return where the picture of a strategy's clients is, for a rule that judges or scores them."""
    return folder.log(strategy).path / "clients.png"


def picture_of(folder: RunFolder) -> Path:
    """Return where the picture is."""
    return folder.path / "accuracy.png"


def page_of(folder: RunFolder) -> Path:
    """Return where the page with everything on it is."""
    return folder.path / "report.html"


def _title(summary: Mapping[str, Any]) -> str:
    title = f"{summary['scenario']}, seed {summary['seed']}"
    return title if summary["finished"] else f"{title} (not finished)"


def _again(folder: RunFolder) -> str:
    path = folder.path.as_posix()
    command = shlex.join(["fedplat", "run", f"{path}/config.toml", "--out", f"{path}-again"])
    return (
        f"```\n{command}\n```\n\n"
        "`config.toml` holds every value, also the defaults. The same versions on the same kind of device "
        "give the same figures, apart from the times."
    )


def _sizes(samples: list[int]) -> str:
    if not samples:
        return ""
    return f", with {min(samples):,} to {max(samples):,} training samples each, {sum(samples):,} in all"


def _parameters(environment: Mapping[str, Any]) -> str:
    count = environment.get("parameters")
    return f", {count:,} parameters" if isinstance(count, int) else ""
