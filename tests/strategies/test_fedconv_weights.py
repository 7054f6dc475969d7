"""FedConv's learned mean, and the server that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedplat.errors import UserError
from fedplat.strategies import Mean
from fedplat.strategies.aggregators import Aggregate
from fedplat.strategies.fedconv import LearnedWeights, ServerAlone
from fedplat.strategies.fedconv.fitting import FitPlan, judged
from fedplat.strategies.fedconv.server_side import vector_of
from fedplat.strategies.fedconv.weights import Blend, LearnedWeightsRule
from fedplat.updates import ClientUpdates

from ..flower_apps import replies_to
from ..models.cutting_nets import tiny_resnet
from .test_composed import SilentGrid
from .test_fedconv_scheme import context, start_model, trained_reply


def rule_of(per="tensor", start="ones", normalise=False, lam=0.0, temperature=None, epochs=0, lr=0.02):
    rule = LearnedWeightsRule(per, start, normalise, lam, temperature, FitPlan(epochs, lr), 1)
    rule.bind(context())
    return rule


def updates_of(clients: Sequence[int], counts: Sequence[int] = (), **more: Any) -> ClientUpdates:
    model = start_model()
    models = [trained_reply(model, c, 0.3) for c in clients]
    return ClientUpdates.stack(models, model, clients, counts or [10 + 7 * c for c in clients], **more)


def fedavg(updates: ClientUpdates) -> torch.Tensor:
    shares = torch.from_numpy(updates.num_examples / updates.num_examples.sum())
    return shares @ updates.params.double()


@pytest.mark.parametrize("per", ["tensor", "element"])
@pytest.mark.parametrize("normalise", [False, True])
def test_weights_of_one_are_federated_averaging(per, normalise: bool) -> None:
    updates = updates_of([3, 1, 4])
    made = rule_of(per, normalise=normalise)(updates)
    torch.testing.assert_close(made.vector.double(), fedavg(updates), rtol=1e-6, atol=1e-7)
    expected = updates.num_examples / updates.num_examples.sum()
    np.testing.assert_allclose(made.weights.numpy(), expected)
    assert made.accepted.all()


def test_a_weighted_sum_by_hand() -> None:
    layout = start_model().layout
    rows = torch.arange(2.0)[:, None].repeat(1, layout.num_params).double() + 1  # clients of ones and twos
    shares = torch.tensor([[0.25], [0.75]]).double()
    blend = Blend(layout, rows, shares, rows[0], False, "tensor")
    values = torch.ones(2, blend.width)
    values[:, 0] = torch.tensor([2.0, 4.0])
    made = blend(values)
    assert made[: blend.lengths[0]].unique().tolist() == [2 * 0.25 * 1 + 4 * 0.75 * 2]
    assert made[blend.lengths[0] :].unique().tolist() == [0.25 + 1.5]


def test_normalised_weights_act_on_the_distance_from_the_least_number() -> None:
    layout = start_model().layout
    rows = torch.stack([torch.full((layout.num_params,), v) for v in (-1.0, 3.0)]).double()
    blend = Blend(layout, rows, torch.full((2, 1), 0.5).double(), rows[0], True, "tensor")
    # In 0..1 the clients are at 0 and 1; weighted 5 and 2, their mean is 1; back that is 3.
    assert blend(torch.tensor([[5.0], [2.0]]).repeat(1, blend.width)).unique().tolist() == [3.0]


@pytest.mark.parametrize("per", ["tensor", "element"])
def test_learned_weights_predict_the_servers_samples_better_than_the_mean(per) -> None:
    rule = rule_of(per, epochs=15)
    updates = updates_of([0, 1, 2, 3])
    made = rule(updates)
    bound = rule.bound
    assert bound is not None
    rows = torch.stack([fedavg(updates).float(), made.vector])
    loss, _ = judged(bound.net, rows, bound.split)
    assert loss[1] < loss[0] - 0.02
    assert made.diagnostics["weights-steps"] == 15 * 2


@pytest.mark.parametrize("per", ["tensor", "element"])
def test_the_order_of_clients_is_no_matter_and_weights_belong_to_nodes(per) -> None:
    # Trap: in the released code weights follow the order of arrival, and so change hands between rounds.
    order = [2, 0, 3, 1]
    one, two = rule_of(per, epochs=3), rule_of(per, epochs=3)
    for _ in range(2):
        first, second = one(updates_of([0, 1, 2, 3])), two(updates_of(order))
        assert torch.equal(first.vector, second.vector)
        assert torch.equal(first.weights[order], second.weights)
    for node in range(4):
        assert torch.equal(one.kept[node], two.kept[node])
    assert set(one(updates_of([5, 0])).weights.shape) == {2}
    assert sorted(one.kept) == [0, 1, 2, 3, 5]


def test_all_clients_of_any_number_count() -> None:
    # Trap: the released code combines the first three models, divided by the samples of all.
    updates = updates_of(range(7), [10] * 7)
    made = rule_of()(updates)
    assert made.weights.tolist() == pytest.approx([1 / 7] * 7)
    torch.testing.assert_close(made.vector.double(), fedavg(updates), rtol=1e-6, atol=1e-7)


def test_a_resumed_rule_goes_on_with_the_same_bits() -> None:
    first, second = rule_of(epochs=2, start="normal"), rule_of(epochs=2, start="normal")
    first(updates_of([0, 1]))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(updates_of([0, 1])).vector, second(updates_of([0, 1])).vector)


def test_numbers_that_nobody_covers_keep_their_value_and_others_are_means_of_who_does() -> None:
    d = start_model().layout.dim
    coverage = torch.zeros(2, d, dtype=torch.bool)
    coverage[0, :50] = coverage[1, 20:100] = True
    updates = updates_of([0, 1], [10, 30], coverage=coverage)
    for per in ("tensor", "element"):
        for normalise in (False, True):
            made = rule_of(per, normalise=normalise)(updates).vector
            rows, old = updates.params, updates.reference
            torch.testing.assert_close(made[:20], rows[0, :20])
            torch.testing.assert_close(made[20:50], (rows[0] * 0.25 + rows[1] * 0.75)[20:50])
            torch.testing.assert_close(made[50:100], rows[1, 50:100])
            torch.testing.assert_close(made[100:], old[100:])


def test_a_divergence_holds_the_new_model_near_the_old_and_a_prior_prefers_clients_near_it() -> None:
    updates = updates_of([0, 1, 2])
    held = rule_of(lam=100.0, epochs=10)(updates).vector - updates.reference
    free = rule_of(epochs=10)(updates).vector - updates.reference
    assert held.norm() < free.norm()
    far = updates.params.clone()
    far[2] = updates.reference + 10 * (far[2] - updates.reference)
    spread = ClientUpdates(
        *(getattr(updates, name) for name in ("layout", "node_ids", "num_examples")),
        far,
        *(getattr(updates, name) for name in ("reference", "side", "update_norms")),
    )
    made = rule_of(temperature=0.5)(spread)
    assert made.weights[2] < 0.1
    assert rule_of()(spread).weights[2] > 0.3
    assert float(made.weights.sum()) == pytest.approx(1)


def test_kl_of_a_distribution_to_itself_is_zero_and_by_hand() -> None:
    layout = start_model().layout
    rows = torch.randn(2, layout.num_params, dtype=torch.float64)
    blend = Blend(layout, rows, torch.full((2, 1), 0.5).double(), rows[0], False, "tensor")
    assert blend.divergences(rows[0], rows[0]).abs().max() < 1e-12
    last = blend.lengths[-1]
    p, q = (row[-last:].softmax(0) for row in rows)
    assert float(blend.divergences(rows[0], rows[1])[-1]) == pytest.approx(float((p * (p / q).log()).sum()))


def round_of(strategy: Any, replies: dict[int, ArrayRecord]) -> ArrayRecord:
    messages = strategy.configure_train(
        1, start_model().to_record(), ConfigRecord(), SilentGrid(list(replies))
    )
    arrays, _ = strategy.aggregate_train(1, replies_to(messages, replies))
    assert arrays is not None
    return arrays


def test_as_a_strategy_it_combines_what_clients_send() -> None:
    replies = {11 + c: trained_reply(start_model(), c).to_record() for c in range(3)}
    learned = LearnedWeights(epochs=0)
    learned.bind(context())
    for name, array in round_of(learned, replies).items():
        np.testing.assert_allclose(
            array.numpy(), round_of(Mean(), replies)[name].numpy(), rtol=1e-5, atol=1e-7
        )
    assert all(report.weight == pytest.approx(1 / 3) for report in learned.reports)


def test_a_server_alone_learns_whatever_clients_send() -> None:
    vectors = []
    for seed in (0, 9):
        strategy = ServerAlone(epochs=8, lr=0.02)
        strategy.bind(context())
        replies = {11 + c: trained_reply(start_model(), c + seed, 5.0).to_record() for c in range(3)}
        made = round_of(strategy, replies)
        vectors.append(np.concatenate([made[name].numpy().ravel() for name in made]))
        assert [report.weight for report in strategy.reports] == [0, 0, 0]
    assert np.array_equal(*vectors)
    bound = strategy._rule.bound
    assert bound is not None
    rows = torch.stack([torch.from_numpy(vectors[0]), vector_of(start_model())])
    loss, _ = judged(bound.net, rows, bound.split)
    assert loss[0] < loss[1] - 0.1


@pytest.mark.parametrize("make", [LearnedWeights, ServerAlone])
def test_strategies_that_lack_data_or_a_suitable_model_say_so(make: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match="bind"):
        make()._rule(updates_of([0, 1]))
    with pytest.raises(UserError, match="public_samples"):
        make().bind(context(data=None))
    with pytest.raises(UserError, match="BatchNorm"):
        make().bind(context(lambda: tiny_resnet("batch"), (1, 8, 8)))


def test_the_outcome_is_an_aggregate_of_shares_that_sum_to_one() -> None:
    made = rule_of("element", "normal", epochs=1)(updates_of([0, 1, 2]))
    assert isinstance(made, Aggregate)
    assert float(made.weights.sum()) == pytest.approx(1)
    assert (made.weights >= 0).all()
