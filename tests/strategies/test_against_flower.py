"""Our rules beside Flower's own on the same replies: where they agree, and every place where they do not."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, MetricRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy

from fedplat.errors import UserError
from fedplat.strategies import Bulyan, FederatedStrategy, Krum, Mean, Median, MultiKrum, TrimmedMean

from ..flower_apps import record, replies_to
from .test_composed import SilentGrid

# float32 sums of a few dozen numbers of size one, in another order: some units in the last place.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}

Models = Mapping[int, ArrayRecord | Error]


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's Bulyan collects garbage for every reply, which takes seconds in a process with torch."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def both(
    ours: FederatedStrategy, theirs: Strategy, models: Models, counts: Mapping[int, Any] | None = None
) -> tuple[ArrayRecord | None, ArrayRecord | None]:
    """Return what the two make of the same replies, each of its own copy: Flower's may empty them."""
    grid = SilentGrid(list(models))
    first = next(model for model in models.values() if isinstance(model, ArrayRecord))
    start = record(**{name: np.zeros_like(array.numpy()) for name, array in first.items()})
    messages = list(ours.configure_train(1, start, ConfigRecord(), grid))
    mine, _ = ours.aggregate_train(1, replies_to(messages, models, counts))
    copies = {
        node: ArrayRecord(dict(model)) if isinstance(model, ArrayRecord) else model
        for node, model in models.items()
    }
    other, _ = theirs.aggregate_train(1, replies_to(messages, copies, counts))
    return mine, other


def assert_same(mine: ArrayRecord | None, other: ArrayRecord | None, **tolerance: float) -> None:
    assert mine is not None
    assert other is not None
    assert set(mine) == set(other)
    for name, array in other.items():
        found = mine[name].numpy()
        assert found.shape == array.numpy().shape
        np.testing.assert_allclose(found, array.numpy(), err_msg=name, **(tolerance or CLOSE))


def network(rng: np.random.Generator, scale: float = 1.0, shift: float = 0.0) -> ArrayRecord:
    """Return arrays of different ranks, in an order that is not that of their names."""
    return record(
        **{
            name: np.asarray(shift + scale * rng.normal(size=shape), np.float32)
            for name, shape in (
                ("conv.weight", (4, 3, 3)),
                ("fc.weight", (20, 5)),
                ("fc.bias", (20,)),
                ("alpha", ()),
            )
        }
    )


def networks(seed: int, clients: int, liars: int = 0, shift: float = 40.0) -> dict[int, ArrayRecord]:
    """Return clients around zero, and liars further and further out, none of them near another."""
    rng = np.random.default_rng(seed)
    honest = [network(rng) for _ in range(clients - liars)]
    lying = [network(rng, shift=shift * (-2.0) ** i) for i in range(liars)]
    order = rng.permutation(clients)
    everyone = honest + lying
    return {100 + node: everyone[i] for node, i in enumerate(order)}


def column(values: Sequence[float], dtype: Any = np.float32) -> dict[int, ArrayRecord]:
    return {10 + i: record(w=np.array([value], dtype)) for i, value in enumerate(values)}


def value(arrays: ArrayRecord | None, name: str = "w") -> float:
    assert arrays is not None
    return float(arrays[name].numpy().item())


# Where they agree ------------------------------------------------------------------------------------------

CASES = [(seed, clients) for seed, clients in enumerate((1, 2, 3, 4, 5, 8, 13, 30))]


@pytest.mark.parametrize(("seed", "clients"), CASES)
def test_mean_and_median_are_flowers_for_odd_and_even_numbers_of_clients(seed: int, clients: int) -> None:
    models = networks(seed, clients)
    counts = {
        node: int(c)
        for node, c in zip(models, np.random.default_rng(seed).integers(1, 500, clients), strict=True)
    }
    assert_same(*both(Mean(), flower.FedAvg(), models, counts))
    assert_same(*both(Median(), flower.FedMedian(), models, counts))


