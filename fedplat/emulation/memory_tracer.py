"""How many bytes of tensors are alive, and how many were at most: counted op by op, not read off the process.

The resident size of a process holds the interpreter, the libraries and what the allocator keeps back; this
counts tensors alone, so it is the same on every run.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Replace = Callable[[Any, tuple[Any, ...], Any], Any]


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts every storage that an operation makes, until the storage is freed.

    ``live`` and ``peak`` are in bytes. A storage counts once however many views it has; one that was there
    before counts only if handed to ``hold``. The forward and the backward pass are seen alike. Not seen is
    what a kernel takes and frees inside one operation, such as the reordered weights of a convolution.

    ``replace`` may exchange what an operation returns: called with (operation, its arguments, its result).

    >>> with LiveBytes() as bytes_of:
    ...     kept = torch.zeros(100) + torch.zeros(100)
    >>> bytes_of.live, bytes_of.peak
    (400, 1200)
    """

    def __init__(self, replace: Replace | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._replace = replace
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that was made outside."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        # A storage keeps its Python object as long as it lives, so the object stands for the memory.
        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Forget the peak so far: from here on it is the peak of what follows."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count the storages it made."""
        result = func(*args, **(kwargs or {}))
        if self._replace is not None:
            result = self._replace(func, args, result)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if made:
            given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for tensor in made:
                # Views of what is not counted, such as rows of the data set, are not counted either.
                if id(tensor.untyped_storage()) not in given:
                    self.hold(tensor)
        return result


class SavedBytes:
    """Counts what the forward pass keeps for the backward pass; ``known`` tensors are not counted.

    Enter ``hooks()`` around the forward pass. ``total`` is in bytes, each storage once.
    """

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {id(tensor.untyped_storage()) for tensor in known}
        self._saved: dict[int, int] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(self._saved.values())

    def ignore(self, tensor: Tensor) -> None:
        """Leave out one more tensor, as if it had been among ``known``."""
        self._known.add(id(tensor.untyped_storage()))

    def _count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._saved[id(storage)] = storage.nbytes()
        return tensor


def allocated_peak(run: Callable[[], object]) -> int:
    """Return by how many bytes PyTorch's CPU allocator went up at most while ``run`` ran.

    Read from the memory events of ``torch.profiler``, so what kernels take through that allocator inside one
    operation is in it, as ``LiveBytes`` has not; what oneDNN takes without PyTorch still is not.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    level = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]):
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    return peak
