"""FedConv's sub-models: filters fitted at the server make the model small, and clients' replies large."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call, vmap

from fedplat.arrays import FlatArrays
from fedplat.models.cutting import CutPlan, IndexMap, Sizes
from fedplat.rng import torch_seed

from ..nodes import Node
from ..submodels import SubModelContext, SubModelSpec
from .filters import BlockSettings, FilterBank, Init, Residual
from .fitting import FitPlan, Fitted, Logits, Named, beats, fit
from .server_side import ServerNet, ServerTrained, arrays_of, groups, vector_of
from .settings import (
    Accuracy,
    Activation,
    Cautious,
    Channels,
    Dilate,
    Epochs,
    Preset,
    Rate,
    Ratios,
    Shares,
    settings_of,
)

log = logging.getLogger("fedplat")

WIDTHS = (1.0, 0.75, 0.5, 0.25)

Direction = Literal["compress", "dilate"]


class Filters:
    """Filters between the whole model and one size of it, as vectors of their parameters (m, q)."""

    def __init__(self, plan: CutPlan, sizes: Sizes, settings: BlockSettings, enlarge: bool) -> None:
        self._make = lambda seed: FilterBank(
            plan, sizes, settings, enlarge=enlarge, rng=torch.Generator().manual_seed(seed)
        )
        self._bank = self._make(0)
        self.named = Named.of(dict(self._bank.named_parameters()))

    def fresh(self, seed: int) -> Tensor:
        """Return the first values (q,) that a seed gives."""
        return self.named.join(dict(self._make(seed).named_parameters()))

    def __call__(self, values: Tensor, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arrays in the other size for m filters (m, q) and arrays (m, ...) by name."""

        def one(parameters: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
            out: dict[str, Tensor] = functional_call(self._bank, parameters, (weights,))
            return out

        parameters = self.named.split(values)
        if len(values) == 1:  # a batch of one costs as much again
            small = one({k: v[0] for k, v in parameters.items()}, {k: v[0] for k, v in arrays.items()})
            return {name: array[None] for name, array in small.items()}
        made: dict[str, Tensor] = vmap(one)(parameters, dict(arrays))
        return made


@dataclass(frozen=True)
class Problem:
    """m fits of filters: arrays (m, ...) go through, ``added`` is put to what comes out, ``net`` runs it."""

    filters: Filters
    arrays: Mapping[str, Tensor]
    net: ServerNet
    added: Mapping[str, Tensor] | None = None

    def weights(self, values: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the weights that filters (r, q) give for some of the problems."""
        made = self.filters(values, {name: each[rows] for name, each in self.arrays.items()})
        return made if self.added is None else {name: each + self.added[name] for name, each in made.items()}

    def logits(self, rows: Tensor) -> Logits:
        """Return the function to fit for some of the problems."""
        return lambda values, x: self.net.of_tensors(self.weights(values, rows), x)

    def vectors(self, values: Tensor) -> Tensor:
        """Return all weights as vectors (m, d)."""
        with torch.no_grad():
            weights = self.weights(values, torch.arange(len(values)))
        return torch.cat([weights[name].flatten(1) for name, _ in self.net.named.shapes], dim=1)


class FedConvScheme(ServerTrained):
    """Sub-models made by convolutions over the weights, fitted on a few labelled samples of the server's.

    Each round, one set of filters per width makes the model small: W' = act(K * (P(W) + W)) for every
    weight, one kernel K and projection P per place of a kernel, fitted so that the small model predicts the
    server's samples well. Clients train it and know of no filters. One set of transposed filters per client
    makes its reply large, fitted likewise. So every reply covers the whole model, and every aggregator works
    on them. Filters are kept, a client's under its number; fits start from them where they beat fresh ones.

    Four fifths of the server's samples are fitted on, the rest chooses the epoch. Filters whose accuracy
    there is below ``least_accuracy`` start anew up to ``restarts`` times; then the first units are taken
    (and put back) as they are, as in HeteroFL.

    ============== ==========================================================================================
    preset
    ============== ==========================================================================================
    default        delta filters without activation, so that all starts as HeteroFL's slice; what a client
                   changed is made large and put to the model; a fit has to beat its start surely
    paper          random filters, slopes 0.85 and 0.001, cosine schedule; the client's weights themselves
                   are made large
    released-code  like the paper's, with a projection of one channel, the residual in convolutions alone,
                   the activation twice, no schedule; and all models, also the clients', trained on the
                   server's data every round
    ============== ==========================================================================================

    All else that is given changes the preset. ``pretrain_epochs`` are those of the first round,
    ``finetune_global_epochs`` of every new model and ``finetune_client_epochs`` of every reply.

    From the paper: the filters, what is fitted, the presets' numbers. Inferred: the delta start and the
    update that is made large (both our choice), the choice of epochs on data that are not the test set, and
    the flattened pixels of a channel as places of a kernel. Widths are rounded up as for every other scheme.
    A fit takes epochs · samples / 32 steps for every width and every client. Raises UserError without server
    data and for models with BatchNorm. Shen et al., MobiSys 2024 (arXiv 2502.20639), and its released code.
    """

    def __init__(
        self,
        *,
        preset: Annotated[Preset, Field(description="settings to start from")] = "default",
        widths: Ratios = WIDTHS,
        shares: Shares = None,
        projection_channels: Channels = None,
        residual: Annotated[
            Residual | None, Field(description="arrays that are added to their projection")
        ] = None,
        activation: Activation = None,
        init: Annotated[Init | None, Field(description="first values of filters")] = None,
        dilate: Annotated[
            Dilate | None, Field(description="make a client's update large, or its model")
        ] = None,
        compress_epochs: Epochs = None,
        dilate_epochs: Epochs = None,
        lr: Rate = None,
        schedule: Annotated[
            Literal["none", "cosine"] | None, Field(description="how the learning rate goes")
        ] = None,
        cautious: Cautious = None,
        restarts: Annotated[int, Field(ge=0, description="times that bad filters start anew")] = 3,
        least_accuracy: Accuracy = None,
        warm_start: Annotated[
            bool, Field(description="go on with a round's filters in the next, where fresh ones are worse")
        ] = True,
        pretrain_epochs: Epochs = None,
        finetune_global_epochs: Epochs = None,
        finetune_client_epochs: Epochs = None,
        finetune_lr: Rate = None,
    ) -> None:
        self.settings = settings_of(
            preset,
            projection_channels=projection_channels,
            residual=residual,
            activation=activation,
            init=init,
            dilate=dilate,
            compress_epochs=compress_epochs,
            dilate_epochs=dilate_epochs,
            lr=lr,
            schedule=schedule,
            cautious=cautious,
            least_accuracy=least_accuracy,
            pretrain_epochs=pretrain_epochs,
            finetune_global_epochs=finetune_global_epochs,
            finetune_client_epochs=finetune_client_epochs,
            finetune_lr=finetune_lr,
        )
        super().__init__(widths, shares, self.settings.pretrain, self.settings.finetune_global)
        self.restarts = restarts
        self.warm_start = warm_start
        self.kept: dict[tuple[str, float, int], Tensor] = {}
        self._clients: dict[SubModelSpec, tuple[float, int]] = {}
        self._sent: dict[float, FlatArrays] = {}
        self._banks: dict[tuple[Direction, float], Filters] = {}

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run."""
        super().bind(context)
        self._banks = {}
        for ratio in self.ratios:  # so that a model that does not suit is refused at once
            self.filters("compress", ratio)

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Pre-train in the first round; sub-models are made when they are asked for."""
        super().begin_round(model, server_round)
        self._clients, self._sent = {}, {}

    def spec_of(self, ratio: float, node: Node) -> SubModelSpec:
        """Return the spec of a width for a client; it is the client's own, for its filters are."""
        spec = SubModelSpec(f"width-{ratio:g}/client-{node.key}", self.config_of(ratio))
        self._clients[spec] = ratio, node.key
        return spec

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the sub-model of the spec's width, made once a round; in a test, by kept filters."""
        tested = self.tested_ratio(spec)
        if tested is not None:
            return self._by_kept_filters(tested, model)
        ratio, _ = self._clients[spec]
        if not spec.config:
            return self.model
        if ratio not in self._sent:
            self._sent[ratio] = self.compressed(ratio)
        return self._sent[ratio]

    def compressed(self, ratio: float) -> FlatArrays:
        """Fit the filters of a width and return the sub-model that they make."""
        net = self.small_net(ratio)
        whole = self.bound.net.named.split(self._on_device(vector_of(self.model)[None]))
        problem = Problem(self.filters("compress", ratio), whole, net)
        plan, least = self.settings.compress_plan, self.settings.compress_least
        vectors, good = self._filtered("compress", ratio, [0], problem, plan, least)
        return arrays_of(vectors[0], net.layout) if good[0] else self._map(ratio).extract(self.model)

    def _by_kept_filters(self, ratio: float, model: FlatArrays) -> FlatArrays:
        """Return the sub-model that the last filters of a width make; the first units if there are none."""
        values = self.kept.get(("compress", ratio, 0))
        if values is None:
            return self._map(ratio).extract(model)
        whole = self.bound.net.named.split(self._on_device(vector_of(model)[None]))
        problem = Problem(self.filters("compress", ratio), whole, self.small_net(ratio))
        return arrays_of(problem.vectors(self._on_device(values)[None])[0], problem.net.layout)

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return a reply made large; it covers everything."""
        return self.restore_all([(arrays, spec)], model)[0]

    def restore_all(
        self, replies: Sequence[tuple[FlatArrays, SubModelSpec]], model: FlatArrays
    ) -> list[tuple[FlatArrays, torch.Tensor | None]]:
        """Return several replies made large, in their order: those of one width are fitted together.

        The outcome does not depend on their order. It is that of one call each, up to rounding, of which Adam
        makes steps where a gradient is nothing else.
        """
        done: dict[SubModelSpec, FlatArrays] = {}
        specs = sorted((spec for _, spec in replies), key=lambda spec: self._clients[spec])
        received = {spec: arrays for arrays, spec in replies}
        for ratio in self.ratios:
            those = [spec for spec in specs if self._clients[spec][0] == ratio]
            for part in groups(len(those)):
                some = those[part]
                clients = [self._clients[spec][1] for spec in some]
                large = self._enlarged(ratio, clients, [received[spec] for spec in some])
                done.update(zip(some, large, strict=True))
        return [(done[spec], None) for _, spec in replies]

    def _enlarged(
        self, ratio: float, clients: list[int], replies: Sequence[FlatArrays]
    ) -> Sequence[FlatArrays]:
        """Return the replies of clients of one width in the global layout."""
        whole = self.sizes(ratio) == self.bound.context.plan.full.sizes
        net = self.bound.net if whole else self.small_net(ratio)
        # Numbers that are not finite are for the strategy to refuse; nothing can be fitted to them.
        finite = [i for i, reply in enumerate(replies) if bool(torch.isfinite(vector_of(reply)).all())]
        large = [reply if whole else self._map(ratio).restore(reply, self.model)[0] for reply in replies]
        if not finite:
            return large
        values = self._on_device(torch.stack([vector_of(replies[i]) for i in finite]))
        if self.settings.finetune_client.epochs:
            rng = self.rng("fedconv-finetune-client", self.ratios.index(ratio))
            fitted = self.bound.tuned(net, values, self.settings.finetune_client, rng)
            self.note(f"fine-tuning of clients {ratio:g}", fitted)
            values = fitted.values
        if whole:
            for i, row in zip(finite, values, strict=True):
                large[i] = arrays_of(row, self.bound.context.layout)
            return large
        problem = Problem(self.filters("dilate", ratio), net.named.split(values), self.bound.net)
        if self.settings.dilate == "update":
            sent = self._on_device(vector_of(self._sent[ratio]))
            base = self._on_device(vector_of(self.model)[None])
            problem = Problem(
                problem.filters,
                net.named.split(values - sent),
                self.bound.net,
                self.bound.net.named.split(base),
            )
        plan, least = self.settings.dilate_plan, self.settings.dilate_least
        vectors, good = self._filtered("dilate", ratio, [clients[i] for i in finite], problem, plan, least)
        for i, row, ok in zip(finite, vectors, good, strict=True):
            if ok:
                large[i] = arrays_of(row, self.bound.context.layout)
        return large

    def _filtered(
        self,
        direction: Direction,
        ratio: float,
        clients: Sequence[int],
        problem: Problem,
        plan: FitPlan,
        least: float,
    ) -> tuple[Tensor, list[bool]]:
        """Fit filters, anew where they are bad; return weights (m, d) and whether they are good enough."""
        level = self.ratios.index(ratio)
        keys = [(direction, ratio, client) for client in clients]

        def fresh(client: int, attempt: int) -> Tensor:
            seed = self.bound.context.seed
            where = (level, client, self.server_round, attempt)
            return problem.filters.fresh(torch_seed(seed, f"fedconv-filters-{direction}", *where))

        values = self._on_device(torch.stack([fresh(client, 0) for client in clients]))
        if self.warm_start and any(key in self.kept for key in keys):
            values = self._better(problem, [self.kept.get(key) for key in keys], values, plan.cautious)
        rows, good = torch.arange(len(clients)), torch.zeros(len(clients), dtype=torch.bool)
        for attempt in range(self.restarts + 1):
            start = values[rows] if not attempt else self._fresh_rows(fresh, clients, rows, attempt)
            rng = self.rng(f"fedconv-{direction}", level, attempt)
            fitted = fit(problem.logits(rows), start, self.bound.split, plan, rng)
            self._noted(direction, ratio, attempt, fitted)
            values[rows] = fitted.values
            good[rows] = (torch.isfinite(fitted.loss) & (fitted.accuracy >= least)).cpu()
            rows = torch.nonzero(~good).flatten()
            if not len(rows):
                break
        if len(rows):
            self._count("server.filters-given-up", len(rows))
            log.info(
                "round %d: %d filters (%s, width %g) given up: the first units are taken as they are",
                self.server_round,
                len(rows),
                direction,
                ratio,
            )
        for key, row, ok in zip(keys, values.cpu(), good.tolist(), strict=True):
            if ok:
                self.kept[key] = row.clone()
            else:
                self.kept.pop(key, None)
        return problem.vectors(values), good.tolist()

    def _better(self, problem: Problem, kept: Sequence[Tensor | None], fresh: Tensor, surely: bool) -> Tensor:
        """Return the filters (m, q) to start from: fresh ones, unless those kept are better.

        Kept filters suit the weights of the round before: what they add to an update does not wear off.
        """
        values = torch.stack(
            [new if old is None else self._on_device(old) for old, new in zip(kept, fresh, strict=True)]
        )
        logits = problem.logits(torch.arange(len(values)))
        better = beats(logits, values, fresh, self.bound.split, surely)
        return torch.where(better[:, None], values, fresh)

    def _fresh_rows(
        self, fresh: Callable[[int, int], Tensor], clients: Sequence[int], rows: Tensor, attempt: int
    ) -> Tensor:
        return self._on_device(torch.stack([fresh(clients[row], attempt) for row in rows.tolist()]))

    def _noted(self, direction: Direction, ratio: float, attempt: int, fitted: Fitted) -> None:
        self.note(f"{direction} {ratio:g}", fitted)
        if attempt:
            self._count("server.filters-anew", len(fitted.values))

    def filters(self, direction: Direction, ratio: float) -> Filters:
        """Return the filters of a width."""
        if (direction, ratio) not in self._banks:
            plan, sizes = self.bound.context.plan, self.sizes(ratio)
            self._banks[direction, ratio] = Filters(plan, sizes, self.settings.block, direction == "dilate")
        return self._banks[direction, ratio]

    def _map(self, ratio: float) -> IndexMap:
        context = self.bound.context
        return context.plan.index_map(context.plan.prefix(ratio), context.layout)

    def _on_device(self, values: Tensor) -> Tensor:
        return values.to(self.bound.split.x.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the filters."""
        return {"filters": {f"{d} {ratio:g} {client}": row for (d, ratio, client), row in self.kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the filters back."""
        self.kept = {}
        for name, row in state.get("filters", {}).items():
            direction, width, client = name.split()
            ratio = next((one for one in self.ratios if f"{one:g}" == width), None)
            if ratio is not None:
                self.kept[direction, ratio, int(client)] = row
