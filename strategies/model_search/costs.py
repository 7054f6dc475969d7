"""What thousands of architectures cost, at once: bytes exactly, memory predicted until it is looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedplat.models.cutting_costs import CutCosts, on_meta, weight_uses
from fedplat.rng import generator

from .space import MOST_TO_ENUMERATE, IntArray, SearchSpace

FloatArray = NDArray[np.float64]
_CHECKS = 3
_TOLERANCE = 0.02
_SAMPLES_PER_FEATURE = 3
_CHUNK = 1 << 14


@dataclass(frozen=True)
class Counts:
    """Counts by architecture, each (m,) int64.

    ============== ===================================================================
    ``parameters`` trainable numbers
    ``weights``    their bytes
    ``nbytes``     bytes of a transfer, one way
    ``flops``      of training on a sample, as far as single layers explain them
    ============== ===================================================================
    """

    parameters: IntArray
    weights: IntArray
    nbytes: IntArray
    flops: IntArray


class SpaceCosts:
    """Costs of the architectures of a space, from ``CutCosts`` of the same model.

    Parameters and bytes are counted from the plan for all architectures together. Memory is what weights,
    gradients and optimiser take, exactly, and a prediction of the rest (batch, activations, workspace):
    the rest of the smallest architecture, plus what each knob adds to that on its own, plus what a knob of
    depth and one of width add together where both act on the same blocks; blocks beyond the second count
    alike. Activations are sums over layers, so for residual nets and LSTMs this was exact. In plain
    convolutional nets the workspace, which is a maximum, is not: if a few checks are off by 2 % or more, a
    quadratic in the levels' values is fitted to what is missing (half of what it then predicted was within
    3 %, the worst 19 % too low).

    So the figure that decides is looked up (``exact``), and from then on replaces the prediction.
    """

    def __init__(self, space: SearchSpace, costs: CutCosts, module: nn.Module) -> None:
        self.space = space
        self.costs = costs
        self._uses = weight_uses(on_meta(module), costs.sample_shape)
        self._itemsize = {name: tensor.element_size() for name, tensor in module.state_dict().items()}
        self._trainable = {name for name, one in module.named_parameters() if one.requires_grad}
        self._rest: dict[int, _Rest] = {}
        self._tables: dict[int, _Table] = {}
        self._explained: bool | None = None
        # What a space small enough to enumerate costs is counted once, and looked up then.
        self._all: Counts | None = None
        if space.size <= MOST_TO_ENUMERATE:
            self._all = self.counts(space.every())

    def counts(self, choices: IntArray) -> Counts:
        """Return parameters, their bytes, the bytes of a transfer and FLOPs per sample."""
        if self._all is not None:
            rows = self.rows(choices)
            return Counts(*(column[rows] for column in vars(self._all).values()))
        parameters, weights, nbytes, flops = (np.zeros(len(choices), np.int64) for _ in range(4))
        for start in range(0, len(choices), _CHUNK):
            part = slice(start, start + _CHUNK)
            units, depths = self.space.units(choices[part]), self.space.depths(choices[part])
            group = {one.name: units[:, k] for k, one in enumerate(self.space.plan.groups)}
            stage = {one.name: depths[:, k] for k, one in enumerate(self.space.plan.stages)}
            for array in self.space.plan.arrays:
                numbers = np.ones(len(units), np.int64)
                for axis, length in zip(array.axes, array.shape, strict=True):
                    numbers *= length if axis is None else group[axis.group] * (axis.repeat * axis.blocks)
                if array.stage is not None:
                    numbers *= stage[array.stage] > array.block
                nbytes[part] += numbers * self._itemsize[array.name]
                flops[part] += numbers * self._uses.get(array.name, 0)
                if array.name in self._trainable:
                    parameters[part] += numbers
                    weights[part] += numbers * self._itemsize[array.name]
        return Counts(parameters, weights, nbytes, flops)

    def rows(self, choices: IntArray) -> IntArray:
        """Return the places of architectures in ``space.every()``, (m,)."""
        counts = self.space.counts
        if not counts:
            return np.zeros(len(choices), np.int64)
        return np.asarray(np.ravel_multi_index(tuple(choices.T), counts), np.int64)

    def flops(self, choices: IntArray) -> FloatArray:
        """Return FLOPs of training on a sample, (m,), as ``CutCosts`` counts them."""
        if self._explained is None:
            whole = self.counts(self.space.largest()[None]).flops[0]
            self._explained = whole == self.costs.flops(self.space.sizes(self.space.largest()))
        if self._explained:
            return self.counts(choices).flops.astype(np.float64)
        return np.array([self.costs.flops(self.space.sizes(choice)) for choice in choices], np.float64)

    def memory(self, choices: IntArray, batch: int, careful: bool = False) -> FloatArray:
        """Return the predicted, or where known the exact, bytes of training with a batch, (m,).

        ``careful`` predictions are multiplied by the largest ratio of truth to prediction met so far.
        """
        rest = self._rest_of(batch)
        margin = rest.margin if careful else 1.0
        if self._all is not None:
            if batch not in self._tables:
                every = self.space.every()
                self._tables[batch] = _Table(self._static(every), rest.predict(every))
            known = self.rows(
                np.array(list(rest.known), np.int64).reshape(len(rest.known), len(self.space.knobs))
            )
            table = self._tables[batch].memory(margin, known, list(rest.known.values()))
            return np.asarray(table[self.rows(choices)], np.float64)
        memory = np.ceil(self._static(choices) + rest.predict(choices) * margin)
        for row, key in enumerate(map(tuple, choices.tolist())) if rest.known else ():
            memory[row] = rest.known.get(key, memory[row])
        return memory

    def exact(self, choice: IntArray, batch: int) -> int:
        """Return the exact bytes of one architecture (knobs,); from now on ``memory`` knows them too."""
        rest = self._rest_of(batch)
        key = tuple(choice.tolist())
        if key not in rest.known:
            rest.known[key] = self.costs.memory(self.space.sizes(choice), batch)
            self._widen(rest, choice, rest.known[key])
        return rest.known[key]

    def state_dict(self) -> dict[str, list[list[int]]]:
        """Return what was looked up: rows of batch, bytes and levels; predictions follow from it."""
        return {
            "looked-up": [
                [batch, nbytes, *key]
                for batch, rest in self._rest.items()
                for key, nbytes in rest.known.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` returned."""
        for batch, nbytes, *key in state["looked-up"]:
            rest = self._rest_of(int(batch))
            rest.known[tuple(map(int, key))] = int(nbytes)
            self._widen(rest, np.array(key, np.int64), int(nbytes))

    def _static(self, choices: IntArray) -> FloatArray:
        """Return the bytes of arrays, gradients and optimiser, and of the process."""
        counts = self.counts(choices)
        training = self.costs.training
        slots = 2 if training.optimizer == "adam" else int(training.momentum > 0)
        return (counts.nbytes + counts.weights * (1 + slots) + self.costs.constant).astype(np.float64)

    def _rest_of(self, batch: int) -> _Rest:
        if batch not in self._rest:
            self._rest[batch] = _Rest(self.space, lambda choice: self._truth(choice, batch))
        return self._rest[batch]

    def _truth(self, choice: IntArray, batch: int) -> float:
        return self.costs.memory(self.space.sizes(choice), batch) - float(self._static(choice[None])[0])

    def _widen(self, rest: _Rest, choice: IntArray, nbytes: int) -> None:
        truth = nbytes - float(self._static(choice[None])[0])
        rest.margin = max(rest.margin, truth / max(float(rest.predict(choice[None])[0]), 1.0))


