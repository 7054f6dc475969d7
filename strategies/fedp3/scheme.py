"""FedP3 as a sub-model scheme: some layers whole, the others pruned, and only the former come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from pydantic import Field
from torch import nn

from fedplat.arrays import FlatArrays, Layout, payload_bytes
from fedplat.emulation.schedule import Budget
from fedplat.errors import UserError
from fedplat.fedp3_options import FEDP3, Local, PartOptions
from fedplat.layer_map import LayerMap, elements_of, part_layout, with_part
from fedplat.rng import generator
from fedplat.sparse_payload import Keep, kept_layout, packed, with_pruned

from ..nodes import Node
from ..submodel_fit import misfit
from ..submodel_norms import has_batch_norm
from ..submodels import FULL, KIND, SubModelContext, SubModelScheme, SubModelSpec
from .accounting import ExampleAccount
from .layers import LayerSets, Set
from .masks import RoundMasks, kept_count
from .settings import Draw, Layers, Positive, Share, Shares

_TEST = "test/p"


@dataclass(eq=False)
class Shipment(FlatArrays):
    """What goes to a client, where other arrays are to come back: ``layout`` is that of the reply."""

    record: ArrayRecord = field(default_factory=ArrayRecord, kw_only=True)

    def to_record(self) -> ArrayRecord:
        """Return what is sent."""
        return self.record


class FedP3Scheme(SubModelScheme):
    """Personal pruning: each client gets some layers and the head whole, the others pruned, and returns
    these.

    ``layers`` names the sets L_i: one layer (``lower-b``), two or three (``opu2``, ``opu3``), a count drawn
    (``opu-1-2-3``, ``opu-2-3``), all (``full``), or as many as the device's link can carry before the
    deadline (``budget``). ``draw`` tells who gets which: see :class:`.layers.LayerSets`. Of all other layers
    the ``p`` largest weights of each tensor are sent, found anew in every round from the global weights;
    biases and norms are never pruned. ``p`` may be several, of which each client draws one for good.
    ``prune_all`` prunes the trained layers too, but never the head: with ``full``, that is the paper's sweep
    over p.

    Clients train what they were sent and hold pruned weights at zero, also in the forward pass, unless
    ``enforce_mask`` is off, which is what the released code does. Each of their steps may leave more out of
    the pruned layers (``local_pruning``): nothing (``fixed``), elements at random (``uniform``), or all but
    the first outputs and inputs (``ordered``), down to a share drawn from [p_local, 1], or always p_local
    (``constant_q``). ``freeze_unassigned`` trains the returned layers and the head only. With ``local_head``
    each client goes on with its own head; heads are still returned and averaged.

    ``dp_clip`` turns DP-FedP3 on: samples' gradients are clipped to it, and noise goes to their sum before
    anything leaves the client. ``dp_noise`` is the noise over the clip, or is found for ``dp_epsilon`` after
    ``dp_rounds``. ``diagnostics`` has ``epsilon``, the most that any client has spent at ``dp_delta``;
    clients whose next round would exceed ``dp_budget`` sit out. Models with BatchNorm are refused.

    Everything a reply does not bring keeps the global value and is not covered, so every aggregator works;
    :class:`.aggregation.FedP3` has the paper's. Needs the client of :mod:`fedplat.clients.fedp3_app`.

    From the paper: what is sent and returned, the sets' sizes, magnitude pruning by p, local pruning,
    per-layer means, local noise. Inferred: masks held while training, the law of q, whole coverage of random
    draws, ``budget``, Poisson sampling. Yi et al., ICLR 2024 (arXiv 2404.09816), and its released code.
    """

    def __init__(
        self,
        *,
        layers: Annotated[Layers, Field(description="which layers a client trains")] = "opu3",
        draw: Annotated[
            Draw, Field(description="who gets which layers, and when that is drawn")
        ] = "rotation",
        p: Shares = 0.9,
        prune_all: Annotated[bool, Field(description="prune also the layers that are trained")] = False,
        local_pruning: Annotated[Local, Field(description="what a step leaves out besides")] = "fixed",
        p_local: Annotated[Share, Field(description="least share that a step keeps")] = 0.9,
        constant_q: Annotated[bool, Field(description="keep p_local in every step")] = False,
        enforce_mask: Annotated[bool, Field(description="hold what is pruned at zero")] = True,
        freeze_unassigned: Annotated[bool, Field(description="train only what is returned")] = False,
        local_head: Annotated[bool, Field(description="clients go on with their own heads")] = False,
        dp_clip: Annotated[Positive, Field(description="largest norm of a sample's gradient")] = None,
        dp_noise: Annotated[Positive, Field(description="noise over dp_clip")] = None,
        dp_epsilon: Annotated[Positive, Field(description="epsilon after dp_rounds, instead")] = None,
        dp_rounds: Annotated[int | None, Field(ge=1, description="rounds of each client")] = None,
        dp_delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5,
        dp_budget: Annotated[Positive, Field(description="epsilon not to be exceeded")] = None,
    ) -> None:
        self.shares = (p,) if isinstance(p, int | float) else tuple(p)
        if not self.shares or not all(0 < share <= 1 for share in (*self.shares, p_local)):
            raise UserError(f"p = {p}, p_local = {p_local}: expected shares above 0 and at most 1")
        if dp_clip is None and not (dp_noise is None and dp_epsilon is None and dp_budget is None):
            raise UserError("dp_noise, dp_epsilon and dp_budget go with dp_clip, which is not set")
        self.kind: Layers = layers
        self.draw: Draw = draw
        self.prune_all = prune_all
        self.local_head = local_head
        self.clip = dp_clip or 0.0
        self._common = PartOptions(
            (),
            local=local_pruning,
            least=p_local if local_pruning != "fixed" else 1.0,
            constant=constant_q,
            enforce=enforce_mask,
            freeze=freeze_unassigned,
            local_head=local_head,
        )
        self._privacy: dict[str, Any] = {
            "noise": dp_noise,
            "epsilon": dp_epsilon,
            "rounds": dp_rounds,
            "budget": dp_budget,
            "delta": dp_delta,
        }
        self.account: ExampleAccount | None = None
        self._context: SubModelContext | None = None
        self._options: dict[SubModelSpec, PartOptions] = {}
        self._tests: dict[SubModelSpec, float] = {}
        self._masks: RoundMasks | None = None
        self._members: Counter[SubModelSpec] = Counter()
        self._bytes: dict[SubModelSpec, tuple[int, int, int]] = {}
        self._why: dict[int, str] = {}

    # The run -----------------------------------------------------------------------------------------------

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; raises UserError for a model that does not suit."""
        self._context = context
        self.map = LayerMap.of(context.layout)
        head = context.layout.by_name[self.map.head.weights[0]]
        if head.shape[0] != context.num_classes:
            raise UserError(
                f"FedP3: the last layer '{self.map.head.name}' has {head.shape[0]} outputs for "
                f"{context.num_classes} classes; it has to be the head"
            )
        if self._common.local == "ordered":
            check_ordered(context.module)
        self.sets = LayerSets(self.kind, self.draw, context.clients, len(self.map.hidden), context.seed)
        if self.clip:
            if has_batch_norm(context.module):
                raise UserError(
                    "DP-FedP3: BatchNorm mixes the samples of a batch, so no gradient of one sample is there "
                    "to clip; take a model with GroupNorm, or without norms"
                )
            sizes = {client: context.samples(client) for client in range(max(context.clients, 1))}
            self.account = ExampleAccount(sizes, context.training, **self._privacy)
            self._common = replace(self._common, clip=self.clip, noise=self.account.noise)

    @property
    def context(self) -> SubModelContext:
        """The run that the scheme is part of."""
        if self._context is None:
            raise UserError("FedP3 does not know the model yet: call bind(SubModelContext.of(...)) first")
        return self._context

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Forget the last round, and its masks."""
        self._masks = RoundMasks(model)
        self._members, self._bytes, self._why = Counter(), {}, {}
        self._options, self._tests = {}, {}

    # Who gets what -----------------------------------------------------------------------------------------

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec | None:
        """Return a client's layers and share; None if they do not fit its device, or its budget is spent."""
        context = self.context
        client = node.key % context.clients if context.clients else node.key
        if self.account is not None and not self.account.can_afford(client):
            self._why[node.node_id] = f"it would exceed its budget of epsilon = {self.account.budget:g}"
            return None
        why = misfit(replace(context, deadline_s=None), node, budget, context.plan.full.sizes)
        for trained, share in self._candidates(client, budget, server_round):
            options = self.options(trained, share)
            why = why or self._too_slow(node, budget, options)
            if not why:
                spec = self._spec_of(options)
                self._members[spec] += 1
                if self.account is not None:
                    self.account.spend(client)
                return spec
            if "memory" in why:
                break
            self._why[node.node_id], why = why, ""
        self._why[node.node_id] = why or self._why.get(node.node_id, "")
        return None

    def why(self, node: Node) -> str:
        """Return what was too much for a node."""
        return self._why.get(node.node_id, "")

    def options(self, trained: Set, share: float) -> PartOptions:
        """Return how a client trains that has these layers and that share of the others."""
        hidden = [layer.name for layer in self.map.hidden]
        names = tuple(hidden[layer] for layer in trained)
        pruned = tuple(name for name in hidden if self.prune_all or name not in names)
        if share == 1 and self._common.local == "fixed":
            pruned = ()
        return replace(self._common, trained=names, pruned=pruned, share=share if pruned else 1.0)

    def _candidates(self, client: int, budget: Budget | None, server_round: int) -> list[tuple[Set, float]]:
        share = self.shares[0]
        if len(self.shares) > 1:
            drawn = generator(self.context.seed, "fedp3-share", client).integers(len(self.shares))
            share = self.shares[int(drawn)]
        if self.kind != "budget":
            return [(self.sets(client, server_round), share)]
        shares = sorted(set(self.shares), reverse=True) if budget is not None else [share]
        counts = range(self.sets.layers, 0, -1)
        return [(self.sets.from_start(client, count), one) for count in counts for one in shares]

    def _too_slow(self, node: Node, budget: Budget | None, options: PartOptions) -> str:
        context = self.context
        if budget is None or context.deadline_s is None:
            return ""
        if not (budget.down_bps and budget.up_bps):
            return "its link stands still"
        down, up = self._planned_bytes(options)
        seconds = 8 * down / budget.down_bps + 8 * up / budget.up_bps
        if context.seconds is not None and node.partition is not None:
            seconds += context.seconds(node.partition, context.costs.flops(context.plan.full.sizes))
        if seconds > context.deadline_s:
            return f"a round takes {seconds:,.4g} s of {context.deadline_s:,.4g} s"
        return ""

    def _planned_bytes(self, options: PartOptions) -> tuple[int, int]:
        """Return the bytes down and up, before anything is made."""
        layout, pruned = self.context.layout, self.map.weights_of(options.masked)
        sizes = [e.stop - e.start for e in map(layout.by_name.__getitem__, pruned)]
        left_out = sum(size - kept_count(size, options.share) for size in sizes)
        down = layout.nbytes - 4 * left_out + (-(-sum(sizes) // 8) if sizes else 0)
        return down, self._reply_layout(options).nbytes

    def _reply_layout(self, options: PartOptions) -> Layout:
        layout = part_layout(self.context.layout, self._returned(options))
        sizes = {name: layout.by_name[name] for name in self.map.weights_of(options.returned_sparse)}
        return kept_layout(
            layout, {name: kept_count(e.stop - e.start, options.share) for name, e in sizes.items()}
        )

    def _returned(self, options: PartOptions) -> frozenset[str]:
        return self.map.arrays_of((*options.trained, self.map.head.name))

    def _spec_of(self, options: PartOptions) -> SubModelSpec:
        everything = len(options.trained) == len(self.map.hidden)
        if everything and not options.pruned and not options.private and not options.local_head:
            return FULL
        kind = "all" if everything else "+".join(options.trained)
        if options.pruned:
            kind += f"@{options.share:g}"
        spec = SubModelSpec(kind, ((FEDP3, options.dumps()), (KIND, kind)))
        self._options[spec] = options
        return spec

    # There and back ----------------------------------------------------------------------------------------

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return what is sent, made once for all clients of a spec; in a test, the pruned model."""
        if spec in self._tests:
            return self._pruned(model, self._tests[spec])
        if spec not in self._options:
            self._bytes[spec] = model.layout.nbytes, 0, model.layout.nbytes
            return model
        options = self._options[spec]
        record = FlatArrays.copy_of(
            packed(model, self._kept(model, options.masked, options.share))
        ).to_record()
        layout = self._reply_layout(options)
        mask = record["mask"].shape[0] if "mask" in record else 0
        self._bytes[spec] = payload_bytes(record), mask, layout.nbytes
        return Shipment(layout, np.zeros(0, np.float32), np.zeros(0, np.uint8), record=record)

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return the model with the returned layers put in, and which elements (d,) these are."""
        if spec not in self._options:
            return arrays, None
        options = self._options[spec]
        returned = self._returned(options)
        covered = elements_of(model.layout, returned)
        if options.returned_sparse:
            keep = self._kept(model, options.returned_sparse, options.share)
            arrays = with_pruned(arrays, part_layout(model.layout, returned), keep)
        return with_part(model, arrays), torch.from_numpy(covered)

    def _kept(self, model: FlatArrays, layers: Iterable[str], share: float) -> Keep:
        if self._masks is None or self._masks.model is not model:
            self._masks = RoundMasks(model)
        return self._masks(self.map.weights_of(layers), share)

    def _pruned(self, model: FlatArrays, share: float) -> FlatArrays:
        new = FlatArrays(model.layout, model.vector.copy(), model.side)
        names = self.map.weights_of(layer.name for layer in self.map.hidden)
        for name, kept in RoundMasks(model)(names, share).items():
            entry = model.layout.by_name[name]
            new.vector[entry.start : entry.stop][~kept] = 0
        return new

    # Figures and state -------------------------------------------------------------------------------------

    @property
    def diagnostics(self) -> Mapping[str, float]:  # type: ignore[override]
        """Figures of a round, under ``fedp3.``, and ``epsilon``.

        Bytes of arrays per client, measured on what was made to be sent: ``bytes-down``, of which
        ``mask-bytes`` say what was kept, and ``bytes-up``. By layer, ``trained-by`` counts clients, and
        ``density`` is the share of its weights that clients had, on average.
        """
        figures: dict[str, float] = {"epsilon": self.account.epsilon()} if self.account is not None else {}
        clients = sum(self._members.values())
        if not clients:
            return figures
        for place, name in enumerate(("bytes-down", "mask-bytes", "bytes-up")):
            total = sum(
                count * self._bytes.get(spec, (0, 0, 0))[place] for spec, count in self._members.items()
            )
            figures[f"fedp3.{name}"] = total / clients
        layout = self.context.layout
        for layer in self.map.hidden:
            sizes = [layout.by_name[name].stop - layout.by_name[name].start for name in layer.weights]
            trained, kept = 0, 0.0
            for spec, count in self._members.items():
                options = self._options.get(spec)
                trained += count if options is None or layer.name in options.trained else 0
                share = options.share if options is not None and layer.name in options.masked else 1.0
                kept += count * sum(kept_count(size, share) for size in sizes) / sum(sizes)
            figures[f"fedp3.trained-by.{layer.name}"] = float(trained)
            figures[f"fedp3.density.{layer.name}"] = kept / clients
        return figures

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return the model pruned throughout, for each share below 1."""
        specs = {f"pruned-{s:g}": SubModelSpec(f"{_TEST}{s:g}") for s in sorted(set(self.shares)) if s < 1}
        self._tests |= {spec: float(spec.kind.removeprefix(_TEST)) for spec in specs.values()}
        return specs

    def state_dict(self) -> dict[str, Any]:
        """Return what clients have spent."""
        return {"account": self.account.state_dict()} if self.account is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        if self.account is not None:
            self.account.load_state_dict(state.get("account", {}))


def check_ordered(module: nn.Module) -> None:
    """Raise UserError for a model with layers of which no first outputs and inputs can be kept."""
    for name, layer in module.named_modules():
        weighty = any(weight.ndim >= 2 for weight in layer.parameters(recurse=False))
        if weighty and not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            raise UserError(
                f"local_pruning = 'ordered' is for linear and convolutional layers; '{name}' is a "
                f"{type(layer).__name__}. Take 'uniform' or 'fixed'"
            )
