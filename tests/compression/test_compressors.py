from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.arrays import Layout
from fedplat.compression import QSGD, Compressor, EncodingError, HalfPrecision, Sparse, TopK, Uncompressed
from fedplat.compression.base import pack_codes, packed_bytes, unpack_codes
from fedplat.compression.top_k import largest
from fedplat.errors import UserError

ALL: dict[str, Compressor] = {
    "none": Uncompressed(),
    "fp16": HalfPrecision(),
    "bf16": HalfPrecision(format="bf16"),
    "top-k": TopK(fraction=0.01),
    "top-k with a mask": TopK(fraction=0.2, values="float16"),
    "top-k of all": TopK(fraction=1.0),
    "top-k per layer": TopK(fraction=0.05, per_layer=True),
    "qsgd": QSGD(),
    "qsgd l2": QSGD(levels=1, bucket=64, norm="l2"),
    "qsgd 8 bits": QSGD(levels=127, bucket=100_000),
    "sparse": Sparse(),
}
SIZED = [name for name in ALL if name != "sparse"]


def layout(*sizes: int) -> Layout:
    return Layout.of({f"w{i}": ((size,), "float32") for i, size in enumerate(sizes)})


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def update(size: int, seed: int = 0) -> np.ndarray:
    return (rng(seed).standard_normal(size) * 0.01).astype(np.float32)


def there_and_back(compressor: Compressor, vector: np.ndarray, seed: int = 0, *sizes: int) -> np.ndarray:
    shape = layout(*(sizes or (len(vector),)))
    return compressor.decode(compressor.encode(vector, shape, rng(seed)), shape)


# Any compressor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 511, 513, 70_001])
def test_the_bytes_told_beforehand_are_those_that_are_sent(name: str, size: int) -> None:
    compressor, shape = ALL[name], layout(size // 3, size - size // 3)
    arrays = compressor.encode(update(size), shape, rng())
    assert sum(array.nbytes for array in arrays.values()) == compressor.encoded_bytes(shape)
    assert {n: (a.dtype.name, len(a)) for n, a in arrays.items()} == compressor.parts(shape)
    assert compressor.decode(arrays, shape).shape == (size,)
    assert compressor.least_bytes(shape) == min(compressor.encoded_bytes(shape), 4 * size)


@pytest.mark.parametrize("name", ALL)
def test_the_same_draws_give_the_same_bytes_and_nothing_given_is_changed(name: str) -> None:
    compressor, shape, vector = ALL[name], layout(300, 700), update(1000)
    before = vector.copy()
    first = compressor.encode(vector, shape, rng(5))
    sent = {name: array.copy() for name, array in first.items()}
    again = compressor.encode(vector, shape, rng(5))
    compressor.decode(first, shape)
    assert all(np.array_equal(again[name], first[name]) for name in sent)
    assert all(np.array_equal(sent[name], first[name]) for name in sent)
    np.testing.assert_array_equal(vector, before)


@pytest.mark.parametrize("name", ALL)
def test_an_update_of_zeros_stays_one(name: str) -> None:
    np.testing.assert_array_equal(there_and_back(ALL[name], np.zeros(100, np.float32)), 0)


@pytest.mark.parametrize("name", ALL)
def test_arrays_of_other_names_types_lengths_or_dimensions_are_refused(name: str) -> None:
    compressor, shape = ALL[name], layout(1000)
    good = compressor.encode(update(1000), shape, rng())
    for key, array in good.items():
        worse: list[dict[str, Any]] = [
            {**good, key: array[:-1]},
            {**good, key: np.concatenate([array, array[:1]])},
            {**good, key: array.astype(np.float64)},
            {**good, key: array[None]},
            {other: value for other, value in good.items() if other != key},
            {**good, "more": array},
        ]
        for bad in worse:
            with pytest.raises(EncodingError):
                compressor.decode(bad, shape)


@pytest.mark.parametrize("name", SIZED)
def test_numbers_that_are_not_finite_are_refused_except_where_models_are_sent_bit_for_bit(name: str) -> None:
    compressor, shape = ALL[name], layout(1000)
    for value in (np.nan, np.inf, -np.inf):
        bad = compressor.encode(update(1000), shape, rng())
        for key, array in bad.items():
            if array.dtype.kind == "f":
                array[0] = value
            elif name == "bf16":
                array[0] = {np.inf: 0x7F80, -np.inf: 0xFF80}.get(value, 0x7FC1)
            else:
                continue
            if compressor.of_model:
                np.testing.assert_array_equal(compressor.decode(bad, shape)[0], np.float32(value))
            else:
                with pytest.raises(EncodingError, match=f"'{key}' holds numbers that are not finite"):
                    compressor.decode(bad, shape)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TopK(fraction=0.0), "fraction is 0.0"),
        (lambda: TopK(fraction=1.1), "fraction is 1.1"),
        (lambda: TopK(values="int8"), "not 'int8'"),
        (lambda: QSGD(levels=0), "levels is 0"),
        (lambda: QSGD(levels=128), "beyond that use fp16"),
        (lambda: QSGD(bucket=0), "bucket is 0"),
        (lambda: QSGD(norm="l1"), "not 'l1'"),
        (lambda: HalfPrecision(format="fp8"), "not 'fp8'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build()


# Sixteen bits ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_half_precision_stays_within_its_bound_and_clamps_what_is_too_large(numbers: list[float]) -> None:
    vector = np.array(numbers, np.float32)
    exact = vector.astype(np.float64)
    fp16 = there_and_back(ALL["fp16"], vector).astype(np.float64)
    bound = np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25)
    inside = np.abs(exact) <= 65504
    assert (np.abs(fp16 - exact) <= bound)[inside].all()
    np.testing.assert_array_equal(fp16[~inside], np.sign(exact[~inside]) * 65504)
    bf16 = there_and_back(ALL["bf16"], vector).astype(np.float64)
    assert np.isfinite(bf16).all()
    # Below the normal numbers the steps no longer shrink.
    assert (np.abs(bf16 - exact) <= np.maximum(np.abs(exact) * 2.0**-8, 2.0**-134)).all()


