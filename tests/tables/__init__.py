"""A tiny table, and cells written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplat.results.folder import RunFolder
from fedplat.tables.cells import Options, Plan, cell_path, plan
from fedplat.tables.spec import Table, parse_table

from ..results import client_record, round_record

TINY = """
title = "A tiny table"
scenario = "quickstart"
rounds = 2
seeds = 2
metrics = ["accuracy", "drop", "attack-success"]

[set]
"partition.clients" = 2
"partition.alpha" = 10.0
"model.hidden" = [4]
"strategy.krum.f" = "{liars}"

[vars]
liars = 0

[rows]
name = "method"
key = "strategy"
values = ["mean", { value = "median", label = "Me_dian" }, "krum"]

[columns]
name = "attack"
values = [
  { value = "none", set = { attacks = [] } },
  { value = "flip", label = "sign flip", set = { attacks = [{ name = "sign-flip", fraction = "{share}" }] } },
]

[[blocks]]
name = "share"
values = [0.5]

[reference]
attack = "none"

[[skip]]
cells = { method = ["krum"], attack = ["flip"] }
reason = "two clients are too few"

[[published]]
paper = "Nobody, 2020"
table = "Table 1"
note = "other data"
cells = [{ method = "mean", attack = "none", value = 90.5 }]

[[claims]]
paper = "Somebody, 2021"
text = "all is well"

[quick]
rounds = 1
seeds = 1
note = "very quick"
set = { "training.lr" = 0.2 }
keep = { method = ["mean", "median"] }
"""


def tiny(**replaced: str) -> Table:
    """Return the table, with parts of its text replaced."""
    text = TINY
    for before, after in replaced.items():
        assert before in text
        text = text.replace(before, after)
    return parse_table(text.encode(), "tiny")


def planned(**options: Any) -> Plan:
    return plan("tiny", tiny(), Options(**options))


def fake_cell(
    plan: Plan, out: Path, position: tuple[str, ...], accuracies: Mapping[int, float], finished: bool = True
) -> None:
    """Write the runs of a position, by seed."""
    for cell in plan.cells:
        if cell.position != position or cell.seed not in accuracies:
            continue
        folder = RunFolder.open(cell_path(out, cell.identity), cell.config, resume=True)
        folder.describe(samples_per_client=[10, 10], device="cpu", data_fingerprint="abc")
        log = folder.log(cell.strategy)
        for number, accuracy in enumerate([0.1, 0.2, accuracies[cell.seed]]):
            log.append(round_record(number, accuracy), [client_record(number, 0)] if number else [])
        log.save_checkpoint({"round": 2})
        if finished:
            log.save_model({})
