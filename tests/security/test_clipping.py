from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedplat.security.clipping import clipped


def test_long_updates_are_scaled_and_others_keep_every_bit() -> None:
    reference = torch.tensor([1.0, 1.0, 0.1])
    models = torch.tensor([[4.0, 5.0, 0.1], [1.0, 1.0, 0.1], [1.3, 1.4, 0.1], [1.0, 1.0, 100.1]])
    before = models.clone()
    out, norms = clipped(models, reference, 1.0)
    assert norms.tolist() == pytest.approx([5.0, 0.0, 0.5, 100.0])
    assert out[0].tolist() == pytest.approx([1.6, 1.8, 0.1])
    assert torch.equal(out[1:3], models[1:3])
    assert out[3].tolist() == pytest.approx([1.0, 1.0, 1.1])
    assert torch.equal(models, before)
    assert not np.shares_memory(out.numpy(), models.numpy())


def test_huge_updates_overflow_nothing() -> None:
    out, norms = clipped(torch.tensor([[3e38, 0.0], [2e30, -2e30]]), torch.zeros(2), 1.0)
    assert norms.tolist() == pytest.approx([3e38, 8**0.5 * 1e30])
    assert out[0].tolist() == pytest.approx([1, 0])
    assert out[1].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_nothing_to_clip_and_a_model_without_numbers_are_fine() -> None:
    out, norms = clipped(torch.zeros(3, 0), torch.zeros(0), 1.0)
    assert out.shape == (3, 0)
    assert norms.tolist() == [0, 0, 0]


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="bound must be above 0 and finite"):
        clipped(torch.zeros(1, 1), torch.zeros(1), bound)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0, 100))
def test_no_update_is_longer_than_the_bound_and_none_is_turned(
    seed: int, bound: float, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    reference = torch.from_numpy(rng.normal(size=40).astype(np.float32))
    models = reference + torch.from_numpy((spread * rng.normal(size=(5, 40))).astype(np.float32))
    out, _ = clipped(models, reference, bound)
    before, after = (models - reference).double(), (out - reference).double()
    rounding = 1e-6 * float(reference.norm() + bound)
    assert bool((after.norm(dim=1) <= bound + rounding).all())
    factors = (bound / before.norm(dim=1).clamp(min=1e-300)).clamp(max=1)
    assert torch.allclose(after, factors[:, None] * before, atol=rounding)
