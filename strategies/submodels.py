"""Sub-model schemes: which part of the model a client gets, and how its reply becomes full-size again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.submodel_options import (
    DISTILLATION,
    KIND,
    MASKED_LOSS,
    SCALER,
    SIZES,
    STATIC_NORM,
    WIDTHS,
)
from fedplat.training_config import LocalTraining

from .nodes import Node

if TYPE_CHECKING:
    from fedplat.emulation.schedule import Budget
    from fedplat.models.cutting import Cut, CutPlan, IndexMap, IndexMaps
    from fedplat.models.cutting_costs import CutCosts

__all__ = [
    "DISTILLATION",
    "FULL",
    "KIND",
    "MASKED_LOSS",
    "SCALER",
    "SIZES",
    "STATIC_NORM",
    "WIDTHS",
    "CutScheme",
    "FullModel",
    "SubModelContext",
    "SubModelScheme",
    "SubModelSpec",
    "layout_of",
]


@dataclass(frozen=True)
class SubModelSpec:
    """What a client gets: ``kind`` names the scheme's choice; clients with equal specs get the same arrays.

    ``config`` travels to the client in the message's configuration.
    """

    kind: str
    config: tuple[tuple[str, Any], ...] = ()


FULL = SubModelSpec("full")


@dataclass(frozen=True)
class SubModelContext:
    """What a scheme knows of the run it is part of.

    ================= ===================================================================================
    ``module``        the full model; perhaps on the meta device, and not to be trained or changed
    ``plan``          what can be left out of it
    ``layout``        where its arrays lie in the vector
    ``costs``         what its sub-models cost, memory without ``overhead_bytes``
    ``sample_shape``  (C, H, W), or (T,) for text
    ``samples``       number of training samples of a client
    ``deadline_s``    simulated seconds that a round has, if there is a deadline
    ``seconds``       simulated seconds that a client takes to train, for so many FLOPs per sample
    ``public``        inputs and labels that the server holds itself, never of the test set; None if it
                      has none
    ``clients``       number of clients; 0 if that is not known
    ================= ===================================================================================
    """

    module: nn.Module
    plan: CutPlan
    layout: Layout
    costs: CutCosts
    sample_shape: tuple[int, ...]
    num_classes: int
    training: LocalTraining
    seed: int
    deadline_s: float | None
    overhead_bytes: int
    samples: Callable[[int], int]
    public: Callable[[], tuple[Tensor, Tensor]] | None
    clients: int = 0
    seconds: Callable[[int, int], float] | None = None

    @classmethod
    def of(
        cls,
        build_model: Callable[[], nn.Module],
        sample_shape: tuple[int, ...],
        num_classes: int,
        *,
        training: LocalTraining | None = None,
        seed: int = 0,
        clients: int = 0,
        deadline_s: float | None = None,
        overhead_bytes: int = 0,
        samples: Callable[[int], int] | None = None,
        public: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> SubModelContext:
        """Describe a run by hand, where no experiment does; ``build_model`` returns the full model.

        Raises UserError for a model whose layers cannot be cut.
        """
        from fedplat.models.cutting import plan_of
        from fedplat.models.cutting_costs import CutCosts, on_meta

        training = training or LocalTraining()
        module = on_meta(build_model)
        plan = plan_of(module, sample_shape)
        return cls(
            module,
            plan,
            layout_of(module),
            CutCosts(module, plan, sample_shape, training),
            sample_shape,
            num_classes,
            training,
            seed,
            deadline_s,
            overhead_bytes,
            samples or (lambda client: training.batch_size),
            public,
            clients,
        )


def layout_of(module: nn.Module) -> Layout:
    """Return the layout that ``FlatModel`` gives a module, which may be on the meta device."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return Layout.of(
        {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()},
        buffers=state.keys() - parameters,
    )


class SubModelScheme:
    """Cuts a client's model out of the global one and puts its reply back; this one sends the whole model.

    In each round ``begin_round`` comes first, then ``assign`` for every participant, ``extract`` for every
    distinct spec, ``restore`` for every valid reply, and ``finish_round`` if there was any.
    """

    diagnostics: Mapping[str, float] = {}
    """Figures of the round that is just over."""

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; called once, before the first round. Raises UserError if that cannot be."""

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Prepare for a round that starts from ``model``, which is only read."""

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec | None:
        """Choose the sub-model for a node, given the budget of its device (None: no limit).

        None: no sub-model fits, and the node sits the round out; ``why`` then tells the reason.
        """
        return FULL

    def why(self, node: Node) -> str:
        """Return why nothing fits a node, as the last ``assign`` found; empty if there is no more to say."""
        return ""

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the arrays that a client with this spec gets; ``model`` itself if they are all of it."""
        return model

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return a reply in the global layout and which elements (d,) it covers, None for all of them.

        ``model`` is the global model that the round started from; uncovered elements keep its values.
        """
        return arrays, None

    def restore_all(
        self, replies: Sequence[tuple[FlatArrays, SubModelSpec]], model: FlatArrays
    ) -> list[tuple[FlatArrays, torch.Tensor | None]]:
        """Return what :meth:`restore` does of each reply of a round, for a scheme that is faster at many."""
        return [self.restore(arrays, spec, model) for arrays, spec in replies]

    def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
        """Return what becomes of the new model: itself, or another in its place."""
        return new_model

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return specs by the name that the accuracy of such a part of the new model is reported under."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what the scheme remembers from round to round, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""


class FullModel(SubModelScheme):
    """Every client gets the whole model."""


class CutScheme(SubModelScheme):
    """A scheme whose sub-models are cuts of the model: a gather takes them out, a scatter puts them back.

    Subclasses choose a cut and make it a spec by :meth:`spec_of`.
    """

    _context: SubModelContext | None = None
    _maps: IndexMaps | None = None

    def __init__(self) -> None:
        self._cuts: dict[SubModelSpec, Cut] = {}

    @property
    def context(self) -> SubModelContext:
        """The run that the scheme is part of."""
        if self._context is None:
            raise UserError(
                f"{type(self).__name__} does not know the model yet: call bind(SubModelContext.of(...)) first"
            )
        return self._context

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run."""
        self._context = context

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Forget the cuts of the last round."""
        self._cuts = {}

    def spec_of(self, kind: str, cut: Cut, config: Mapping[str, Any] | None = None) -> SubModelSpec:
        """Return the spec of a cut; the whole model without further settings is :data:`FULL`.

        One ``kind`` has to mean one cut within a round.
        """
        more = tuple(sorted((config or {}).items()))
        if cut == self.context.plan.full:
            spec = SubModelSpec("full", more)
        else:
            spec = SubModelSpec(kind, ((SIZES, cut.sizes.dumps()), (KIND, kind), *more))
        self._cuts[spec] = cut
        return spec

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the part of the model that the spec stands for."""
        return model if spec.kind == "full" else self._map(model.layout, spec).extract(model)

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return the model with the reply put in, and what of it that is."""
        return (arrays, None) if spec.kind == "full" else self._map(model.layout, spec).restore(arrays, model)

    def _map(self, layout: Layout, spec: SubModelSpec) -> IndexMap:
        from fedplat.models.cutting import IndexMaps

        if self._maps is None or self._maps.layout != layout:
            self._maps = IndexMaps(self.context.plan, layout)
        return self._maps(self._cuts[spec])
