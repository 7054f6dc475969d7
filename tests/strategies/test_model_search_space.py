from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from torch import nn

from fedplat.errors import UserError
from fedplat.models.cutting import plan_of
from fedplat.models.cutting_costs import CutCosts
from fedplat.models.cutting_shrink import Scaler
from fedplat.models.lstm import char_lstm
from fedplat.models.resnet import _resnet, resnet18
from fedplat.strategies.model_search import (
    EarlyStop,
    Problem,
    SearchSpace,
    SpaceCosts,
    best_of,
    random_early_stop,
    search_space,
    utilisation,
)
from fedplat.strategies.submodels import SubModelContext
from fedplat.training_config import LocalTraining
from tests.models.cutting_nets import small_conv_net, tiny_resnet

TRAINING = LocalTraining(momentum=0.9, batch_size=4)
MIB = 2**20


@cache
def context_of(name: str, scaler: Scaler | None = None) -> SubModelContext:
    """Return a model to search in; what was looked up in one test is known in the next."""
    shape = {"lstm": (6,), "conv": (1, 6, 6)}.get(name, (1, 8, 8))
    makes: dict[str, Callable[[], nn.Module]] = {
        "lstm": lambda: char_lstm((6,), 10, hidden=8),
        "conv": small_conv_net,
        "group": tiny_resnet,
        "batch": lambda: tiny_resnet("batch"),
    }
    context = SubModelContext.of(makes[name], shape, 10, training=TRAINING)
    scaler = scaler or ("off" if name == "lstm" else "training")  # as the scheme has it by itself
    costs = CutCosts(context.module, context.plan, shape, TRAINING, scaler=scaler)
    return replace(context, costs=costs)


def costs_of(name: str, space: str = "auto", min_depth: int = 1) -> SpaceCosts:
    context = context_of(name)
    return SpaceCosts(search_space(context.plan, space, min_depth=min_depth), context.costs, context.module)  # type: ignore[arg-type]


@pytest.mark.parametrize("space", ["groups", "global", "stages", "auto"])
@pytest.mark.parametrize("name", ["conv", "lstm", "group", "batch"])
def test_the_table_of_costs_is_what_counting_every_sub_model_gives(name: str, space: str) -> None:
    table = costs_of(name, space)
    choices = table.space.draw(np.random.default_rng(0), 12)
    counts = table.counts(choices)
    for row, choice in enumerate(choices):
        sizes = table.space.sizes(choice)
        table.space.plan.check(sizes)
        assert counts.parameters[row] == table.costs.parameters(sizes)
        assert counts.nbytes[row] == table.costs.nbytes(sizes)
        assert table.flops(choices[[row]])[0] == table.costs.flops(sizes)


def test_sizes_are_those_of_the_prefix_with_the_same_widths_and_depths() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    space = search_space(plan, "paper")
    assert [knob.levels for knob in space.knobs] == [(1, 2, 3), (1, 2), (0.5, 1.0), (0.5, 1.0)]
    widths = {"conv": 0.5, "stage1.*": 0.5}
    assert space.sizes(np.array([1, 0, 0, 1])) == plan.prefix(widths, {"stage1": 2, "stage2": 1}).sizes
    assert space.sizes(space.largest()) == plan.full.sizes
    assert space.sizes(space.shallowest()) == plan.prefix(1, {"stage1": 1, "stage2": 1}).sizes


def test_every_architecture_is_there_once() -> None:
    table = costs_of("group", "paper")
    every = table.space.every()
    assert len(np.unique(every, axis=0)) == len(every) == table.space.size == 24
    assert table.rows(every).tolist() == list(range(24))
    assert {table.space.sizes(choice) for choice in every} >= {table.space.sizes(table.space.smallest())}


def test_auto_takes_what_suits_the_model() -> None:
    assert search_space(context_of("group").plan).size == 24
    assert search_space(context_of("lstm").plan).size == 4 * 4 * 2
    assert search_space(context_of("conv").plan).size == 4**3
    many = tuple(i / 100 for i in range(1, 101))
    assert search_space(context_of("conv").plan, widths=many).size == 100


def test_a_model_without_anything_to_choose_has_one_architecture() -> None:
    space = SearchSpace(context_of("conv").plan, ())
    assert space.size == 1
    assert space.every().shape == (1, 0)
    assert space.sizes(space.largest()) == space.plan.full.sizes


def test_settings_that_make_no_sense_are_refused() -> None:
    plan = context_of("conv").plan
    with pytest.raises(UserError, match="each above 0"):
        search_space(plan, widths=(0.0, 1.0))
    with pytest.raises(UserError, match="at least 1 block"):
        search_space(plan, min_depth=0)
    with pytest.raises(UserError, match="needs a model with stages"):
        search_space(plan, "paper")


@pytest.mark.parametrize("name", ["lstm", "group"])
def test_memory_is_predicted_exactly_for_residual_nets_and_lstms(name: str) -> None:
    table = costs_of(name)
    for choice in table.space.draw(np.random.default_rng(1), 8):
        true = table.costs.memory(table.space.sizes(choice), 4)
        assert table.memory(choice[None], 4)[0] == pytest.approx(true, rel=0.01)


def test_what_was_looked_up_replaces_the_prediction() -> None:
    table = costs_of("conv")
    choice = np.array([2, 0, 1])
    before = table.memory(choice[None], 4)[0]
    exact = table.exact(choice, 4)
    assert exact == table.costs.memory(table.space.sizes(choice), 4)
    assert table.memory(choice[None], 4)[0] == table.memory(choice[None], 4, careful=True)[0] == exact
    other = costs_of("conv")
    other.load_state_dict(table.state_dict())
    every = table.space.every()
    assert np.array_equal(other.memory(every, 4, careful=True), table.memory(every, 4, careful=True))
    assert before == pytest.approx(exact, rel=0.2)


