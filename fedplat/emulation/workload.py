"""What a round's task takes of a client's device: found from the model and the settings, not by running."""

from __future__ import annotations

from flwr.app import Message

from ..clients.task import ClientTask
from .compute import sample_bits, sample_flops, samples_seen
from .memory import training_memory
from .timeline import Work


class TaskWork:
    """Tells what training the model in a message takes; the same for an attacker as for an honest client.

    Memory is that of a step on a whole batch and ``overhead_bytes``, FLOPs those of all samples seen, each as
    often as it is. Estimates are made once per size of batch.
    """

    def __init__(self, task: ClientTask, overhead_bytes: int = 0) -> None:
        self._task = task
        self._overhead = overhead_bytes
        self._memory: dict[int, int] = {}
        self._flops: int | None = None

    def __call__(self, message: Message, client: int) -> Work:
        """Return the work of a client."""
        task, shape = self._task, self._task.dataset.sample_shape
        samples = len(task.parts[client])
        batch = max(min(task.training.batch_size, samples), 1)
        if batch not in self._memory:
            estimate = training_memory(task.build_model, shape, batch, task.training, self._overhead)
            self._memory[batch] = estimate.total
        if self._flops is None:
            self._flops = sample_flops(task.build_model, shape)
        seen = samples_seen(samples, task.training)
        return Work(self._memory[batch], float(seen * self._flops), float(seen * sample_bits(shape)))
