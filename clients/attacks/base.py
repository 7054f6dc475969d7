"""The places where an attack can live, when it is on, and what it knows of the run."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from fedplat.arrays import FlatArrays, Layout
from fedplat.edge_keys import EDGE_ROUND
from fedplat.errors import UserError
from fedplat.rng import generator
from fedplat.security.validation import array_records
from fedplat.training_config import LocalTraining
from fedplat.verdicts import UNTARGETED


@dataclass(frozen=True)
class Scene:
    """What an attacker knows of the run: its seed and the kind of data.

    Prepared images are (pixel − mean) / std per channel, with pixels in [0, 1]; tokens have neither.
    ``sample_shape`` is (C, H, W), or (T,) for text, and empty where it is not known.
    """

    seed: int = 0
    num_classes: int = 10
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    sample_shape: tuple[int, ...] = ()

    def pixels(self, x: torch.Tensor) -> torch.Tensor:
        """Return prepared images (n, C, H, W) as pixels in [0, 1]; a new tensor."""
        return x * self._channel(self.std, x) + self._channel(self.mean, x)

    def prepared(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels (n, C, H, W) as prepared images; a new tensor."""
        return (pixels - self._channel(self.mean, pixels)) / self._channel(self.std, pixels)

    @staticmethod
    def _channel(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)


@dataclass(frozen=True)
class Schedule:
    """The rounds in which an attack is on: from ``start``, and then ``on`` rounds of every ``on + off``."""

    start: int = 1
    on: int = 1
    off: int = 0

    def active(self, server_round: int) -> bool:
        """Whether the attack is on.

        >>> [n for n in range(1, 11) if Schedule(start=3, on=2, off=3).active(n)]
        [3, 4, 8, 9]
        """
        since = server_round - self.start
        return since >= 0 and since % (self.on + self.off) < self.on


class Attack:
    """An attacker's behaviour: on its data, in its training, on its reply, or several. This one does nothing.

    An attack is itself a Flower client mod, so a Flower user writes ``ClientApp(mods=[SignFlip()])``; then
    only what it does to the reply takes effect. ``kind`` is what a perfect detector would call the client,
    in the words of :mod:`fedplat.verdicts`, ``label`` what results call the attack. An instance may serve
    many clients: it keeps no state.
    """

    kind: ClassVar[str] = UNTARGETED
    images_only: ClassVar[bool] = False
    label: str = ""
    scene: Scene = Scene()
    schedule: Schedule = Schedule()

    def placed(self, scene: Scene, schedule: Schedule | None = None, label: str = "") -> Self:
        """Return a copy of the attack that knows the run, keeps to a schedule and has a name.

        Raises UserError if the attack cannot work on the run's data.
        """
        if self.images_only and scene.sample_shape and len(scene.sample_shape) != 3:
            raise UserError(f"attack {label or type(self).__name__} works on images, and these data are none")
        attack = copy.copy(self)
        attack.scene, attack.schedule, attack.label = scene, schedule or self.schedule, label
        return attack

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prepared samples (n, ...) and labels to train on; those given are left as they are."""
        return x, y

    def on_training(self, training: LocalTraining) -> LocalTraining:
        """Return the settings to train with."""
        return training

    def on_batch(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what one step trains on, or None to leave the step out."""
        return x, y

    def loss_factor(self) -> float:
        """Return what the training loss is multiplied by; −1 climbs it."""
        return 1.0

    @property
    def only_on_data(self) -> bool:
        """Whether the attack touches nothing but the samples: the training itself is then an honest one."""
        kind, hooks = type(self), ("on_training", "on_batch", "loss_factor", "__call__")
        return all(getattr(kind, hook) is getattr(Attack, hook) for hook in hooks)

    def goal(self) -> Mapping[int, int]:
        """Return which class (by true class) the attack wants predicted; its success rate is judged by it."""
        return {}

    def disguise(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return test samples as the attacker would present them, a backdoor's trigger put in, or None."""
        return None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the reply that the attacker sends; ``call_next`` gives the one of its training."""
        return call_next(message, context)


class ReplyAttack(Attack):
    """An attack on the client's own reply: what is sent is forged from what was received and trained.

    Acts on training replies alone. Buffers such as BatchNorm's statistics are sent as they are: a negative
    variance would only give the attacker away.
    """

    @abstractmethod
    def forge(
        self, trained: NDArray[np.float32], received: NDArray[np.float32], rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return the parameters (p,) to send; those given are left as they are."""

    def claimed(self, num_examples: int) -> int:
        """Return the sample count to claim."""
        return num_examples

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client and forge its reply."""
        reply = call_next(message, context)
        server_round = round_of(message)
        kind = message.metadata.message_type.split(".")[0]
        if reply.has_error() or kind != "train" or not self.schedule.active(server_round):
            return reply
        layout = Layout.of_record(array_records(message)[0], promote=True)
        received = FlatArrays.of_record(array_records(message)[0], layout)
        partition = int(context.node_config.get("partition-id", 0))
        rng = generator(self.scene.seed, "attack-reply", partition, *when(message))
        content = RecordDict()
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                content[name] = self._forged(FlatArrays.of_record(record, layout), received, rng).to_record()
            elif isinstance(record, MetricRecord) and isinstance(record.get("num-examples"), int):
                claim = {"num-examples": self.claimed(int(record["num-examples"]))}  # type: ignore[arg-type]
                content[name] = MetricRecord({**record, **claim})
            else:
                content[name] = record
        return Message(content, reply_to=message)

    def _forged(self, trained: FlatArrays, received: FlatArrays, rng: np.random.Generator) -> FlatArrays:
        p = trained.layout.num_params
        forged = self.forge(trained.vector[:p], received.vector[:p], rng)
        return FlatArrays(trained.layout, np.concatenate([forged, trained.vector[p:]]), trained.side)


def dispatch(attacks: Mapping[int, Attack]) -> Attack:
    """Return one mod that lets each client of ``attacks``, by partition, behave as its attack says."""
    return _Dispatch(attacks)


class _Dispatch(Attack):
    def __init__(self, attacks: Mapping[int, Attack]) -> None:
        self._attacks = attacks

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        attack = self._attacks.get(int(context.node_config["partition-id"]))
        return attack(message, context, call_next) if attack else call_next(message, context)


def round_of(message: Message) -> int:
    """Return the round a message belongs to, as our strategies and Flower's tell it; 1 if it is not said."""
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and "server-round" in record:
            return int(record["server-round"])  # type: ignore[arg-type]
    return 1


def when(message: Message) -> tuple[int, ...]:
    """Return what draws for a message are keyed by, besides the client: its round, and its edge's.

    The first round of an edge draws as a round without edges does.
    """
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and "server-round" in record:
            number = int(record.get(EDGE_ROUND, 1))  # type: ignore[arg-type]
            return (round_of(message),) if number == 1 else (round_of(message), number)
    return (round_of(message),)