def test_a_space_too_large_to_enumerate_is_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    small = costs_of("group")
    monkeypatch.setattr("fedplat.strategies.model_search.costs.MOST_TO_ENUMERATE", 1)
    large = costs_of("group")
    choices = small.space.draw(np.random.default_rng(2), 6)
    for one in (small, large):
        one.exact(choices[3], 4)
    assert np.array_equal(small.counts(choices).nbytes, large.counts(choices).nbytes)
    assert np.allclose(small.memory(choices, 4), large.memory(choices, 4), rtol=0, atol=1)


def test_utilisation_by_hand() -> None:
    used = np.array([[50.0, 30.0], [100.0, 10.0], [101.0, 1.0]])
    limits = np.array([100.0, 40.0])
    assert utilisation(used, limits, "min").tolist() == [0.5, 0.25, -np.inf]
    assert utilisation(used, limits, "mean").tolist() == [0.625, 0.625, -np.inf]
    assert utilisation(used, limits, "size").tolist() == [0.75, 0.25, -np.inf]
    assert utilisation(used, np.array([100.0, np.inf])).tolist() == [0.5, 1.0, -np.inf]
    assert utilisation(used, np.array([np.inf, np.inf])).tolist() == [0, 0, 0]
    assert utilisation(used, np.array([0.0, -1.0])).tolist() == [-np.inf] * 3


def test_ties_go_to_more_parameters_and_then_to_the_first() -> None:
    assert best_of(np.array([0.5, 0.5, 0.5]), np.array([1.0, 3.0, 3.0])) == 1
    assert best_of(np.array([-np.inf, -np.inf]), np.array([1.0, 2.0])) is None
    assert best_of(np.array([]), np.array([])) is None


def papers_space() -> tuple[SpaceCosts, np.ndarray, SubModelContext]:
    build = lambda: _resnet("supernet", (3, 32, 32), 10, (3, 8, 36, 3), "batch", 32)  # noqa: E731
    context = SubModelContext.of(build, (3, 32, 32), 10)
    table = SpaceCosts(search_space(context.plan, "paper", min_depth=2), context.costs, context.module)
    counts = table.counts(table.space.every())
    return table, np.stack([counts.flops / 6 / MIB, counts.nbytes / MIB], axis=1), context


@pytest.mark.slow
def test_the_papers_space_and_its_utilisation_come_out_again() -> None:
    """The released code's limits: U[531, 3563] M multiplications and U[43, 223] MiB; seed 0."""
    table, used, context = papers_space()
    parameters = table.counts(table.space.every()).parameters.astype(np.float64)
    assert table.space.size == 3920
    assert (parameters.min() / 1e6, parameters.max() / 1e6) == pytest.approx((10.50, 57.88), abs=0.01)
    assert (used[:, 1].min(), used[:, 1].max()) == pytest.approx((40.1, 221.0), abs=0.1)
    assert (used[:, 0].min(), used[:, 0].max()) == pytest.approx((315, 3554), abs=1.5)

    rng = np.random.default_rng(0)
    limits = np.stack([rng.uniform(531, 3563, 2000), rng.uniform(43, 223, 2000)], axis=1)
    rows = [best_of(utilisation(used, limit, "size"), parameters) for limit in limits]
    exact = np.array([used[row] / limit for row, limit in zip(rows, limits, strict=True)])
    assert exact.max() <= 1
    assert exact.mean(axis=0).tolist() == pytest.approx([0.80, 0.89], abs=0.02)

    levels = [context.plan.prefix(width).sizes for width in (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)]
    costs = np.array([[context.costs.flops(s) / 6 / MIB, context.costs.nbytes(s) / MIB] for s in levels])
    heterofl = np.array([costs[(costs <= limit).all(axis=1)][0] / limit for limit in limits])
    assert heterofl.mean(axis=0).tolist() == pytest.approx([0.42, 0.41], abs=0.02)

    database, shares = np.stack([table.space.largest(), table.space.shallowest()]), []
    for number, limit in enumerate(limits):
        problem = Problem(
            table.space, lambda c: used[table.rows(c)], lambda c: parameters[table.rows(c)], limit, "size"
        )
        found, drawn = random_early_stop(
            problem, np.random.default_rng([1, number]), database, EarlyStop(coin=0.8)
        )
        assert found is not None
        database = np.unique(np.concatenate([database, drawn]), axis=0)
        shares.append(used[table.rows(found[None])][0] / limit)
    assert np.mean(shares, axis=0).tolist() == pytest.approx([0.75, 0.85], abs=0.02)
    assert np.mean(shares[:100], axis=0)[1] < np.mean(shares[-100:], axis=0)[1] - 0.05


def test_no_level_of_resnet18_is_smaller_than_its_smallest_prefix() -> None:
    context = SubModelContext.of(lambda: resnet18((3, 32, 32), 10), (3, 32, 32), 10)
    space = search_space(context.plan, "stages")
    assert space.size == 2**4 * 4**4
    nbytes = SpaceCosts(space, context.costs, context.module).counts(space.every()).nbytes
    depth = {f"stage{i}": 1 for i in range(1, 5)}
    assert nbytes.min() == context.costs.nbytes(context.plan.prefix(0.25, depth).sizes)
    assert nbytes.max() == context.costs.nbytes(context.plan.full.sizes)