@pytest.mark.parametrize(("clients", "beta"), [(5, 0.2), (10, 0.2), (10, 0.4), (20, 0.05), (7, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_the_trimmed_mean_is_flowers_where_beta_times_n_is_whole(
    seed: int, clients: int, beta: float
) -> None:
    models = networks(seed, clients, liars=1)
    assert_same(*both(TrimmedMean(beta=beta), flower.FedTrimmedAvg(beta=beta), models))


@pytest.mark.parametrize(("clients", "f"), [(5, 1), (7, 2), (11, 3), (11, 4), (20, 6), (6, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_krum_and_multi_krum_choose_the_clients_that_flowers_choose(seed: int, clients: int, f: int) -> None:
    models = networks(seed, clients, liars=f)
    mine, other = both(Krum(f=f), flower.Krum(num_malicious_nodes=f), models)
    assert_same(mine, other, rtol=0, atol=0)
    for m in (2, clients - f):
        theirs = flower.MultiKrum(num_malicious_nodes=f, num_nodes_to_select=m)
        assert_same(*both(MultiKrum(f=f, m=m), theirs, models))


@pytest.mark.parametrize(("clients", "f"), [(7, 1), (11, 2), (15, 3), (8, 1), (5, 0)])
@pytest.mark.parametrize("seed", range(3))
def test_bulyan_is_flowers_where_both_choose_the_same_clients(seed: int, clients: int, f: int) -> None:
    # 2f are far out, so that n - 2f remain to be chosen, one after another or all at once.
    models = networks(seed, clients, liars=2 * f)
    assert_same(*both(Bulyan(f=f), flower.Bulyan(num_malicious_nodes=f), models))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-6), (np.float16, 4e-3)])
def test_floats_of_any_width_agree_within_their_own_precision_and_keep_their_type(dtype, tolerance) -> None:
    rng = np.random.default_rng(3)
    models = {n: record(w=rng.normal(size=50).astype(dtype)) for n in range(10, 17)}
    for ours, theirs in (
        (Mean(), flower.FedAvg()),
        (Median(), flower.FedMedian()),
        (Krum(f=2), flower.Krum(num_malicious_nodes=2)),
        (Bulyan(f=0), flower.Bulyan(num_malicious_nodes=0)),
    ):
        mine, other = both(ours, theirs, models)
        assert_same(mine, other, rtol=tolerance, atol=tolerance)
        assert mine is not None
        assert mine["w"].numpy().dtype == dtype


def test_metrics_are_averaged_alike() -> None:
    models, counts = column([1, 2, 4]), {10: 1, 11: 2, 12: 5}
    ours, theirs = Mean(), flower.FedAvg()
    messages = list(ours.configure_train(1, models[10], ConfigRecord(), SilentGrid(list(models))))
    replies = replies_to(messages, models, counts)
    for reply, loss in zip(replies, (0.5, 1.5, 3.0), strict=True):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "loss": loss})
    _, mine = ours.aggregate_train(1, replies)
    _, other = theirs.aggregate_train(1, replies)
    assert dict(mine or {}) == pytest.approx(dict(other or {})) == {"loss": 18.5 / 8}


# Where they do not -----------------------------------------------------------------------------------------


def test_beta_is_rounded_up_to_whole_clients_and_by_flower_down() -> None:
    # n = 4, beta = 0.2: the paper's trimming protects from a fraction beta only if it is rounded up.
    mine, other = both(TrimmedMean(beta=0.2), flower.FedTrimmedAvg(beta=0.2), column([0, 1, 3, 100]))
    assert value(mine) == 2
    assert value(other) == 26


def test_multi_krum_is_the_papers_plain_mean_and_flowers_is_weighted_by_claimed_counts() -> None:
    models, counts = column([0, 1, 2, 3, 50]), {14: 1, 13: 10_000}
    mine, other = both(
        MultiKrum(f=1, m=4), flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4), models, counts
    )
    assert value(mine) == 1.5
    assert value(other) == pytest.approx(3, abs=0.01)


def test_multi_krum_keeps_n_minus_f_by_default_and_flowers_keeps_one() -> None:
    mine, other = both(MultiKrum(f=1), flower.MultiKrum(num_malicious_nodes=1), column([0, 1, 2, 3, 50]))
    assert value(mine) == 1.5
    assert value(other) == 1


