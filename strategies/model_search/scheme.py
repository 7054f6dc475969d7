"""The scheme: a search per client and round, sub-models as prefixes, distillation after the round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedplat.arrays import FlatArrays
from fedplat.emulation.schedule import Budget
from fedplat.errors import UserError
from fedplat.models.cutting_costs import CutCosts
from fedplat.models.cutting_shrink import Scaler
from fedplat.rng import generator

from ..distillation import Distillation, DistillationSettings
from ..nodes import Node
from ..submodel_norms import has_norm
from ..submodels import SCALER, CutScheme, SubModelContext, SubModelSpec
from .costs import FloatArray, SpaceCosts
from .search import EarlyStop, Evolution, Objective, Problem, best_of, evolution, random_early_stop
from .space import MOST_TO_ENUMERATE, IntArray, SpaceName, search_space

Widths = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1)], ...],
    Field(min_length=1, description="shares of the units to choose from, except in space 'paper'"),
]
SearchName = Literal["auto", "enumerate", "random-early-stop", "evolution"]

_LOOK_UPS = 8
_WORK = 10**12
_REMEMBERED = 4096


@dataclass(frozen=True)
class _Found:
    """What a client got: its architecture, and the shares of its memory and of its link that it uses."""

    choice: IntArray
    memory: float
    link: float


class ModelSearch(CutScheme):
    """Gives each client the largest sub-model that its memory and its link allow in that round.

    Looked for is the architecture, of those that fit, with the highest utilisation: the smaller one of the
    shares of memory and of link that it uses (``objective="min"``), their mean, or the size alone. It fits if
    training takes no more memory than there is besides the process, if the model is sent down and back in
    ``transfer_s`` seconds each, and if all of it meets the round's deadline, if there is one. What is chosen
    has been looked up exactly, so no limit is broken. A client that not even the smallest fits sits out.

    Prefixes are cut, so any two sub-models share what both have; replies are averaged there, number by
    number, and what no client had stays. With ``distillation``, the server then draws sub-models towards the
    whole model; see ``fedplat.strategies.distillation``.

    Memory is that of the batch that the client has, rounded up to a power of two. Clients without an emulated
    device get the whole model.

    Raises UserError for settings out of range and, in ``bind``, for spaces that do not fit the model.
    Source: Yao, IEEE BigData 2024. The search by utilisation and its early end are inferred.
    """

    def __init__(
        self,
        *,
        search: SearchName = "auto",
        objective: Objective = "min",
        space: SpaceName = "auto",
        widths: Widths = (0.25, 0.5, 0.75, 1.0),
        min_depth: Annotated[int, Field(ge=1, description="fewest blocks of a stage")] = 1,
        transfer_s: Annotated[
            float, Field(gt=0, description="seconds that the model may take to be sent, each way")
        ] = 10.0,
        tau: Annotated[float, Field(gt=0, le=1, description="utilisation that is enough")] = 0.95,
        patience: Annotated[int, Field(ge=1, description="draws in a row without gain to stop after")] = 20,
        max_draws: Annotated[int, Field(ge=1, description="draws per client and round")] = 50,
        coin: Annotated[
            float, Field(gt=0, le=1, description="stop by chance instead, as the released code; there 0.8")
        ]
        | None = None,
        scaler: Annotated[
            Literal["auto", "off", "training", "always"],
            Field(description="divide what cut layers give by their width; auto: in training, if with norms"),
        ] = "auto",
        tested: Annotated[
            int, Field(ge=0, description="sub-models of the round to measure, besides the smallest")
        ] = 8,
        distillation: Annotated[bool, Field(description="distil into sub-models after each round")] = False,
        distil_subnets: Annotated[int, Field(ge=1, description="sub-models per round")] = 5,
        distil_steps: Annotated[int, Field(ge=1, description="steps of Adam per sub-model")] = 20,
        distil_batch: Annotated[int, Field(ge=2, description="noise samples per step")] = 64,
        distil_lr: Annotated[float, Field(gt=0, description="learning rate of Adam")] = 1e-3,
        distil_temperature: Annotated[float, Field(gt=0, description="temperature of the softmax")] = 1.0,
        distil_beta: Annotated[float, Field(gt=0, le=1, description="weight of the distilled values")] = 1.0,
        distil_device: Annotated[str, Field(description="where the server distils: cpu or cuda")] = "cpu",
    ) -> None:
        super().__init__()
        self.search, self.objective, self.space_name = search, objective, space
        self.widths = tuple(widths)
        self.min_depth, self.transfer_s, self._scaler_setting = min_depth, transfer_s, scaler
        self.scaler: Scaler = "off"
        self.tested = tested
        self.stop = EarlyStop(tau, patience, max_draws, coin)
        self._settings = (
            DistillationSettings(
                distil_subnets, distil_steps, distil_batch, distil_lr, distil_temperature, distil_beta,
                device=distil_device,
            )
            if distillation
            else None
        )  # fmt: skip
        self.search_seconds = 0.0
        """Wall-clock seconds that searches took so far; not among the diagnostics, which are reproducible."""
        self._reasons: dict[int, str] = {}
        self._found: list[_Found] = []
        self._distilled: dict[str, float] = {}

    def bind(self, context: SubModelContext) -> None:
        """Lay out the search space; raises UserError if it does not fit the model, or is too large."""
        super().bind(context)
        auto: Scaler = "training" if has_norm(context.module) else "off"
        self.scaler = auto if self._scaler_setting == "auto" else self._scaler_setting
        self.space = search_space(context.plan, self.space_name, self.widths, self.min_depth)
        if self.search == "enumerate" and self.space.size > MOST_TO_ENUMERATE:
            raise UserError(
                f"search = 'enumerate': {self.space.size:,} architectures are too many; use 'evolution', "
                "'random-early-stop', or another space or fewer widths"
            )
        self.costs = SpaceCosts(self.space, self._costs_of(context), context.module)
        shallow = self.space.shallowest()
        self._database = np.stack([self.space.largest(), shallow])
        self._distiller = (
            Distillation(
                context.module,
                context.plan,
                context.sample_shape,
                replace(self._settings, scaler=self.scaler),
                context.seed,
            )
            if self._settings is not None
            else None
        )

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Forget the last round's figures."""
        super().begin_round(model, server_round)
        self._reasons, self._found, self._distilled = {}, [], {}

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec | None:
        """Search for the node's sub-model; None, with a reason that ``why`` tells, if nothing fits."""
        self._reasons.pop(node.node_id, None)
        if budget is None:
            return self._spec(self.space.largest())
        start = perf_counter()
        found = self._search(node, budget, server_round)
        self.search_seconds += perf_counter() - start
        if found is None:
            return None
        self._found.append(found)
        return self._spec(found.choice)

    def why(self, node: Node) -> str:
        """Return why nothing fits a node."""
        return self._reasons.get(node.node_id, "")

    def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
        """Distil, if that is switched on."""
        if self._distiller is None or self._settings is None:
            return new_model
        rng = generator(self.context.seed, "distillation-subnets", server_round)
        drawn = self.space.draw(rng, self._settings.subnets - 1)
        subnets = [self.space.sizes(choice) for choice in (self.space.smallest(), *drawn)]
        model, self._distilled = self._distiller(new_model, subnets, server_round)
        return model

    @property
    def diagnostics(self) -> dict[str, float]:  # type: ignore[override]
        """Figures of the round: shares are means over the clients that got a sub-model for their device.

        ``submodels.memory`` and ``submodels.link`` of the limits, ``submodels.utilisation`` the smaller and
        ``submodels.tighter`` the larger of both; ``submodels.distinct`` ones, ``submodels.none-fits``
        clients; and those of distillation.
        """
        shares = np.array([(one.memory, one.link) for one in self._found]).reshape(-1, 2)
        figures = {
            "submodels.distinct": float(len({tuple(one.choice.tolist()) for one in self._found})),
            "submodels.none-fits": float(len(self._reasons)),
        }
        if len(shares):
            figures |= {
                "submodels.memory": float(shares[:, 0].mean()),
                "submodels.link": float(shares[:, 1].mean()),
                "submodels.utilisation": float(shares.min(axis=1).mean()),
                "submodels.tighter": float(shares.max(axis=1).mean()),
            }
        return figures | self._distilled

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return the smallest sub-model, and the ``tested`` that most clients of the round have."""
        held = Counter(tuple(one.choice.tolist()) for one in self._found)
        most = sorted(held, key=lambda choice: (-held[choice], choice))[: self.tested]
        specs = [self._spec(np.array(choice, np.int64)) for choice in most]
        parts = {spec.kind: spec for spec in specs if spec.config}
        return {"smallest": self._spec(self.space.smallest()), **parts}

    def state_dict(self) -> dict[str, Any]:
        """Return the architectures drawn, and the memory looked up, so far."""
        return {"database": self._database.tolist(), **self.costs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        if not state:  # of a run that began without the scheme
            return
        self._database = np.array(state["database"], np.int64).reshape(-1, len(self.space.knobs))
        self.costs.load_state_dict(state)

    def _costs_of(self, context: SubModelContext) -> CutCosts:
        if context.costs.scaler == self.scaler:
            return context.costs
        return CutCosts(
            context.module, context.plan, context.sample_shape, context.training,
            scaler=self.scaler, constant=context.costs.constant,
        )  # fmt: skip

    def _spec(self, choice: IntArray) -> SubModelSpec:
        cut = self.context.plan.of_sizes(self.space.sizes(choice))
        kind = "model-search-" + "-".join(map(str, choice.tolist()))
        whole = cut == self.context.plan.full
        return self.spec_of(kind, cut, {} if whole or self.scaler == "off" else {SCALER: self.scaler})

    def _search(self, node: Node, budget: Budget, server_round: int) -> _Found | None:
        batch = self._batch(node)
        limits = np.array([
            budget.memory_bytes - self.context.overhead_bytes,
            self.transfer_s * min(budget.down_bps, budget.up_bps) / 8,
        ], np.float64)  # fmt: skip
        for look_up in range(2 * _LOOK_UPS):
            problem = self._problem(node, budget, batch, limits, careful=look_up >= _LOOK_UPS)
            choice = self._propose(problem, server_round, node)
            if choice is None:
                break
            # Only a prediction so far; the truth replaces it, and if it does not fit, so do others'.
            memory = self.costs.exact(choice, batch)
            if memory <= limits[0]:
                return self._used(choice, memory, limits)
        return self._fallback(node, budget, batch, limits)

    def _fallback(self, node: Node, budget: Budget, batch: int, limits: FloatArray) -> _Found | None:
        """Return the smallest architecture if it fits after all, else note the reason."""
        choice = self.space.smallest()
        memory = self.costs.exact(choice, batch)
        problem = self._problem(node, budget, batch, limits)
        if problem.scores(choice[None])[0] > -np.inf:
            return self._used(choice, memory, limits)
        nbytes = int(self.costs.counts(choice[None]).nbytes[0])
        if memory > limits[0]:
            why = f"takes {memory / 1e6:.1f} MB of memory, free are {max(limits[0], 0) / 1e6:.1f} MB"
        elif nbytes > limits[1]:
            rate = 8 * nbytes / self.transfer_s / 1e6
            link = min(budget.down_bps, budget.up_bps) / 1e6
            why = f"needs {rate:.3g} Mbit/s to be sent in {self.transfer_s:g} s, the link has {link:.3g}"
        else:
            why = f"does not meet the deadline of {self.context.deadline_s:g} s"
        self._reasons[node.node_id] = f"the smallest sub-model {why}"
        return None

    def _used(self, choice: IntArray, memory: int, limits: FloatArray) -> _Found:
        nbytes = int(self.costs.counts(choice[None]).nbytes[0])
        return _Found(choice, memory / limits[0], nbytes / limits[1])

    def _batch(self, node: Node) -> int:
        size = self.context.training.batch_size
        samples = self.context.samples(node.partition) if node.partition is not None else size
        return min(size, 1 << max(0, samples - 1).bit_length())

    def _problem(
        self, node: Node, budget: Budget, batch: int, limits: FloatArray, careful: bool = False
    ) -> Problem:
        def used(choices: IntArray) -> FloatArray:
            return np.stack(
                [self.costs.memory(choices, batch, careful), self.costs.counts(choices).nbytes], axis=1
            )

        def in_time(choices: IntArray) -> NDArray[np.bool_]:
            counts, deadline, train = (
                self.costs.counts(choices),
                self.context.deadline_s,
                self.context.seconds,
            )
            if deadline is None:
                return np.ones(len(choices), np.bool_)
            with np.errstate(divide="ignore"):
                seconds = (
                    8.0
                    * counts.nbytes
                    * float((1 / np.array([budget.down_bps, budget.up_bps], np.float64)).sum())
                )
            if train is not None and node.partition is not None:
                # A device takes time in proportion to the work, beside what it takes anyway.
                start = train(node.partition, 0)
                seconds = (
                    seconds
                    + start
                    + (train(node.partition, _WORK) - start) * (self.costs.flops(choices) / _WORK)
                )
            return np.asarray(seconds <= deadline)

        def parameters(choices: IntArray) -> FloatArray:
            return self.costs.counts(choices).parameters.astype(np.float64)

        return Problem(self.space, used, parameters, limits, self.objective, in_time)

    def _propose(self, problem: Problem, server_round: int, node: Node) -> IntArray | None:
        method = self.search
        if method == "auto":
            method = "enumerate" if self.space.size <= MOST_TO_ENUMERATE else "evolution"
        if method == "enumerate":
            every = self.space.every()
            row = best_of(problem.scores(every), problem.parameters(every))
            return None if row is None else every[row]
        rng = generator(self.context.seed, "model-search", server_round, node.key)
        if method == "evolution":
            return evolution(problem, rng, Evolution())
        choice, drawn = random_early_stop(problem, rng, self._database, self.stop)
        known = _without_repeats(np.concatenate([self._database, drawn]))
        self._database = np.concatenate([known[:2], known[2:][-_REMEMBERED:]])
        return choice


def _without_repeats(choices: IntArray) -> IntArray:
    _, first = np.unique(choices, axis=0, return_index=True)
    return choices[np.sort(first)]
