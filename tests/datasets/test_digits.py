import numpy as np
import pytest

from fedplat.datasets import digits
from tests.datasets import source


def test_digits_need_no_files_and_write_none(tmp_path):
    data = digits.load(source(tmp_path))
    assert not (tmp_path / "cache").exists()
    assert data.train.x.dtype == np.uint8
    assert data.train.x.max() == 16
    assert data.sample_shape == (1, 8, 8)
    assert data.num_classes == 10


def test_the_split_is_stratified_complete_and_drawn_by_the_seed(tmp_path):
    first, same, other = (digits.load(source(tmp_path, seed=seed)) for seed in (0, 0, 1))
    whole = np.bincount(first.train.y) + np.bincount(first.test.y)
    assert whole.sum() == 1797
    np.testing.assert_allclose(np.bincount(first.test.y), 0.2 * whole, atol=0.5)
    np.testing.assert_array_equal(first.test.x, same.test.x)
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert sorted(map(bytes, first.train.x)) != sorted(map(bytes, other.train.x))


def test_prepared_digits_have_mean_zero_and_deviation_one(tmp_path):
    data = digits.load(source(tmp_path))
    x = data.prepare(np.concatenate([data.train.x, data.test.x]))
    assert tuple(x.shape) == (1797, 1, 8, 8)
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)


def test_the_test_fraction_is_a_setting(tmp_path):
    assert len(digits.load(source(tmp_path), test_fraction=0.5).test) == pytest.approx(1797 / 2, abs=5)