def test_bf16_rounds_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    vector = np.concatenate([update(5000), np.float32([1.00390625, 1.01171875, -0.0, 1e-40])])
    np.testing.assert_array_equal(
        there_and_back(ALL["bf16"], vector), torch.from_numpy(vector).to(torch.bfloat16).float().numpy()
    )


# Top-k -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_top_k_sends_the_largest_and_of_equal_ones_the_first(numbers: list[int], fraction: float) -> None:
    vector = np.array(numbers, np.float32)
    count = max(1, round(fraction * len(vector)))
    chosen = sorted(range(len(vector)), key=lambda i: (-abs(numbers[i]), i))[:count]
    expected = np.zeros_like(vector)
    expected[chosen] = vector[chosen]
    np.testing.assert_array_equal(there_and_back(TopK(fraction=fraction), vector), expected)
    assert largest(np.abs(vector), count).tolist() == sorted(chosen)


def test_top_k_per_layer_takes_its_share_of_every_array() -> None:
    vector = np.float32([9, 8, 7, 6, 0.1, 0.3, 0.2, 0.4])
    found = there_and_back(TopK(fraction=0.5, per_layer=True), vector, 0, 4, 4)
    np.testing.assert_array_equal(found, np.float32([9, 8, 0, 0, 0, 0.3, 0, 0.4]))
    found = there_and_back(TopK(fraction=0.5), vector, 0, 4, 4)
    np.testing.assert_array_equal(found, np.float32([9, 8, 7, 6, 0, 0, 0, 0]))


@pytest.mark.parametrize(
    ("size", "fraction", "expected"),
    [
        (1000, 0.01, 10 * (2 + 4)),
        (100_000, 0.01, 1000 * (4 + 4)),
        (1000, 0.1, 125 + 100 * 4),
        (1000, 1.0, 4000),
        (1000, 0.00001, 2 + 4),
    ],
)
def test_places_are_sent_in_the_smaller_of_two_ways(size: int, fraction: float, expected: int) -> None:
    assert TopK(fraction=fraction).encoded_bytes(layout(size)) == expected


def test_places_out_of_range_twice_or_out_of_order_are_refused() -> None:
    compressor, shape = TopK(fraction=0.01), layout(1000)
    good = compressor.encode(update(1000), shape, rng())
    for where, words in [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 1000], "go up to 1000"),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 8], "some come twice"),
        ([1, 0, 2, 3, 4, 5, 6, 7, 8, 9], "not in order"),
    ]:
        with pytest.raises(EncodingError, match=words):
            compressor.decode({**good, "indices": np.array(where, np.uint16)}, shape)


def test_a_mask_with_another_number_of_ones_is_refused() -> None:
    for compressor in (TopK(fraction=0.2), Sparse()):
        vector = update(1000)
        vector[::2] = 0
        good = compressor.encode(vector, layout(1000), rng())
        with pytest.raises(EncodingError, match="'mask' chooses 1000 elements"):
            compressor.decode({**good, "mask": np.full(125, 255, np.uint8)}, layout(1000))


