"""Sub-models in an experiment: what a scheme is told of the run, and how good the parts of a model are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from .arrays import FlatArrays, Layout
from .clients.submodel_training import PartModels
from .clients.task import ClientTask
from .clients.training import evaluate
from .config import ExperimentConfig
from .config_parts import SubModelsConfig
from .emulation.compute import sample_bits, samples_seen
from .emulation.schedule import DeviceSchedule
from .errors import UserError
from .evaluation import PART
from .models.cutting import reestimate_batch_norm
from .models.cutting_costs import CutCosts
from .rng import generator
from .rounds import EvaluateFn
from .strategies.composed import FederatedStrategy
from .strategies.submodels import CutScheme, FullModel, SubModelContext, SubModelScheme, layout_of
from .strategies.wrapper import innermost
from .submodel_options import SubModelOptions

if TYPE_CHECKING:
    from .experiment import Situation


def scheme_for(config: ExperimentConfig, name: str, situation: Situation) -> SubModelScheme:
    """Return the sub-model scheme of a strategy, which knows the run.

    Raises UserError for one that cannot work on the model, or with what protects the clients.
    """
    part = config.submodels_of(name)
    scheme: SubModelScheme = part.build()
    if isinstance(scheme, FullModel):
        return scheme
    for hidden, key in (
        (config.aggregation.secure_groups, "aggregation.secure_groups"),
        (config.privacy.mode == "central", "privacy.mode = 'central'"),
    ):
        if hidden:
            raise UserError(
                f"submodels '{part.name}': {key} adds up updates of one model, and these are of different "
                f"parts of it; use submodels 'full', or leave one of them out"
            )
    scheme.bind(context_of(config, part, situation))
    return scheme


def context_of(config: ExperimentConfig, part: SubModelsConfig, situation: Situation) -> SubModelContext:
    """Return what a scheme is told; raises UserError for a model that cannot be cut."""
    task, shape = situation.task, situation.task.dataset.sample_shape
    devices = situation.devices

    def seconds(client: int, flops: int) -> float:
        assert devices is not None
        seen = samples_seen(len(task.parts[client]), task.training)
        cycles = devices.hardware.cycles(client, float(seen * flops), float(seen * sample_bits(shape)))
        return float(devices.hardware.compute_seconds(client, cycles))

    return SubModelContext(
        task.shapes,
        task.plan,
        layout_of(task.shapes),
        CutCosts(task.shapes, task.plan, shape, task.training),
        shape,
        task.dataset.num_classes,
        task.training,
        task.seed,
        config.emulation.deadline_s if devices else None,
        round(config.emulation.overhead_mb * 1e6) if devices else 0,
        lambda client: len(task.parts[client]),
        public_samples(task, part.public_samples) if part.public_samples else None,
        len(task.parts),
        seconds if devices else None,
    )


def public_samples(task: ClientTask, count: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return what gives ``count`` prepared training samples and labels, drawn with the run's seed.

    Clients may hold them too. Raises UserError if there are fewer.
    """
    if count > len(task.dataset.train):
        raise UserError(f"public_samples: {count} wanted, the training set has {len(task.dataset.train)}")

    @functools.cache
    def drawn() -> tuple[Tensor, Tensor]:
        order = generator(task.seed, "public-samples").permutation(len(task.dataset.train))
        index = np.sort(order[:count])
        x = task.dataset.prepare(task.dataset.train.x[index])
        return x, torch.from_numpy(np.ascontiguousarray(task.dataset.train.y[index]))

    return drawn


def schedule_for(
    config: ExperimentConfig, scheme: SubModelScheme, schedule: DeviceSchedule | None
) -> DeviceSchedule | None:
    """Return what a strategy is told of devices, which have this ``schedule`` at its server.

    If all are asked, whether they are there or not, it is told nothing, or their budgets where sub-models
    have to fit, as if all were there.
    """
    if schedule is None or config.emulation.ask == "available":
        return schedule
    if isinstance(scheme, FullModel):
        return None
    return DeviceSchedule(
        schedule.memory_bytes, schedule.down_bps, schedule.up_bps, np.ones_like(schedule.available)
    )


def evaluation_with_parts(
    evaluate_fn: EvaluateFn, strategy: Strategy, task: ClientTask, batch_size: int
) -> EvaluateFn:
    """Return an evaluation that also measures the sub-models that a strategy's scheme wants tested.

    It adds ``accuracy-of.NAME``, their accuracies on the test set, to what ``evaluate_fn`` gives.
    """
    inner = innermost(strategy)
    if not isinstance(inner, FederatedStrategy) or isinstance(inner.submodels, FullModel):
        return evaluate_fn
    scheme, models = inner.submodels, PartModels(task)

    @functools.cache
    def test_set() -> tuple[Tensor, Tensor]:
        x = task.dataset.prepare(task.dataset.test.x).to(task.device)
        return x, torch.from_numpy(np.ascontiguousarray(task.dataset.test.y)).to(task.device)

    def with_parts(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics = evaluate_fn(server_round, arrays)
        if metrics is None:
            return None
        whole = FlatArrays.of_record(arrays, Layout.of_record(arrays, promote=True))
        for name, spec in scheme.parts_to_test(max(server_round, 1)).items():
            shape = SubModelOptions.of(dict(spec.config)).shape
            model = models.model(shape)
            model.load(scheme.extract(whole, spec))
            if shape.static_norm and isinstance(scheme, CutScheme) and scheme.context.public:
                # Statistics of the whole model are not those of a part.
                samples, _ = scheme.context.public()
                reestimate_batch_norm(model.module, samples.to(task.device).split(batch_size))
            metrics[PART + name] = evaluate(model, *test_set(), task.dataset.num_classes, batch_size).accuracy
        return metrics

    return with_parts