def test_bulyan_chooses_one_after_another_as_in_the_paper_and_flowers_all_at_once() -> None:
    models = column([0, 1, 2, 3, 4, 100, 101])
    mine, other = both(Bulyan(f=1), flower.Bulyan(num_malicious_nodes=1), models)
    # One by one 2, 3 and 1 are chosen, then 100, whose one nearest neighbour is nearest of all, then 4; of
    # the five, 2, 3 and 4 are nearest their median 3. All at once it is 0 to 4, whose median is 2.
    assert (value(mine), value(other)) == (3, 2)


def test_what_a_rule_cannot_stand_is_refused_before_training_and_by_flower_not_or_every_round() -> None:
    models = column([1, 2, 3, 50])
    with pytest.raises(UserError, match="2f \\+ 2 = 8 must be less than n = 4"):
        both(Krum(f=3), flower.Krum(num_malicious_nodes=3), models)
    with pytest.raises(UserError, match="n = 4 must be at least 4f \\+ 3 = 7"):
        both(Bulyan(f=1), flower.Bulyan(num_malicious_nodes=1), models)
    _, krum = both(Mean(), flower.Krum(num_malicious_nodes=3), models)
    assert value(krum) == 1  # chosen by its nearest neighbour alone
    _, bulyan = both(Mean(), flower.Bulyan(num_malicious_nodes=1), models)
    assert bulyan is None  # in every round, and the run ends without a model


def test_a_round_short_of_replies_uses_the_largest_f_that_fits_and_flowers_bulyan_skips_it() -> None:
    lost = dict.fromkeys((15, 16), Error(8, "gone"))
    ours = Bulyan(f=1)
    mine, other = both(ours, flower.Bulyan(num_malicious_nodes=1), {**column([0, 1, 2, 3, 4]), **lost})
    assert other is None
    assert value(mine) == 2
    assert ours.diagnostics["f"] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("ours", "theirs"), [(Mean, flower.FedAvg), (Median, flower.FedMedian)])
def test_one_client_without_a_number_is_left_out_and_flowers_model_is_lost(ours, theirs, bad) -> None:
    mine, other = both(ours(), theirs(), column([1, 2, 3, bad]))
    assert value(mine) == 2
    if ours is Median and not np.isnan(bad):
        assert value(other) in (1.5, 2.5)  # infinity counts as one more extreme
    else:
        assert not np.isfinite(value(other))


def test_replies_are_matched_by_name_and_by_flowers_bulyan_and_krum_by_position() -> None:
    def pair(a: float, b: float, turned: bool = False) -> ArrayRecord:
        arrays = {"a": np.array([a], np.float32), "b": np.array([b], np.float32)}
        return record(**dict(reversed(arrays.items())) if turned else arrays)

    models = {10 + i: pair(1, 100, turned=i == 2) for i in range(5)}
    mine, other = both(Bulyan(f=0), flower.Bulyan(num_malicious_nodes=0), models)
    assert (value(mine, "a"), value(mine, "b")) == (1, 100)
    assert (value(other, "a"), value(other, "b")) == pytest.approx((20.8, 80.2))
    # The client in the middle of all others sends its arrays in another order.
    models = {10 + i: pair(a, 50 + a, turned=i == 2) for i, a in enumerate((0, 1.5, 2, 2.5, 4))}
    mine, other = both(Krum(f=1), flower.Krum(num_malicious_nodes=1), models)
    assert (value(mine, "a"), value(other, "a")) == (2, 1.5)


def test_counters_and_flags_keep_their_type_and_are_some_clients_own() -> None:
    models = {
        10 + i: record(n=np.array([count], np.int64), flag=np.array([flag]), w=np.ones(1, np.float32))
        for i, (count, flag) in enumerate([(3, True), (8, True), (2**53 + 1, False)])
    }
    mine, other = both(Mean(weighted=False), flower.FedAvg(), models)
    assert mine is not None
    assert other is not None
    assert (mine["n"].numpy().dtype, mine["flag"].numpy().dtype) == (np.int64, np.bool_)
    assert (value(mine, "n"), value(mine, "flag")) == (8, True)
    assert (other["n"].numpy().dtype, other["flag"].numpy().dtype) == (np.float64, np.float64)
    assert value(other, "flag") == pytest.approx(2 / 3)