# QSGD ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=40))
def test_codes_are_packed_without_gaps(bits: int, numbers: list[int]) -> None:
    codes = np.array(numbers, np.uint8) & np.uint8((1 << bits) - 1)
    packed = pack_codes(codes, bits)
    assert len(packed) == packed_bytes(len(codes), bits) == math.ceil(len(codes) * bits / 8)
    text = "".join(f"{code:0{bits}b}" for code in codes.tolist())
    text += "0" * (-len(text) % 8)
    assert packed.tolist() == [int(text[i : i + 8], 2) for i in range(0, len(text), 8)]
    np.testing.assert_array_equal(unpack_codes(packed, bits, len(codes)), codes)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (3, 3), (7, 4), (127, 8)])
def test_qsgd_is_unbiased_and_its_variance_within_the_bounds(norm: Any, levels: int, bits: int) -> None:
    compressor, vector, draws = QSGD(levels=levels, bucket=32, norm=norm), update(80, seed=3), 3000
    assert compressor.bits == bits
    shape, source = layout(80), rng(1)
    found = np.stack(
        [compressor.decode(compressor.encode(vector, shape, source), shape) for _ in range(draws)]
    )
    found = found.astype(np.float64)
    exact = vector.astype(np.float64)
    deviation = found.std(axis=0) + 1e-12
    assert (np.abs(found.mean(axis=0) - exact) <= 5 * deviation / math.sqrt(draws) + 1e-8).all()
    for start in (0, 32, 64):
        part = exact[start : start + 32]
        n, l2 = len(part), float(np.linalg.norm(part))
        error = float(np.square(found[:, start : start + 32] - part).sum(axis=1).mean())
        largest_norm = float(np.abs(part).max()) if norm == "max" else l2
        assert error <= 1.02 * n * largest_norm**2 / (4 * levels**2)
        if norm == "l2":
            assert error <= min(n / levels**2, math.sqrt(n) / levels) * l2**2


def test_qsgd_gives_what_a_plain_loop_gives() -> None:
    compressor, vector = QSGD(levels=3, bucket=10, norm="l2"), update(25)
    draws = rng(9).random((3, 10), np.float32)
    expected = []
    for i, value in enumerate(vector.tolist()):
        bucket = vector[i // 10 * 10 :][:10].astype(np.float64)
        scaled = abs(value) * 3 / math.sqrt(float((bucket**2).sum()))
        level = math.floor(scaled) + (float(draws[i // 10, i % 10]) < scaled - math.floor(scaled))
        expected.append(math.copysign(level, value) * math.sqrt(float((bucket**2).sum())) / 3)
    np.testing.assert_allclose(there_and_back(compressor, vector, 9), expected, rtol=1e-6)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_a_lone_element_and_the_smallest_and_largest_numbers_survive(norm: Any) -> None:
    for value in (1.0, -3e-45, 3.4e38, 0.1):
        vector = np.float32([0, 0, value, 0])
        np.testing.assert_allclose(there_and_back(QSGD(norm=norm), vector), vector, rtol=1e-6, atol=2e-44)


def test_codes_that_do_not_exist_and_norms_below_zero_are_refused() -> None:
    compressor, shape = QSGD(levels=7), layout(1000)
    good = compressor.encode(update(1000), shape, rng())
    with pytest.raises(EncodingError, match="go up to 15, expected at most 14"):
        compressor.decode({**good, "codes": np.full(500, 255, np.uint8)}, shape)
    with pytest.raises(EncodingError, match="negative"):
        compressor.decode({**good, "norms": -good["norms"]}, shape)


# Sparse ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100), st.floats(0, 1), st.integers(0, 5))
def test_a_sparse_model_comes_back_bit_for_bit_and_is_never_larger_than_whole(
    size: int, zeros: float, seed: int
) -> None:
    vector = update(size, seed)
    vector[rng(seed).random(size) < zeros] = 0
    vector[:3] = np.float32([-0.0, np.nan, np.inf])[:size]
    arrays = Sparse().encode(vector, layout(size), rng())
    found = Sparse().decode(arrays, layout(size))
    np.testing.assert_array_equal(found.view(np.uint32), vector.view(np.uint32))
    count = int(np.count_nonzero(vector.view(np.uint32)))
    sent = sum(array.nbytes for array in arrays.values())
    assert sent == min(4 * size, math.ceil(size / 8) + 4 * count)
    assert Sparse().encoded_bytes(layout(size)) is None
    assert Sparse().least_bytes(layout(size)) == math.ceil(size / 8) <= sent or size == 0
