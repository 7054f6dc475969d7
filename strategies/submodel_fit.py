"""Whether a device can train a sub-model in a round."""

from __future__ import annotations

from fedplat.emulation.schedule import Budget
from fedplat.models.cutting import Sizes

from .nodes import Node
from .submodels import SubModelContext


def misfit(context: SubModelContext, node: Node, budget: Budget | None, sizes: Sizes) -> str:
    """Return what is too much for the device of a node; empty if the sub-model fits, or nothing is known.

    It has to fit into the memory with what the process takes, on a batch as the client has it; and, if the
    rounds have a deadline, two transfers and the training into that. What is sent back counts in full.
    """
    if budget is None:
        return ""
    samples = context.samples(node.partition) if node.partition is not None else context.training.batch_size
    batch = max(min(context.training.batch_size, samples), 1)
    memory = context.costs.memory(sizes, batch) + context.overhead_bytes
    if memory > budget.memory_bytes:
        return f"training takes {memory / 1e6:,.4g} MB of {budget.memory_bytes / 1e6:,.4g} MB of memory"
    if context.deadline_s is None:
        return ""
    if not (budget.down_bps and budget.up_bps):
        return "its link stands still"
    bits = 8 * context.costs.nbytes(sizes)
    seconds = bits / budget.down_bps + bits / budget.up_bps
    if context.seconds is not None and node.partition is not None:
        seconds += context.seconds(node.partition, context.costs.flops(sizes))
    if seconds > context.deadline_s:
        return f"a round takes {seconds:,.4g} s of {context.deadline_s:,.4g} s"
    return ""
