"""``fedplat partition``: who would hold what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from .common import Overrides, Scenario, Seed, console, load_config

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from ..datasets.base import Dataset

_MOST_CLASSES = 20


def partition(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.png",
            help="The picture.",
            show_default="runs/partition-<scenario>-<config hash>.png",
        ),
    ] = None,
) -> None:
    """Print how many samples of each class every client holds, and draw it.

    SCENARIO is a name that "fedplat list scenarios" shows, or a TOML file;
    SCENARIO:VARIANT is one of its variants.
    """
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: expected a name that ends in .png")
    config = load_config(scenario, overrides, seed)

    from ..datasets.figures import draw_partition
    from ..experiment import load_data

    dataset, parts = load_data(config)
    classes, counts = _counts(dataset, parts)
    groups = None
    if config.partition.name == "natural" and dataset.groups is not None:
        groups = [dataset.group_names[int(dataset.groups[part[0]])] for part in parts]
    screen = console()
    screen.print(
        f"{config.name}: {int(counts.sum()):,} training samples of {dataset.name}, {len(parts)} clients, "
        f"{config.partition.name}, seed {config.seed}"
    )
    screen.print(count_table(classes, counts, groups))
    path = out or Path("runs") / f"partition-{config.name}-{config.digest()}.png"
    title = f"{dataset.name}, {config.partition.name}, seed {config.seed}"
    try:
        draw_partition(counts, classes, path, title)
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture: {error}") from error
    screen.print(f"picture: {path}", soft_wrap=True)


def _counts(dataset: Dataset, parts: list[np.ndarray]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return class names and counts (clients, classes); text has no classes and is only counted."""
    import numpy as np

    from ..datasets.labels import class_counts

    if dataset.train.y.ndim > 1:
        return ("samples",), np.array([[len(part)] for part in parts], np.int64)
    return dataset.classes, class_counts(dataset.train.y, parts, dataset.num_classes)


def count_table(classes: tuple[str, ...], counts: np.ndarray, groups: list[str] | None = None) -> Table:
    """Return counts (clients, classes) as a table with totals; of very many classes, a digest."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("client", footer="total", justify="right")
    if groups:
        table.add_column("who")
    totals = counts.sum(axis=0)
    many = len(classes) > _MOST_CLASSES
    if many:
        table.add_column("classes", footer=f"{int((totals > 0).sum())}", justify="right")
        table.add_column("most frequent", footer=_most(classes, totals))
    elif len(classes) > 1:
        for name, total in zip(classes, totals.tolist(), strict=True):
            table.add_column(Text(name), footer=str(total), justify="right", overflow="fold")
    table.add_column("samples", footer=str(int(totals.sum())), justify="right", style="bold")
    for client, row in enumerate(counts):
        cells: list[Any] = [str(client), *([Text(groups[client])] if groups else [])]
        if many:
            cells += [str(int((row > 0).sum())), Text(_most(classes, row))]
        elif len(classes) > 1:
            cells += [str(count) if count else "·" for count in row.tolist()]
        table.add_row(*cells, str(int(row.sum())))
    return table


def _most(classes: tuple[str, ...], row: np.ndarray) -> str:
    return f"{classes[int(row.argmax())]} ({int(row.max())})" if row.sum() else "none"
