"""The quick forms that large matrices take, shown on small ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedplat import updates
from fedplat.strategies.aggregators import (
    bulyan,
    coordinatewise,
    geometric,
    geometric_median,
    krum,
    mean,
    median,
    trimmed_mean,
)
from fedplat.strategies.aggregators.coordinatewise import mean_around_median, weighted_sum
from fedplat.strategies.aggregators.credibility import cosines
from fedplat.strategies.aggregators.distances import distances_to, scalar_products, squared_distances
from fedplat.updates import added, column_ranges, spread, update_norms


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LARGE_ELEMENTS", 0)


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def shares(n: int, seed: int = 0) -> torch.Tensor:
    w = torch.from_numpy(np.random.default_rng(seed).random(n))
    return w / w.sum()


@pytest.mark.parametrize("n", [4, 5, 7, 40])
@pytest.mark.parametrize("d", [3, 2048, 40_000])
def test_a_quick_sum_errs_by_less_than_it_says(n: int, d: int) -> None:
    x, w = matrix(n, d), shares(n)
    exact = w @ x.double()
    error = (weighted_sum(x, w, torch.float32).double() - exact).abs()
    assert bool((error <= 5 * 2.0**-24 * (w @ x.double().abs())).all())


@pytest.mark.parametrize("n", [4, 7, 33])
def test_values_that_all_clients_share_come_out_exactly_between_others_that_differ(n: int) -> None:
    # Trap: three equal float32 added in float32 are rounded, and a frozen layer would move.
    x = matrix(n, 20_000)
    frozen = torch.arange(0, 20_000, 17)
    x[:, frozen] = x[0, frozen]
    for w in (None, shares(n)):
        assert torch.equal(mean(x, w).vector[frozen], x[0, frozen])
    assert torch.equal(mean(x[:1].repeat(n, 1), shares(n)).vector, x[0])


def test_a_client_without_a_share_is_not_read_into_the_sum() -> None:
    x, w = matrix(9, 5000), shares(9)
    w[[0, 4]] = 0
    expected = weighted_sum(x, w)
    x[[0, 4]] = float("nan")
    torch.testing.assert_close(weighted_sum(x, w, torch.float32), expected.float(), rtol=1e-6, atol=1e-7)


def test_sums_that_leave_float32_on_the_way_do_not_overflow() -> None:
    x = torch.tensor([3e38, 3e38, -3e38, -3e38, 1.0])[:, None].repeat(1, 3000)
    assert weighted_sum(x, torch.ones(5, dtype=torch.float64), torch.float32)[0] == 1
    tiny = torch.tensor([1e-40, 1e-40, 1e-40, 1e-40, 1.0], dtype=torch.float64)
    y = torch.tensor([1e38, 1e38, 1e38, 1e38, 0.0])[:, None].repeat(1, 3000)
    assert weighted_sum(y, tiny, torch.float32)[0].item() == pytest.approx(0.04)


@pytest.mark.parametrize("d", [5, 512, 70_001])
def test_quick_cosines_norms_and_distances_are_those_of_float64(d: int) -> None:
    x, point = matrix(9, d), matrix(1, d, 1)[0]
    exact, p = x.double(), point.double()
    expected = (exact @ p) / exact.norm(dim=1) / p.norm()
    torch.testing.assert_close(cosines(x, point), expected, rtol=0, atol=1e-7)
    norms = (exact - p).norm(dim=1)
    torch.testing.assert_close(torch.from_numpy(update_norms(x, point)), norms, rtol=1e-7, atol=0)
    torch.testing.assert_close(distances_to(x, point), norms, rtol=1e-7, atol=0)


def test_norms_of_models_close_to_the_reference_do_not_cancel() -> None:
    # Trap: x·x − 2x·r + r·r has no digit left here.
    r = matrix(1, 50_000)[0] + 1000
    x = r + matrix(3, 50_000, 1) * 1e-2
    expected = (x.double() - r.double()).norm(dim=1).numpy()
    np.testing.assert_allclose(update_norms(x, r), expected, rtol=1e-7)


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_rows_whose_squares_leave_float32_are_done_again(size: float) -> None:
    x, point = matrix(5, 3000), matrix(1, 3000, 1)[0]
    expected = cosines(x, point)
    x[2] *= size
    torch.testing.assert_close(cosines(x, point), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(cosines(x[:2], point * size), expected[:2], rtol=0, atol=1e-7)
    length = update_norms(x, torch.zeros(3000))[2]
    assert length == pytest.approx(float(x[2].double().norm()), rel=1e-7)


RULES = {
    "mean": lambda x: mean(x, torch.arange(1, len(x) + 1)).vector,
    "median": lambda x: median(x).vector,
    "trimmed mean": lambda x: trimmed_mean(x, 2).vector,
    "around the median": lambda x: mean_around_median(x, 5).vector,
    "cosines": lambda x: cosines(x, x[0]),
    "norms": lambda x: torch.from_numpy(update_norms(x, x[0])),
    "products": lambda x: scalar_products(x),
    "geometric median": lambda x: geometric_median(x).vector,
}


@pytest.mark.parametrize("name", list(RULES))
def test_the_number_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(11, 100_003)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(updates.torch, "get_num_threads", lambda threads=threads: threads)
        results.append(RULES[name](x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", list(RULES))
def test_rows_that_do_not_lie_side_by_side_give_the_same(name: str) -> None:
    x = matrix(11, 3001)
    wide = torch.zeros(11, 3500)
    wide[:, 100:3101] = x
    torch.testing.assert_close(RULES[name](wide[:, 100:3101]), RULES[name](x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(RULES[name](x.t().contiguous().t()), RULES[name](x), rtol=1e-6, atol=1e-7)


def test_sorting_leaves_a_single_column_as_it_is() -> None:
    # Trap: the transpose of one column is contiguous already, and sorting it in place sorts the input.
    x = torch.tensor([[3.0], [1.0], [2.0]])
    assert median(x).vector.item() == 2
    assert x.flatten().tolist() == [3, 1, 2]


def test_work_is_spread_in_order_and_never_all_of_it_at_once() -> None:
    pieces = column_ranges(10_000, 7)
    assert list(spread(lambda piece: piece, pieces)) == pieces
    assert added(lambda piece: np.array([1.0, piece[1] - piece[0]]), pieces, 2).tolist() == [1429, 10_000]
    assert list(spread(lambda piece: piece, [])) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", list(RULES))
def test_numbers_that_are_not_finite_raise_no_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates.torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(updates, "_CHUNK_ELEMENTS", 5000)
    x = matrix(11, 3001)
    x[1, ::3], x[2, ::5], x[3, :] = float("nan"), float("inf"), 3e38
    RULES[name](x)


def test_scalar_products_about_a_centre_are_those_of_the_differences() -> None:
    x, centre = matrix(6, 400) + 50, matrix(1, 400, 1)[0] + 50
    moved = (x.double() - centre.double()).numpy()
    np.testing.assert_allclose(
        scalar_products(x, centre=centre).numpy(), moved @ moved.T, rtol=1e-12, atol=1e-9
    )


def test_the_geometric_median_is_the_same_on_products_and_on_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    for x in (
        matrix(10, 300),
        matrix(10, 300) * 0.01 + 100,
        torch.cat([matrix(7, 300), torch.full((3, 300), 1e30)]),
        torch.cat([matrix(4, 300), matrix(1, 300, 5).repeat(4, 1) + 1e-3 * matrix(4, 300, 6)]),
    ):
        w = torch.arange(1, len(x) + 1)
        monkeypatch.setattr(geometric, "_GRAM_CLIENTS", 400)
        quick = geometric_median(x, w)
        monkeypatch.setattr(geometric, "_GRAM_CLIENTS", 0)
        slow = geometric_median(x, w)
        torch.testing.assert_close(quick.vector, slow.vector, rtol=1e-6, atol=1e-5)
        assert quick.diagnostics["objective"] == pytest.approx(slow.diagnostics["objective"], rel=1e-9)


def test_bulyan_reads_the_chosen_clients_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = matrix(11, 5000), []
    real = coordinatewise._sorted_rows
    monkeypatch.setattr(coordinatewise, "_sorted_rows", lambda b: seen.append(b.shape) or real(b))
    monkeypatch.setattr(updates, "_CHUNK_ELEMENTS", 7 * 512)
    bulyan(x, 2)
    assert max(rows * columns for rows, columns in seen) <= 7 * 512


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rules_give_on_the_gpu_what_they_give_on_the_cpu() -> None:
    x = matrix(11, 3000)
    on_gpu = x.cuda()
    pairs = [(name, RULES[name](x), RULES[name](on_gpu)) for name in RULES if name != "norms"]
    pairs += [
        ("krum", krum(x, 2).vector, krum(on_gpu, 2).vector),
        ("bulyan", bulyan(x, 2).vector, bulyan(on_gpu, 2).vector),
        ("distances", squared_distances(x), squared_distances(on_gpu)),
    ]
    for name, here, there in pairs:
        per_client = name in ("cosines", "products", "distances")
        assert there.device.type == ("cpu" if per_client else "cuda")
        torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)