def test_counters_do_not_decide_whom_krum_chooses_and_in_flower_they_do() -> None:
    models = {
        10 + i: record(w=np.full(2, w, np.float32), n=np.array([count], np.int64))
        for i, (w, count) in enumerate([(0, 100), (1, 5000), (1.1, 100), (0.9, 100), (9, 100)])
    }
    mine, other = both(Krum(f=1), flower.Krum(num_malicious_nodes=1), models)
    assert mine is not None
    assert other is not None
    assert mine["w"].numpy().tolist() == [1, 1]
    assert other["w"].numpy()[0] != 1


def test_krums_distances_are_exact_where_flowers_cancel_in_float32() -> None:
    # Updates far smaller than the weights: |x|^2 + |y|^2 - 2xy leaves nothing of the distance in float32.
    rng = np.random.default_rng(0)
    base = rng.normal(size=200_000).astype(np.float32)
    updates = rng.normal(size=(9, len(base))) * 1e-4
    updates[[2, 6]] *= 3
    models = {10 + i: record(w=(base + u).astype(np.float32)) for i, u in enumerate(updates)}
    from flwr.serverapp.strategy.multikrum import compute_distances

    distances = compute_distances(list(models.values()))
    assert (distances[~np.eye(9, dtype=bool)] < 0).any()
    ours = MultiKrum(f=2, m=7)
    both(ours, flower.FedAvg(), models)
    assert {r.node_id for r in ours.reports if r.weight == 0} == {12, 16}


def test_double_precision_passes_through_single_precision_here_and_not_in_flower() -> None:
    mine, other = both(Mean(), flower.FedAvg(), column([1 + 1e-12, 1 + 3e-12], np.float64))
    assert value(other) == pytest.approx(1 + 2e-12, abs=1e-15)
    assert value(mine) == pytest.approx(1, abs=1e-7)


def test_unbelievable_counts_are_refused_and_by_flower_obeyed() -> None:
    mine, other = both(Mean(), flower.FedAvg(), column([1, 2, 300]), {12: 10**12})
    assert value(mine) == 1.5
    assert value(other) == pytest.approx(300)
    mine, other = both(Mean(), flower.FedAvg(), column([1, 2, 300]), {12: -1})
    assert value(mine) == 1.5
    assert value(other) == pytest.approx(-297)
    models, counts = column([1, 2]), dict.fromkeys((10, 11), 0)
    with pytest.raises(ZeroDivisionError):
        both(Mean(), flower.FedAvg(), models, counts)
    mine, _ = both(Mean(), flower.FedMedian(), {**models, 12: column([7])[10]}, counts)
    assert value(mine) == 7


def test_a_reply_without_an_array_is_left_out_and_ends_flowers_run() -> None:
    models = {**column([1, 3]), 12: record(other=np.zeros(1, np.float32))}
    with pytest.raises(InconsistentMessageReplies):
        both(Mean(), flower.FedAvg(), models)
    ours = Mean()
    messages = list(ours.configure_train(1, models[10], ConfigRecord(), SilentGrid([10, 11, 12])))
    mine, _ = ours.aggregate_train(1, replies_to(messages, models))
    assert value(mine) == 2


def test_replies_are_left_whole_and_flowers_median_empties_them() -> None:
    models = column([1, 2, 3])
    messages = list(Mean().configure_train(1, models[10], ConfigRecord(), SilentGrid(list(models))))
    replies = replies_to(messages, {node: ArrayRecord(dict(model)) for node, model in models.items()})
    ours = Median()
    ours.configure_train(1, models[10], ConfigRecord(), SilentGrid(list(models)))
    ours.aggregate_train(1, replies)
    assert [len(reply.content["arrays"]) for reply in replies] == [1, 1, 1]
    flower.FedMedian().aggregate_train(1, replies)
    assert [len(reply.content["arrays"]) for reply in replies] == [0, 0, 0]
