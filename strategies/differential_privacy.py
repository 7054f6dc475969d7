"""Differential privacy of clients, around any strategy: central, with noise from the server, or local.

Both count epsilon for one client against the same client sending the model back as it came; see
:mod:`fedplat.security.privacy`, and ``docs/differential-privacy.md`` for what is protected from whom.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from pydantic import Field

from fedplat.arrays import FlatArrays, Layout, RowBlock, peek
from fedplat.compat import make_message
from fedplat.errors import UserError
from fedplat.security.clipping import clip_
from fedplat.security.privacy import BudgetSpent, PrivacyAccount, checked_noise, noise_source, released
from fedplat.security.validation import ReplyRefused, ReplyRules, refusal, scalar_metrics

from .composed import FederatedStrategy
from .reports import ClientReport
from .sensitivity import Sensitivity, sensitivity_of
from .wrapper import StrategyWrapper, client_of, innermost

log = logging.getLogger("fedplat")

Clip = Annotated[float, Field(gt=0, description="largest L2 norm of an update")]
Noise = Annotated[float, Field(gt=0, description="standard deviation over what one client can change")]
Delta = Annotated[float, Field(gt=0, lt=1)]
Budget = Annotated[float, Field(gt=0, description="epsilon not to be exceeded")] | None


class CentralPrivacy(StrategyWrapper):
    """Clips every client's update, lets a strategy combine them as equals, and adds noise to the new model.

    An update is one vector over all floating arrays, of any width, scalars and BatchNorm's statistics among
    them. Each is scaled down to an L2 norm of ``clip``, and claimed sample counts are replaced by 1. With n
    updates used, noise of standard deviation noise_multiplier·clip·s(n) goes to every element, where s(n) is
    how far one of n clients can move the strategy's outcome: 1/n for a mean, 2 at worst for rules that stay
    among the updates; see :mod:`fedplat.strategies.sensitivity`. A strategy whose s is not known is refused,
    unless ``sensitivity`` gives it, as a number or a function of n. Integer arrays stay as they were sent.
    Metrics other than the count are dropped, unless ``release_metrics`` is set, which protects none of them.

    ``diagnostics`` has ``epsilon``, spent so far at ``delta``, ``noise-std`` of the round, and ``clipped``,
    how many updates were. A round that would exceed ``budget`` is not begun: BudgetSpent, a UserError. One
    without a valid reply changes nothing, tells no more than that, and costs nothing. No amplification by
    sampling is claimed, so that where only some clients take part epsilon is an upper bound. Noise is secret
    unless ``seed`` makes it repeat, for simulations only. McMahan et al., ICLR 2018; account: Mironov, CSF
    2017.

        CentralPrivacy(Mean(), clip=1.0, noise_multiplier=1.0, delta=1e-5)
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        clip: Clip,
        noise_multiplier: Noise,
        delta: Delta,
        seed: int | None = None,
        budget: Budget = None,
        sensitivity: float | Sensitivity | None = None,
        release_metrics: bool = False,
    ) -> None:
        super().__init__(strategy)
        checked_noise(clip, noise_multiplier)
        _check_budget(budget)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.seed = seed
        self.budget = budget
        self.release_metrics = release_metrics
        self.account = PrivacyAccount(delta)
        self._sensitivity = sensitivity_of(strategy) if sensitivity is None else _function(sensitivity)
        self._reference: FlatArrays | None = None
        self._asked: set[int] = set()
        self._figures: dict[str, float] = {}
        if seed is not None:
            log.warning("privacy noise comes from seed %d: whoever knows it can take the noise off", seed)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages; raises BudgetSpent if the round would exceed the budget."""
        after = self.account.epsilon(self.noise_multiplier)
        if self.budget is not None and after > self.budget:
            raise BudgetSpent(
                f"round {server_round} would bring epsilon from {self.account.epsilon():.4g} to {after:.4g}, "
                f"above the budget of {self.budget:g}: "
                "ask for fewer rounds, or raise budget or noise_multiplier"
            )
        self._reference = FlatArrays.of_record(arrays, Layout.of_record(arrays, promote=True))
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip the valid replies, let the inner strategy combine them, and add noise to what comes out."""
        if self._reference is None:
            raise RuntimeError("aggregate_train was called before configure_train")
        reference, self._figures = self._reference, {}
        valid, others = self._sorted_out(replies, reference.layout)
        protected = self._protected(valid, reference) if valid else []
        new, metrics = super().aggregate_train(server_round, protected + others)
        if new is None:
            return None, None
        used = len(protected)
        if isinstance(innermost(self.strategy), FederatedStrategy):
            used = sum(report.status == "accepted" for report in self.reports)
        change = self._sensitivity(used)
        if not 0 < change < math.inf:
            raise UserError(f"the sensitivity with {used} updates is {change}, which no noise can cover")
        std = self.noise_multiplier * self.clip * change
        source = noise_source(self.seed, "privacy-server", server_round)
        noisy = released(_vector(new, reference.layout), std, source, reference.layout)
        self.account.spend(self.noise_multiplier)
        self._figures["noise-std"] = std
        return FlatArrays(reference.layout, noisy, reference.side.copy()).to_record(), metrics

    def _sorted_out(
        self, replies: Iterable[Message], layout: Layout
    ) -> tuple[list[tuple[Message, FlatArrays]], list[Message]]:
        """Return the replies that can be used, by client, with their models, and what the others become."""
        valid: list[tuple[Message, FlatArrays]] = []
        others: list[Message] = []
        seen: set[int] = set()
        rules = ReplyRules()
        for message in replies:
            node = message.metadata.src_node_id
            if message.has_error():
                others.append(message)
                continue
            try:
                if node not in self._asked:
                    raise ReplyRefused("a reply from a node that was not asked")
                if node in seen:
                    raise ReplyRefused("a second reply to one message")
                with np.errstate(over="ignore", invalid="ignore"):
                    model = rules.arrays(message, layout)
                if not np.isfinite(model.vector).all():
                    raise ReplyRefused("the model has numbers that are not finite")
            except ReplyRefused as reason:
                others.append(refusal(message, str(reason)))
                continue
            seen.add(node)
            valid.append((message, model))
        # The strategies of fedplat sort likewise, and so find the rows in the order they need.
        valid.sort(key=lambda pair: (client_of(self.strategy, _source(pair[0])), _source(pair[0])))
        return valid, others

    def _protected(self, valid: Sequence[tuple[Message, FlatArrays]], reference: FlatArrays) -> list[Message]:
        """Return the replies with clipped models, rows of one new matrix, and no claims."""
        matrix = np.stack([model.vector for _, model in valid])
        norms = clip_(torch.from_numpy(matrix), torch.from_numpy(reference.vector.copy()), self.clip)
        self._figures["clipped"] = float((norms > self.clip).sum())
        block = RowBlock(reference.layout, matrix, np.tile(reference.side, (len(valid), 1)))
        inner = innermost(self.strategy)
        rules = inner.rules if isinstance(inner, FederatedStrategy) else inner
        key = str(getattr(rules, "weighted_by_key", "num-examples"))
        messages = []
        for row, (message, _) in enumerate(valid):
            told = scalar_metrics(message) if self.release_metrics else {}
            metrics = MetricRecord({**told, key: 1})
            content = RecordDict({"arrays": block.row(row).to_record(), "metrics": metrics})
            messages.append(make_message(message.metadata, content))
        return messages

    @property
    def diagnostics(self) -> Mapping[str, float]:
        """Figures of the last round, with ``epsilon`` spent so far, ``noise-std`` and ``clipped``."""
        return {**super().diagnostics, **self._figures, "epsilon": self.account.epsilon()}

    def own_state(self) -> dict[str, Any]:
        """Return what has been spent."""
        return self.account.state_dict()

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what :meth:`own_state` returned."""
        self.account.load_state_dict(state)


class LocalPrivacyAccount(StrategyWrapper):
    """Counts what clients spend who protect themselves by ``fedplat.clients.mods.privacy.LocalPrivacyMod``.

    A client spends one release, at the ``noise_multiplier`` that its mod has, in every round in which it is
    asked, whether its reply arrives or not. One whose next release would exceed ``budget`` is not asked; if
    nobody else is left: BudgetSpent, a UserError. ``diagnostics`` has the largest ``epsilon`` of all clients
    so far, and each report the client's own among its ``scores``. Clients are told apart by the strategy's
    ``identities``, else by the partition they tell.

        LocalPrivacyAccount(Mean(weighted=False), noise_multiplier=1.0, delta=1e-5)
    """

    def __init__(
        self, strategy: Strategy, *, noise_multiplier: Noise, delta: Delta, budget: Budget = None
    ) -> None:
        super().__init__(strategy)
        checked_noise(1.0, noise_multiplier)
        _check_budget(budget)
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.budget = budget
        self._accounts: dict[int, PrivacyAccount] = {}
        self._nobody = PrivacyAccount(delta)
        self._charged: dict[int, int] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages to those who can afford it, and note that these spend.

        Raises BudgetSpent if nobody can.
        """
        messages = list(super().configure_train(server_round, arrays, config, grid))
        able = [message for message in messages if self._can_afford(message.metadata.dst_node_id)]
        if messages and not able:
            raise BudgetSpent(
                f"round {server_round}: every client asked would exceed its epsilon budget of "
                f"{self.budget:g}: ask for fewer rounds, or raise budget or noise_multiplier"
            )
        if len(able) < len(messages):
            log.info("round %d: %d clients have spent their budget", server_round, len(messages) - len(able))
        self._charged = {m.metadata.dst_node_id: self._identity(m.metadata.dst_node_id) for m in able}
        for who in self._charged.values():
            self._accounts.setdefault(who, PrivacyAccount(self.delta)).spend(self.noise_multiplier)
        return able

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy combine the replies; by now they may have told whose the nodes are."""
        for node_id, who in self._charged.items():
            if (known := self._identity(node_id)) != who and who in self._accounts:
                spent = self._accounts.pop(who)
                self._accounts.setdefault(known, PrivacyAccount(self.delta)).join(spent)
        return super().aggregate_train(server_round, replies)

    def epsilon(self, node_id: int) -> float:
        """Return what the client at a node has spent."""
        return self._accounts.get(self._identity(node_id), self._nobody).epsilon()

    @property
    def reports(self) -> Sequence[ClientReport]:
        """What became of each client's reply in the last round, with what each has spent."""
        return [
            replace(report, scores={**report.scores, "epsilon": self.epsilon(report.node_id)})
            for report in super().reports
        ]

    @property
    def diagnostics(self) -> Mapping[str, float]:
        """Figures of the last round, with the largest ``epsilon`` that a client has spent so far."""
        spent = max((account.epsilon() for account in self._accounts.values()), default=0.0)
        return {**super().diagnostics, "epsilon": spent}

    def own_state(self) -> dict[str, Any]:
        """Return what each client has spent."""
        return {str(who): account.state_dict() for who, account in self._accounts.items()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what :meth:`own_state` returned."""
        self._accounts.clear()
        for who, spent in state.items():
            self._accounts[int(who)] = PrivacyAccount(self.delta)
            self._accounts[int(who)].load_state_dict(spent)

    def _can_afford(self, node_id: int) -> bool:
        account = self._accounts.get(self._identity(node_id), self._nobody)
        return self.budget is None or account.epsilon(self.noise_multiplier) <= self.budget

    def _identity(self, node_id: int) -> int:
        inner = innermost(self.strategy)
        known = inner.identities if isinstance(inner, FederatedStrategy) else {}
        return known.get(node_id, client_of(self.strategy, node_id))


def share_accounts(strategies: Iterable[Strategy]) -> None:
    """Let several servers of the same clients, such as edge servers, count what these spend together.

    The accounts are those of the first :class:`LocalPrivacyAccount` around one of the strategies.
    """
    found = [wrapper for strategy in strategies for wrapper in _wrappers(strategy)]
    for wrapper in found[1:]:
        wrapper._accounts = found[0]._accounts


def _wrappers(strategy: Strategy) -> Iterable[LocalPrivacyAccount]:
    while isinstance(strategy, StrategyWrapper):
        if isinstance(strategy, LocalPrivacyAccount):
            yield strategy
        strategy = strategy.strategy


def _check_budget(budget: float | None) -> None:
    if budget is not None and not 0 < budget < math.inf:
        raise UserError(f"budget must be an epsilon above 0, or None for no limit, got {budget}")


def _function(sensitivity: float | Sensitivity) -> Sensitivity:
    if callable(sensitivity):
        return sensitivity
    if not 0 < sensitivity < math.inf:
        raise UserError(f"sensitivity must be above 0 and finite, in clip norms, got {sensitivity}")
    return lambda clients: sensitivity


def _source(message: Message) -> int:
    return message.metadata.src_node_id


def _vector(record: ArrayRecord, layout: Layout) -> NDArray[np.float32]:
    """Return the floating arrays of a model as a vector (d,), whatever types a strategy gave them."""
    vector = np.empty(layout.dim, np.float32)
    for entry in layout.entries:
        if entry.in_vector:
            if entry.name not in record or (array := peek(record[entry.name])).shape != entry.shape:
                raise UserError(
                    f"the strategy inside returned no array '{entry.name}' of shape {entry.shape}: "
                    "central privacy needs all of the model back"
                )
            vector[entry.start : entry.stop] = array.reshape(-1)
    if not np.isfinite(vector).all():
        raise UserError("the strategy inside returned numbers that are not finite, which no noise can cover")
    return vector
