"""The place where colluding attackers meet: between the strategy and whatever runs the clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedplat.arrays import FlatArrays, Float32Array, Layout, LayoutError
from fedplat.compat import make_message
from fedplat.rng import generator
from fedplat.runtime.around import GridWrapper
from fedplat.runtime.local import LocalGrid
from fedplat.runtime.waves import engine_for
from fedplat.security.validation import array_records

from .attacks.base import Attack, round_of, when
from .attacks.collusion import Collusion, RoundView

log = logging.getLogger("fedplat")


class CollusionGrid(GridWrapper):
    """A grid in which the replies of colluding clients are forged from what the honest ones sent.

    ``attacks`` tells how nodes attack, by node id; nodes that share one :class:`Collusion` act together, all
    other attacks are the client's own doing and only keep their nodes from counting as honest. Outside the
    rounds of its schedule an attacker is honest. ``clients`` numbers the nodes, by default by their ids.

    Replies pulled one by one are never forged, since the round is not there to see.

    In ``send_and_receive`` the colluders' training replies get other parameters, in their own memory where
    that is a row of the engine's matrix; buffers, integers and metrics stay what they trained. Errors, and
    replies that are malformed or not finite, pass as they are and are not looked at. Everything else is the
    ``grid``'s, which stays the one to close. A simulation only: no real client sees the others' replies.

    Where replies are signed, ``sign`` gives the content of a colluder's reply its signature: from that
    content, the message it answers, and the client's number.
    """

    def __init__(
        self,
        grid: Grid,
        attacks: Mapping[int, Attack],
        clients: Mapping[int, int] | None = None,
        sign: Callable[[RecordDict, Message, int], RecordDict] | None = None,
    ) -> None:
        super().__init__(grid)
        self._sign = sign
        self._attacks = dict(attacks)
        self._clients = dict(clients or {})
        groups: dict[int, Collusion] = {}
        for _, attack in sorted(attacks.items()):
            if isinstance(attack, Collusion):
                groups.setdefault(id(attack), attack)
        self._groups = list(groups.values())
        self._memories: list[dict[str, Any]] = [{} for _ in self._groups]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, those of the colluders forged."""
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        if not self._groups:
            return replies
        asked = {message.metadata.dst_node_id: message for message in sent}
        for cohort in _cohorts(_answers(sent, replies)):
            for answer in self._forge(cohort, replies):
                if self._sign is not None:
                    reply, client = replies[answer.index], self._clients.get(answer.node, answer.node)
                    signed = self._sign(reply.content, asked[answer.node], client)
                    replies[answer.index] = make_message(reply.metadata, signed)
        return replies

    def engine_for(self, messages: Sequence[Message]) -> LocalGrid | None:
        """Return the engine that may answer in waves; None while colluders have to see the whole round."""
        for message in messages:
            attack = self._attacks.get(message.metadata.dst_node_id)
            if isinstance(attack, Collusion) and attack.schedule.active(round_of(message)):
                log.info("colluders see all replies of a round, which are therefore held in memory")
                return None
        return engine_for(self._grid, messages)

    def state_dict(self) -> dict[str, Any]:
        """Return what the attacks remember from round to round, as tensors and plain values."""
        return {str(index): dict(memory) for index, memory in enumerate(self._memories)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned for the same attacks."""
        self._memories = [dict(state.get(str(index), {})) for index in range(len(self._groups))]

    def _forge(self, cohort: list[_Answer], replies: list[Message]) -> list[_Answer]:
        """Put the colluders' parameters into their replies, and return whose these are."""
        forged: list[_Answer] = []
        server_round = cohort[0].server_round
        active = {
            answer.node: attack
            for answer in cohort
            if (attack := self._attacks.get(answer.node)) and attack.schedule.active(server_round)
        }
        if not any(isinstance(attack, Collusion) for attack in active.values()):
            return forged
        cohort = [answer for answer in cohort if np.isfinite(answer.params).all()]
        if not cohort:
            return forged
        models, rows = _as_matrix(cohort)
        seen = list(zip(cohort, rows, strict=True))
        honest = [pair for pair in seen if pair[0].node not in active]
        for index, attack in enumerate(self._groups):
            own = [pair for pair in seen if active.get(pair[0].node) is attack]
            if not own:
                continue
            view = RoundView(
                models,
                _tensor(cohort[0].sent.vector)[: models.shape[1]],
                honest=torch.tensor([row for _, row in honest], dtype=torch.long),
                own=torch.tensor([row for _, row in own], dtype=torch.long),
                honest_ids=tuple(self._clients.get(answer.node, answer.node) for answer, _ in honest),
                own_ids=tuple(self._clients.get(answer.node, answer.node) for answer, _ in own),
                clients=len(cohort),
                server_round=server_round,
                rng=generator(attack.scene.seed, "collusion", index, *cohort[0].when),
                memory=self._memories[index],
            )
            for (answer, _), params in zip(own, attack.collude(view).float().numpy(), strict=True):
                replies[answer.index] = _with_params(replies[answer.index], answer, params)
                forged.append(answer)
        return forged


@dataclass(frozen=True)
class _Answer:
    """A usable training reply: its place among the replies, its model, and the one it was trained from."""

    index: int
    node: int
    record: str
    model: FlatArrays
    sent: FlatArrays
    when: tuple[int, ...]

    @property
    def server_round(self) -> int:
        return self.when[0]

    @property
    def params(self) -> Float32Array:
        return self.model.vector[: self.model.layout.num_params]


def _answers(messages: list[Message], replies: list[Message]) -> list[_Answer]:
    """Return the training replies that carry one model of the layout that was sent, by node id."""
    asked = {message.metadata.dst_node_id: message for message in messages if _is_training(message)}
    known: dict[int, FlatArrays] = {}
    found = []
    for index, reply in enumerate(replies):
        node = reply.metadata.src_node_id
        if node not in asked or reply.has_error() or not _is_training(reply):
            continue
        sent = array_records(asked[node])
        names = [name for name, record in reply.content.items() if isinstance(record, ArrayRecord)]
        if not sent or len(names) != 1:
            continue
        if id(sent[0]) not in known:
            layout = Layout.of_record(sent[0], promote=True)
            known[id(sent[0])] = FlatArrays.of_record(sent[0], layout)
        reference = known[id(sent[0])]
        try:
            model = FlatArrays.of_record(array_records(reply)[0], reference.layout)
        except LayoutError:
            continue
        found.append(_Answer(index, node, names[0], model, reference, when(asked[node])))
    return sorted(found, key=lambda answer: answer.node)


def _is_training(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == "train"


def _cohorts(answers: list[_Answer]) -> list[list[_Answer]]:
    """Put together those who were sent the same model in the same round; sub-models are not comparable."""
    cohorts: list[list[_Answer]] = []
    for answer in answers:
        for cohort in cohorts:
            if answer.server_round == cohort[0].server_round and _same(answer.sent, cohort[0].sent):
                cohort.append(answer)
                break
        else:
            cohorts.append([answer])
    return cohorts


def _same(a: FlatArrays, b: FlatArrays) -> bool:
    return a is b or (a.layout == b.layout and np.array_equal(a.vector, b.vector))


def _as_matrix(cohort: list[_Answer]) -> tuple[torch.Tensor, list[int]]:
    """Return a matrix that holds the parameters of all models, and their rows; a view if one is there."""
    model = cohort[0].model
    block, p = model.block, model.layout.num_params
    if block is not None and block.matrix.flags.writeable and all(a.model.block is block for a in cohort):
        return torch.from_numpy(block.matrix[:, :p]), [answer.model.row for answer in cohort]
    return torch.from_numpy(np.stack([answer.params for answer in cohort])), list(range(len(cohort)))


def _tensor(vector: Float32Array) -> torch.Tensor:
    # torch warns about read-only memory.
    return torch.from_numpy(vector if vector.flags.writeable else vector.copy())


def _with_params(reply: Message, answer: _Answer, params: Float32Array) -> Message:
    model, p = answer.model, len(params)
    if model.block is not None and model.vector.flags.writeable:
        # A row of the engine's matrix is this reply's alone, and staying in it spares the strategy a copy.
        model.vector[:p] = params
        return reply
    forged = FlatArrays(model.layout, np.concatenate([params, model.vector[p:]]), model.side)
    content = RecordDict({**reply.content, answer.record: forged.to_record()})
    return make_message(reply.metadata, content)
