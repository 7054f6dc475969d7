from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedplat.emulation.schedule import Budget
from fedplat.errors import UserError
from fedplat.models.cutting import Sizes
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.strategies.model_search import ModelSearch
from fedplat.strategies.nodes import Node
from fedplat.strategies.submodels import SIZES, SubModelContext, SubModelSpec
from tests.models.cutting_nets import arrays_of, seeded, tiny_resnet

from .test_model_search_space import context_of

METHODS = ["enumerate", "random-early-stop", "evolution"]
MODELS = ["group", "conv", "lstm"]


def bound(name: str = "group", context: SubModelContext | None = None, **settings: Any) -> ModelSearch:
    scheme = ModelSearch(**settings)
    scheme.bind(context or context_of(name))
    return scheme


def node(number: int = 0) -> Node:
    return Node(100 + number, number)


def budgets(scheme: ModelSearch, n: int, low: float = 0.3, high: float = 1.2) -> list[Budget]:
    """Memory and links from a part of what the whole model needs to more than that."""
    full = scheme.context.plan.full.sizes
    memory, nbytes = scheme.costs.costs.memory(full), scheme.costs.costs.nbytes(full)
    rng = generator(3, "budgets")
    return [
        Budget(*(int(rng.uniform(low, high) * most) for most in (memory, 0.8 * nbytes, 0.8 * nbytes)), True)
        for _ in range(n)
    ]


def sizes_of(scheme: ModelSearch, spec: SubModelSpec) -> Sizes:
    return Sizes.loads(dict(spec.config)[SIZES]) if spec.kind != "full" else scheme.context.plan.full.sizes


