"""Who gets which part of the model in a round, and who gets none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord

from fedplat.arrays import FlatArrays, Layout
from fedplat.emulation.schedule import Budget

from .nodes import Node
from .reports import ClientReport
from .submodels import SubModelScheme, SubModelSpec


@dataclass(frozen=True)
class Parts:
    """The parts of one round.

    ``chosen`` is who gets which, those with equal specs after one another; ``records`` and ``layouts`` are
    the arrays of each spec; ``left_out`` reports on those whom nothing fits.
    """

    chosen: list[tuple[Node, SubModelSpec]]
    records: dict[SubModelSpec, ArrayRecord]
    layouts: dict[SubModelSpec, Layout]
    left_out: list[ClientReport]

    def for_nobody(self, reason: str) -> Parts:
        """Return a round in which the others sit out too."""
        others = [_sits_out(node, reason) for node, _ in self.chosen]
        return Parts([], {}, {}, sorted([*self.left_out, *others], key=lambda report: report.client))


def parts_for(
    scheme: SubModelScheme,
    nodes: Iterable[tuple[Node, Budget | None]],
    model: FlatArrays,
    whole: ArrayRecord,
    server_round: int,
) -> Parts:
    """Assign a part of ``model``, whose record is ``whole``, to each node with its budget."""
    scheme.begin_round(model, server_round)
    members: dict[SubModelSpec, list[Node]] = {}
    left_out = []
    for node, budget in nodes:
        spec = scheme.assign(node, budget, server_round)
        if spec is None:
            why = scheme.why(node)
            left_out.append(_sits_out(node, "nothing fits" + (f": {why}" if why else "")))
        else:
            members.setdefault(spec, []).append(node)
    records, layouts = {}, {}
    for spec in members:
        part = scheme.extract(model, spec)
        records[spec] = whole if part is model else part.to_record()
        layouts[spec] = part.layout
    # Clients of one size come after one another, so that a worker can train them together.
    chosen = [(node, spec) for spec, those in members.items() for node in those]
    return Parts(chosen, records, layouts, left_out)


def _sits_out(node: Node, reason: str) -> ClientReport:
    return ClientReport(node.node_id, node.key, "failed", reason)
