"""What a round's task takes of a client's device: found from the model and the settings, not by running."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message

from ..clients.task import ClientTask
from ..models.cutting import Sizes
from ..models.cutting_costs import CutCosts
from ..submodel_options import SubModelOptions
from .compute import sample_bits, sample_flops, samples_seen
from .memory import training_memory
from .timeline import Work


class TaskWork:
    """Tells what training the model in a message takes; the same for an attacker as for an honest client.

    Memory is that of a step on a whole batch and ``overhead_bytes``, FLOPs those of all samples seen, each as
    often as it is. A message that brings a sub-model takes what that does. Estimates are made once per size
    of batch and sub-model.
    """

    def __init__(self, task: ClientTask, overhead_bytes: int = 0, costs: CutCosts | None = None) -> None:
        self._task = task
        self._overhead = overhead_bytes
        self._memory: dict[int, int] = {}
        self._flops: int | None = None
        self._costs = costs

    def __call__(self, message: Message, client: int) -> Work:
        """Return the work of a client."""
        config = message.content.get("config")
        return self.of(
            client, SubModelOptions.of(config).sizes() if isinstance(config, ConfigRecord) else None
        )

    def of(self, client: int, sizes: Sizes | None = None) -> Work:
        """Return what training a sub-model of these ``sizes``, or the whole model, takes of a client."""
        task, shape = self._task, self._task.dataset.sample_shape
        samples = len(task.parts[client])
        batch = max(min(task.training.batch_size, samples), 1)
        seen = samples_seen(samples, task.training)
        memory, flops = self._whole(batch) if sizes is None else self._part(sizes, batch)
        return Work(memory, float(seen * flops), float(seen * sample_bits(shape)))

    def _whole(self, batch: int) -> tuple[int, int]:
        task, shape = self._task, self._task.dataset.sample_shape
        if batch not in self._memory:
            estimate = training_memory(task.build_model, shape, batch, task.training, self._overhead)
            self._memory[batch] = estimate.total
        if self._flops is None:
            self._flops = sample_flops(task.build_model, shape)
        return self._memory[batch], self._flops

    def _part(self, sizes: Sizes, batch: int) -> tuple[int, int]:
        task = self._task
        if self._costs is None:
            self._costs = CutCosts(task.shapes, task.plan, task.dataset.sample_shape, task.training)
        return self._costs.memory(sizes, batch) + self._overhead, self._costs.flops(sizes)