def test_by_hand_the_largest_of_an_mlp_that_fits_is_taken() -> None:
    scheme = bound("conv", space="global", widths=(0.5, 1.0))
    costs, plan = scheme.costs.costs, scheme.context.plan
    half, full = (plan.prefix(width).sizes for width in (0.5, 1))
    need = costs.memory(full)
    scheme.begin_round(scheme.context.layout.new(), 1)
    plenty = Budget(need, 10**9, 10**9, True)
    assert scheme.assign(node(), plenty, 1).kind == "full"  # type: ignore[union-attr]
    spec = scheme.assign(node(), replace(plenty, memory_bytes=need - 1), 1)
    assert spec is not None
    assert sizes_of(scheme, spec) == half
    # 8 bits per byte, 10 seconds.
    slow = -(-costs.nbytes(full) * 8 // 10)
    assert scheme.assign(node(), replace(plenty, up_bps=slow), 1).kind == "full"  # type: ignore[union-attr]
    for link in ("up_bps", "down_bps"):
        spec = scheme.assign(node(), replace(plenty, **{link: slow - 1}), 1)
        assert spec is not None
        assert sizes_of(scheme, spec) == half


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_no_limit_is_ever_broken(name: str, method: str) -> None:
    scheme = bound(name, search=method)
    scheme.begin_round(scheme.context.layout.new(), 1)
    given = 0
    for number, budget in enumerate(budgets(scheme, 25)):
        spec = scheme.assign(node(number), budget, 1)
        if spec is None:
            assert scheme.why(node(number))
            continue
        given += 1
        sizes = sizes_of(scheme, spec)
        assert scheme.costs.costs.memory(sizes, 4) <= budget.memory_bytes
        assert 8 * scheme.costs.costs.nbytes(sizes) <= 10 * min(budget.down_bps, budget.up_bps)
    assert given > 10


@pytest.mark.parametrize("name", ["group", "lstm"])
@pytest.mark.parametrize("objective", ["min", "mean", "size"])
def test_enumeration_finds_what_brute_force_finds(name: str, objective: str) -> None:
    scheme = bound(name, search="enumerate", objective=objective)
    table, every = scheme.costs.costs, [scheme.space.sizes(c) for c in scheme.space.every()]
    known = [(table.memory(s, 4), table.nbytes(s), table.parameters(s)) for s in every]
    scheme.begin_round(scheme.context.layout.new(), 1)
    for number, budget in enumerate(budgets(scheme, 12)):
        link = 10 * min(budget.down_bps, budget.up_bps) / 8

        def key(one: tuple[int, int, int], budget: Budget = budget, link: float = link) -> tuple[float, int]:
            shares = (one[0] / budget.memory_bytes, one[1] / link)
            by = {"min": min(shares), "mean": float(np.mean(shares)), "size": shares[1]}
            return by[objective], one[2]

        fitting = [one for one in known if one[0] <= budget.memory_bytes and one[1] <= link]
        spec = scheme.assign(node(number), budget, 1)
        assert (spec is None) == (not fitting)
        if spec is not None:
            sizes = sizes_of(scheme, spec)
            found = key((table.memory(sizes, 4), table.nbytes(sizes), table.parameters(sizes)))
            assert found == pytest.approx(max(map(key, fitting)))


def test_the_tighter_limit_is_used_to_85_percent() -> None:
    scheme = bound("lstm", widths=tuple(i / 8 for i in range(1, 9)))
    scheme.begin_round(scheme.context.layout.new(), 1)
    for number, budget in enumerate(budgets(scheme, 40, low=0.6)):
        scheme.assign(node(number), budget, 1)
    figures = scheme.diagnostics
    assert figures["submodels.tighter"] >= 0.85
    assert figures["submodels.utilisation"] <= min(figures["submodels.memory"], figures["submodels.link"])
    assert figures["submodels.none-fits"] == 0
    assert scheme.diagnostics == figures


@pytest.mark.parametrize("method", METHODS)
def test_whom_nothing_fits_sits_out_with_a_reason(method: str) -> None:
    scheme = bound(search=method)
    scheme.begin_round(scheme.context.layout.new(), 1)
    plenty = Budget(10**9, 10**9, 10**9, True)
    for budget, why in (
        (replace(plenty, memory_bytes=0), "MB of memory, free are 0.0 MB"),
        (replace(plenty, up_bps=10), "Mbit/s to be sent in 10 s"),
        (replace(plenty, down_bps=0), "Mbit/s to be sent in 10 s"),
    ):
        assert scheme.assign(node(), budget, 1) is None
        assert why in scheme.why(node())
    assert scheme.diagnostics["submodels.none-fits"] == 1
    assert scheme.assign(node(), plenty, 1) is not None
    assert scheme.why(node()) == ""


def test_memory_of_the_process_and_the_deadline_count() -> None:
    context = context_of("group", "off")
    need = context.costs.memory(context.plan.full.sizes)
    scheme = bound(context=replace(context, overhead_bytes=1000), scaler="off")
    budget = Budget(need + 1000, 10**9, 10**9, True)
    assert scheme.assign(node(), budget, 1).kind == "full"  # type: ignore[union-attr]
    assert scheme.assign(node(), replace(budget, memory_bytes=need + 999), 1).kind != "full"  # type: ignore[union-attr]
    full = context.costs.flops(context.plan.full.sizes)
    # One second per FLOP of the full model, and one second anyway; the transfers take next to nothing.
    hurried = replace(context, deadline_s=1.6, seconds=lambda client, flops: 1 + flops / full)
    scheme = bound(context=hurried, scaler="off")
    spec = scheme.assign(node(), budget, 1)
    assert spec is not None
    assert 0.2 * full < context.costs.flops(sizes_of(scheme, spec)) < 0.6 * full
    scheme = bound(context=replace(hurried, deadline_s=1.0), scaler="off")
    assert scheme.assign(node(), budget, 1) is None
    assert "deadline of 1 s" in scheme.why(node())


def test_a_client_with_few_samples_needs_less_memory() -> None:
    context = context_of("group", "off")
    scheme = bound(context=replace(context, samples=lambda client: 2), scaler="off")
    small = context.costs.memory(context.plan.full.sizes, 2)
    budget = Budget(small, 10**9, 10**9, True)
    assert scheme.assign(node(), budget, 1).kind == "full"  # type: ignore[union-attr]
    unknown = Node(7, None)
    assert scheme.assign(unknown, budget, 1).kind != "full"  # type: ignore[union-attr]


@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_choose_alike_and_a_resumed_search_goes_on_alike(method: str) -> None:
    def rounds(scheme: ModelSearch, numbers: range) -> list[SubModelSpec | None]:
        specs = []
        for server_round in numbers:
            scheme.begin_round(scheme.context.layout.new(), server_round)
            every = enumerate(budgets(scheme, 6))
            specs += [scheme.assign(node(number), budget, server_round) for number, budget in every]
        return specs

    first, second = bound("conv", search=method), bound("conv", search=method)
    assert rounds(first, range(1, 3)) == rounds(second, range(1, 3))
    resumed = bound("conv", search=method)
    resumed.load_state_dict(first.state_dict())
    assert rounds(resumed, range(3, 5)) == rounds(first, range(3, 5))


@pytest.mark.parametrize("coin", [None, 0.8])
def test_the_random_search_gets_better_as_its_memory_fills(coin: float | None) -> None:
    scheme = bound("group", search="random-early-stop", objective="size", coin=coin, max_draws=5)
    before = scheme.state_dict()["database"]
    assert before == [[2, 1, 1, 1], [0, 0, 1, 1]]  # the deepest and the shallowest, in full width
    exact = bound("group", objective="size")
    for server_round in range(1, 15):
        scheme.begin_round(scheme.context.layout.new(), server_round)
        exact.begin_round(scheme.context.layout.new(), server_round)
        for number, budget in enumerate(budgets(scheme, 8)):
            scheme.assign(node(number), budget, server_round)
            exact.assign(node(number), budget, server_round)
    assert scheme.state_dict()["database"][:2] == before
    share = scheme.diagnostics["submodels.link"]
    assert 0.9 * exact.diagnostics["submodels.link"] < share <= exact.diagnostics["submodels.link"] + 1e-12


def test_without_a_device_everybody_gets_the_whole_model() -> None:
    scheme = bound()
    model = arrays_of(FlatModel(seeded(tiny_resnet)))
    spec = scheme.assign(node(), None, 1)
    assert spec is not None
    assert spec.kind == "full"
    assert scheme.extract(model, spec) is model
    assert scheme.diagnostics == {"submodels.distinct": 0, "submodels.none-fits": 0}


def test_sub_models_go_out_and_come_back_to_where_they_were() -> None:
    scheme = bound(widths=(0.5, 1.0))
    model = arrays_of(FlatModel(seeded(tiny_resnet)))
    full = scheme.costs.costs.nbytes(scheme.context.plan.full.sizes)
    scheme.begin_round(model, 1)
    spec = scheme.assign(node(), Budget(10**9, full * 4 // 10, 10**9, True), 1)
    assert spec is not None
    part = scheme.extract(model, spec)
    assert part.layout.dim < model.layout.dim
    back, covered = scheme.restore(part, spec, model)
    assert covered is not None
    assert np.array_equal(back.vector, model.vector)
    part.vector += 1
    back, covered = scheme.restore(part, spec, model)
    assert covered is not None
    assert np.array_equal(back.vector[~covered.numpy()], model.vector[~covered.numpy()])
    assert np.allclose(back.vector[covered.numpy()], model.vector[covered.numpy()] + 1)


def test_what_most_clients_have_is_measured_and_the_smallest_always() -> None:
    scheme = bound(widths=(0.5, 1.0), tested=1)
    model = arrays_of(FlatModel(seeded(tiny_resnet)))
    full = scheme.costs.costs.nbytes(scheme.context.plan.full.sizes)
    scheme.begin_round(model, 1)
    assert set(scheme.parts_to_test(1)) == {"smallest"}
    rates = {0: full * 8 // 100, 1: full * 4 // 10, 2: full * 4 // 10}
    kinds = [scheme.assign(node(i), Budget(10**9, rate, 10**9, True), 1) for i, rate in rates.items()]
    assert kinds[0] != kinds[1]
    parts = scheme.parts_to_test(1)
    assert [name for name in parts if name != "smallest"] == [kinds[1].kind if kinds[1] else ""]
    for spec in parts.values():
        assert scheme.extract(model, spec).layout.dim < model.layout.dim


def test_distillation_changes_the_model_only_if_it_is_on() -> None:
    model = arrays_of(FlatModel(seeded(tiny_resnet)))
    assert bound().finish_round(model, 1) is model
    scheme = bound(distillation=True, distil_subnets=2, distil_steps=5, distil_batch=16)
    scheme.begin_round(model, 1)
    new = scheme.finish_round(model, 1)
    assert scheme.diagnostics["distillation.kept"] == 1
    assert scheme.diagnostics["distillation.after"] < scheme.diagnostics["distillation.before"]
    assert not np.array_equal(new.vector, model.vector)
    again = bound(distillation=True, distil_subnets=2, distil_steps=5, distil_batch=16)
    assert np.array_equal(again.finish_round(model, 1).vector, new.vector)


def test_a_space_too_large_to_enumerate_is_refused_or_searched_otherwise() -> None:
    many = tuple(i / 60 for i in range(1, 61))
    with pytest.raises(UserError, match="are too many"):
        bound("conv", search="enumerate", space="groups", widths=many)
