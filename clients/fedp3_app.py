"""Clients that know FedP3's messages, besides all that others know."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import Mod

from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.fedp3_options import KEPT, PartOptions
from fedplat.layer_map import LayerMap, part_layout, part_of, with_part
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch
from fedplat.security.privacy import noise_source
from fedplat.sparse_payload import masks
from fedplat.submodel_options import Shape

from .fedp3_training import PrunedNet, train_privately
from .mods.fedp3 import FedP3Mod, options_of
from .stacked.execution import Execution, usual_execution
from .task import ClientTask
from .training import TrainResult, train_one
from .training_app import STRATEGY_KEY, TrainingApp, keys_of, load_optimizer

_HEAD_KEY = "fedplat.fedp3-head"


class FedP3App(TrainingApp):
    """Trains parts of models as FedP3 asks, and all else as usual.

    With ``least_privacy``, a pair of the largest clip norm and the least noise over it, a client refuses to
    train for a server that asks for less privacy: what the server says is not to be trusted. ``noise_seed``
    makes DP-FedP3's noise repeat, for simulations only: who knows it takes the noise off again. Without it,
    that of a :class:`.mods.fedp3.FedP3Mod` among ``outer`` holds.
    """

    def __init__(
        self,
        task: ClientTask,
        execution: Execution | None = None,
        inner: Sequence[Mod] = (),
        outer: Sequence[Mod] = (),
        *,
        noise_seed: int | None = None,
        least_privacy: tuple[float, float] | None = None,
    ) -> None:
        execution = execution or usual_execution(task.build_model, task.training, task.sample())
        # Within signatures and compression, which are of what is sent, and around attacks, which are on
        # models.
        known = [mod for mod in outer if isinstance(mod, FedP3Mod)]
        outer = list(outer) if known else [*outer, FedP3Mod()]
        for mod in outer:
            if isinstance(mod, FedP3Mod):
                mod.layout = self._whole_layout
        super().__init__(task, execution, inner, outer)
        if noise_seed is None and known:
            noise_seed = known[0].noise_seed
        self._noise_seed = noise_seed
        self._least_privacy = least_privacy

    def _whole_layout(self) -> Layout:
        return self._parts.model(Shape()).layout

    def _stackable(self, message: Message, context: Context) -> bool:
        return (
            options_of(message) is None
            and self._least_privacy is None
            and super()._stackable(message, context)
        )

    def _train(self, message: Message, context: Context) -> Message:
        options = options_of(message)
        self._check_privacy(options)
        if options is None:
            return super()._train(message, context)
        task, keys = self._task, keys_of(message, context)
        model = self._model_with(message, context)
        head = LayerMap.of(model.layout).arrays_of([LayerMap.of(model.layout).head.name])
        if options.local_head and (own := context.state.get(_head_key(message))) is not None:
            assert isinstance(own, ArrayRecord)
            mine = FlatArrays.of_record(own, part_layout(model.layout, head))
            model.load(with_part(_stored(model), mine))
        config = message.content["config"]
        kept = masks(
            bytes(config.get(KEPT, b"")),  # type: ignore[arg-type]
            model.layout,
            LayerMap.of(model.layout).weights_of(options.masked),
        )
        attack = task.attack_of(*keys[:2])
        x, y = attack.on_data(*task.samples(keys[0]), generator(task.seed, "attack-data", *keys))
        on_batch = functools.partial(attack.on_batch, rng=generator(task.seed, "attack-batch", *keys))
        net = PrunedNet(model, options, kept, generator(task.seed, "fedp3-local", *keys))
        training, batches = attack.on_training(task.training), generator(task.seed, "batches", *keys)
        with seeded_torch(task.seed, "client", *keys):
            if options.private:
                source = noise_source(self._noise_seed, "fedp3-noise", *keys)
                # Who is drawn is part of the secret, too.
                chance = batches if self._noise_seed is not None else _secret()
                result = train_privately(
                    net, training, x, y, chance, source,
                    on_batch=on_batch, loss_factor=attack.loss_factor(),
                )  # fmt: skip
            else:
                result = train_one(
                    model,
                    training,
                    x,
                    y,
                    batches,
                    load_optimizer(message, context) if training.keep_optimizer else None,
                    on_batch=on_batch,
                    loss_factor=attack.loss_factor(),
                    loss_of=None if net.plain else net.loss,
                )
        net.restore()
        trained = _stored(model)
        if options.local_head:
            context.state[_head_key(message)] = part_of(trained, head).to_record()
        return self._told(self._reply(message, context, trained, result), options, result)

    def _evaluate(self, message: Message, context: Context) -> Message:
        if self._least_privacy is not None:
            raise UserError(
                "this client tells no accuracy: that of its own samples is not protected by noise"
            )
        return super()._evaluate(message, context)

    def _check_privacy(self, options: PartOptions | None) -> None:
        if self._least_privacy is None:
            return
        clip, noise = self._least_privacy
        asked = (options.clip, options.noise) if options is not None and options.private else None
        if asked is None or asked[0] > clip or asked[1] < noise:
            raise UserError(
                f"the server asks for {asked or 'no'} privacy (clip, noise); this client trains with a clip "
                f"of at most {clip:g} and noise of at least {noise:g} times that, or not at all"
            )

    def _told(self, reply: Message, options: PartOptions, result: TrainResult) -> Message:
        """Return the reply without what noise does not protect."""
        if not options.private:
            return reply
        for name, record in reply.content.items():
            if isinstance(record, MetricRecord):
                reply.content[name] = MetricRecord({"num-examples": record["num-examples"]})
        return reply


def _secret() -> np.random.Generator:
    # Fresh from the operating system: a seed in the code would tell everyone who was drawn.
    return np.random.default_rng()


def _stored(model: FlatModel) -> FlatArrays:
    return FlatArrays(model.layout, model.vector.cpu().numpy().copy(), model.side.cpu().numpy().copy())


def _head_key(message: Message) -> str:
    """Return where a client keeps its head: strategies that share a run's clients do not share that."""
    return _HEAD_KEY + str(message.content["config"].get(STRATEGY_KEY, ""))
