from __future__ import annotations

import numpy as np
import pytest
import torch

from fedplat import updates as updates_module
from fedplat.arrays import FlatArrays, Layout, RowBlock
from fedplat.updates import ClientUpdates

LAYOUT = Layout.of({"w": ((5,), "float32"), "n": ((), "int64")})
REFERENCE = FlatArrays(LAYOUT, np.arange(5, dtype=np.float32), np.zeros(8, np.uint8))


def block(n: int = 4) -> RowBlock:
    rng = np.random.default_rng(0)
    return RowBlock(LAYOUT, rng.normal(size=(n, 5)).astype(np.float32), np.zeros((n, 8), np.uint8))


def stack(models: list[FlatArrays]) -> ClientUpdates:
    n = len(models)
    return ClientUpdates.stack(models, REFERENCE, list(range(10, 10 + n)), [1] * n)


def test_neighbouring_rows_of_one_matrix_are_taken_without_a_copy() -> None:
    rows = block()
    taken = stack([rows.row(i) for i in (1, 2, 3)])
    assert np.shares_memory(taken.params.numpy(), rows.matrix)
    np.testing.assert_array_equal(taken.params.numpy(), rows.matrix[1:])


@pytest.mark.parametrize("order", [(2, 1), (0, 2), (0, 0)])
def test_other_rows_are_copied_in_the_order_given(order: tuple[int, int]) -> None:
    rows = block()
    taken = stack([rows.row(i) for i in order])
    assert not np.shares_memory(taken.params.numpy(), rows.matrix)
    np.testing.assert_array_equal(taken.params.numpy(), rows.matrix[list(order)])


def test_rows_of_different_matrices_are_stacked() -> None:
    a, b = block(2), block(3)
    np.testing.assert_array_equal(
        stack([a.row(0), b.row(1)]).params.numpy(), np.stack([a.matrix[0], b.matrix[1]])
    )


def test_deltas_are_taken_from_the_reference() -> None:
    rows = block()
    np.testing.assert_array_equal(stack([rows.row(0)]).deltas().numpy()[0], rows.matrix[0] - REFERENCE.vector)


def test_selection_and_columns_keep_everything_aligned() -> None:
    rows = block()
    picked = stack([rows.row(i) for i in range(4)]).select(np.array([True, False, True, False])).columns(1, 4)
    assert picked.node_ids.tolist() == [10, 12]
    np.testing.assert_array_equal(picked.params.numpy(), rows.matrix[[0, 2], 1:4])
    np.testing.assert_array_equal(picked.deltas().numpy(), rows.matrix[[0, 2], 1:4] - REFERENCE.vector[1:4])


def test_coverage_is_partial_only_where_something_is_missing_and_follows_rows_and_columns() -> None:
    rows, mask = block(), torch.ones(4, 5, dtype=torch.bool)
    models = [rows.row(i) for i in range(4)]
    assert stack(models).partial is None
    assert ClientUpdates.stack(models, REFERENCE, range(4), [1] * 4, mask).partial is None
    mask[1, 3] = False
    updates = ClientUpdates.stack(models, REFERENCE, range(4), [1] * 4, mask)
    assert updates.partial is updates.coverage
    assert updates.columns(0, 3).partial is None
    assert updates.columns(3, 5).partial.tolist() == [[True, True], [False, True], [True, True], [True, True]]
    assert updates.select(np.array([True, False, True, True])).partial is None
    assert updates.select(np.array([True, True, False, False])).partial.tolist() == mask[:2].tolist()


def test_finite_rows_are_told_from_those_with_nan_or_infinity_and_large_numbers_are_finite() -> None:
    rows = block(5)
    rows.matrix[0, 2] = np.nan
    rows.matrix[1, :2] = np.inf, -np.inf
    rows.matrix[2] = 3e38  # the sum of squares overflows, the numbers do not
    assert stack([rows.row(i) for i in range(5)]).finite_rows().tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_norms_are_those_of_the_updates_and_do_not_overflow(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_module, "_CHUNK_ELEMENTS", chunk)
    rows = block()
    rows.matrix[3] = [2e19, 2e19, 0, 0, 0]
    norms = stack([rows.row(i) for i in range(4)]).update_norms
    np.testing.assert_allclose(
        norms[:3], np.linalg.norm((rows.matrix - REFERENCE.vector)[:3].astype(np.float64), axis=1)
    )
    assert norms[3] == pytest.approx(2.828427e19, rel=1e-6)


def test_the_matrix_is_made_of_float32_tensors() -> None:
    taken = stack([block().row(0)])
    assert taken.params.dtype == taken.reference.dtype == torch.float32
    assert len(taken) == 1