class _Rest:
    """Predicts memory beside weights, gradients and optimiser, from a few architectures near the smallest."""

    def __init__(self, space: SearchSpace, truth: Callable[[IntArray], float]) -> None:
        self.margin = 1.0
        self.known: dict[tuple[int, ...], int] = {}
        self._space = space
        base = space.smallest()
        self._base = float(truth(base))
        seen: dict[tuple[tuple[int, int], ...], float] = {}

        def above(*changes: tuple[int, int]) -> float:
            changes = tuple((knob, level) for knob, level in changes if level)
            if changes not in seen:
                choice = base.copy()
                for knob, level in changes:
                    choice[knob] = level
                seen[changes] = (float(truth(choice)) if changes else self._base) - self._base
            return seen[changes]

        anchors = [self._anchors(k) for k in range(len(space.knobs))]
        self._single = [
            np.interp(range(n), anchors[k], [above((k, level)) for level in anchors[k]])
            for k, n in enumerate(space.counts)
        ]
        self._double = {}
        for j, k in space.pairs:
            table = np.zeros((len(anchors[j]), len(anchors[k])))
            for (a, first), (b, second) in product(enumerate(anchors[j]), enumerate(anchors[k])):
                table[a, b] = above((j, first), (k, second)) - above((j, first)) - above((k, second))
            wide = [np.interp(range(space.counts[j]), anchors[j], column) for column in table.T]
            self._double[j, k] = np.stack(wide, axis=1)
        self._correction: FloatArray | None = None
        rng = generator(0, "memory-checks")
        self._check(np.stack([space.largest(), *space.draw(rng, _CHECKS)]), truth)
        if self.margin - 1 > _TOLERANCE or self._low < 1 - _TOLERANCE:
            features = self._features(base[None]).shape[1]
            n = _SAMPLES_PER_FEATURE * features
            self._check(space.every() if space.size <= n else space.draw(rng, n), truth)

    def _check(self, choices: IntArray, truth: Callable[[IntArray], float]) -> None:
        """Look architectures up, correct by what was wrong with them, if they are many, and set margins."""
        true = np.array([float(truth(choice)) for choice in choices])
        features = self._features(choices)
        if len(choices) > features.shape[1]:
            missing = true - self.predict(choices)
            self._correction = np.asarray(np.linalg.lstsq(features, missing, rcond=None)[0], np.float64)
        ratios = true / np.maximum(self.predict(choices), 1.0)
        self.margin, self._low = max(1.0, float(ratios.max())), float(ratios.min())

    def _features(self, choices: IntArray) -> FloatArray:
        """Return 1, the levels' values, and products of two of them, (m, features)."""
        values = [np.array(knob.levels) / max(knob.levels) for knob in self._space.knobs]
        one = np.stack([np.ones(len(choices)), *(v[choices[:, k]] for k, v in enumerate(values))], axis=1)
        first, second = np.triu_indices(one.shape[1])
        return np.asarray(one[:, first] * one[:, second])

    def predict(self, choices: IntArray) -> FloatArray:
        """Return bytes (m,), without the margin."""
        total = np.full(len(choices), self._base)
        for k, table in enumerate(self._single):
            total += table[choices[:, k]]
        for (j, k), pair in self._double.items():
            total += pair[choices[:, j], choices[:, k]]
        return total if self._correction is None else total + self._features(choices) @ self._correction

    def _anchors(self, knob: int) -> list[int]:
        """Return the levels that are looked up: all widths; the first, second and last number of blocks."""
        count = self._space.counts[knob]
        return (
            list(range(count))
            if self._space.knobs[knob].stage is None
            else sorted({0, min(1, count - 1), count - 1})
        )


class _Table:
    """Memory of all architectures, brought up to date when more is known."""

    def __init__(self, static: FloatArray, rest: FloatArray) -> None:
        self._static = static
        self._predicted = rest
        self._state = (0.0, 0)
        self._memory = static

    def memory(self, margin: float, rows: IntArray, values: list[int]) -> FloatArray:
        """Return the bytes of all architectures, (size,), of which some are known."""
        if self._state != (margin, len(rows)):
            self._state = (margin, len(rows))
            self._memory = np.ceil(self._static + self._predicted * margin)
            self._memory[rows] = values
        return self._memory
