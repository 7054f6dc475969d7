from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.security.fixed_point import FixedPoint, decode_update, encode_update, vector_length

from ..flower_apps import record


def flat(arrays: ArrayRecord) -> FlatArrays:
    return FlatArrays.of_record(arrays, Layout.of_record(arrays, promote=True))


def test_a_hand_computed_example() -> None:
    codec = FixedPoint(clip=4.0, bits=32, summands=2)
    assert codec.limit == 1_073_741_823  # ⌊(2^31 − 1) / 2⌋
    encoded = codec.encode(np.array([4.0, -4.0, 1.0, 9.0, 0.0], np.float32))
    # 1.0 is 1073741823 / 4 = 268435455.75 steps.
    assert encoded.view(np.int32).tolist() == [1_073_741_823, -1_073_741_823, 268_435_456, 1_073_741_823, 0]
    assert codec.decode(encoded, 1)[:2].tolist() == [4.0, -4.0]


def test_halves_are_rounded_to_even() -> None:
    codec = FixedPoint(clip=float(2**46), bits=64, summands=1)
    assert codec.scale == 4.0
    values = np.array([0.125, 0.375, 0.625, -0.125, -0.375])
    assert codec.encode(values).view(np.int64).tolist() == [0, 2, 2, 0, -2]


SUMS = [(32, n, w) for n in (1, 2, 3, 7, 100, 1000) for w in (1, 3, 1000) if n * w <= 100_000]
SUMS += [(64, n, w) for n in (1, 2, 3, 7, 100, 1000) for w in (1, 3, 1000)]


@pytest.mark.parametrize(("bits", "summands", "weight"), SUMS)
@pytest.mark.parametrize("clip", [8.0, 0.1, 1e-30, 1e30, 3.3])
def test_a_full_sum_of_extreme_values_does_not_wrap(
    bits: int, summands: int, weight: int, clip: float
) -> None:
    codec = FixedPoint(clip=clip, bits=bits, summands=summands, max_weight=weight)
    for value in (clip, -clip):
        one = codec.encode(np.array([value]), weight)
        exact = summands * int(one.view(f"int{bits}")[0])
        assert abs(exact) <= 2 ** (bits - 1) - 1
        total = np.zeros(1, codec.dtype)
        for _ in range(min(summands, 100)):
            total += one
        if summands <= 100:
            assert int(total.view(f"int{bits}")[0]) == exact
            assert codec.decode(total, summands * weight)[0] == pytest.approx(value, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_weighted_mean_is_off_by_half_a_step_per_term_at_most(data) -> None:
    n = data.draw(st.integers(1, 6))
    cap = data.draw(st.sampled_from([1, 20]))
    weights = [data.draw(st.integers(1, cap)) for _ in range(n)]
    values = np.array([[data.draw(st.floats(-12, 12)) for _ in range(3)] for _ in range(n)])
    codec = FixedPoint(clip=8.0, bits=data.draw(st.sampled_from([32, 64])), summands=n, max_weight=cap)
    total = np.zeros(3, codec.dtype)
    for value, weight in zip(values, weights, strict=True):
        total += codec.encode(value, weight)
    exact = np.average(np.clip(values, -8, 8), axis=0, weights=weights)
    bound = n * 0.5 / codec.scale / sum(weights)
    assert np.abs(codec.decode(total, sum(weights)) - exact).max() <= bound * 1.001 + 1e-13


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(bad: float) -> None:
    codec = FixedPoint(clip=8.0, bits=32, summands=2)
    for size, place in ((1, 0), (100_000, 99_999)):
        values = np.zeros(size, np.float32)
        values[place] = bad
        with pytest.raises(ValueError, match="not finite"):
            codec.encode(values)
    with pytest.raises(ValueError, match="not finite"):
        encode_update(
            flat(record(w=np.array([3e38], np.float32))), flat(record(w=np.array([-3e38], np.float32))), codec
        )


def test_whole_numbers_are_summed_exactly_and_clipped_to_what_a_term_may_be() -> None:
    codec = FixedPoint(clip=8.0, bits=32, summands=2, max_weight=10)
    most = codec.limit // 10
    encoded = codec.encode_integers(np.array([5, -7, 2**40, -(2**63)]), weight=10)
    assert encoded.view(np.int32).tolist() == [50, -70, 10 * most, -10 * most]
    total = encoded + codec.encode_integers(np.array([8, -8, 0, 0]), weight=1)
    assert codec.decode_integers(total, 11)[:2].tolist() == [5, -7]  # 58/11 = 5.27, −78/11 = −7.09


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"clip": 0.0}, "clip must be a number above 0"),
        ({"clip": float("nan")}, "clip must be a number above 0"),
        ({"clip": float("inf")}, "clip must be a number above 0"),
        ({"bits": 16}, "bits must be 32 or 64"),
        ({"summands": 0}, "at least one term"),
        ({"max_weight": 0}, "at least one term"),
        ({"max_weight": 10_000_000}, "lower max_weight, or use bits = 64"),
        ({"summands": 10**8}, "leaves fewer than 256 steps in 32 bits"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings_: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        FixedPoint(**{"clip": 8.0, "bits": 32, "summands": 2, **settings_})
    with pytest.raises(ValueError, match="a weight must be from 1 to 1"):
        FixedPoint(clip=8.0, bits=32, summands=2).encode(np.zeros(1), weight=2)


def mixed(w: float, scalar: float, half: float, count: int, flag: bool, small: int) -> FlatArrays:
    return flat(
        record(
            w=np.full((2, 3), w, np.float32),
            scalar=np.array(scalar, np.float32),
            half=np.array([half], np.float16),
            double=np.array([half], np.float64),
            none=np.zeros((0, 4), np.float32),
            count=np.array(count, np.int64),
            unsigned=np.array([count], np.uint64),
            flag=np.array([flag, True]),
            small=np.array([small, 255], np.uint8),
        )
    )


def test_models_with_arrays_of_all_kinds_come_back_as_their_mean_with_their_types() -> None:
    received = mixed(1, -1, 0.5, 2**53 + 1, False, 3)
    trained = [
        mixed(2, 0, 1.0, 2**53 + 11, True, 250),
        mixed(4, -3, 1.5, 2**53 + 13, True, 251),
        mixed(0, 0, 0.5, 2**53 + 13, False, 252),
    ]
    codec = FixedPoint(clip=8.0, bits=32, summands=3)
    total = sum(
        (encode_update(t, received, codec) for t in trained[1:]), encode_update(trained[0], received, codec)
    )
    assert total.shape == (vector_length(received.layout),)
    mean = received.layout.new()
    assert decode_update(total, 3, received, codec, into=mean) == 3
    arrays = {name: array.numpy() for name, array in mean.to_record().items()}
    for name, array in received.to_record().items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.numpy().dtype, array.numpy().shape)
    np.testing.assert_allclose(arrays["w"], 2, atol=1e-7)
    np.testing.assert_allclose(arrays["scalar"], -1, atol=1e-7)
    np.testing.assert_allclose(arrays["half"], 1.0, atol=1e-3)
    assert arrays["count"] == 2**53 + 12
    assert arrays["unsigned"].tolist() == [2**53 + 12]
    assert arrays["flag"].tolist() == [True, True]
    assert arrays["small"].tolist() == [251, 255]


def test_a_weight_in_the_sum_that_cannot_be_is_refused() -> None:
    received = flat(record(w=np.zeros(2, np.float32)))
    codec = FixedPoint(clip=8.0, bits=32, summands=3, max_weight=2)
    into = received.layout.new()
    for weight in (0, 2, 7, 2**31):
        with pytest.raises(ValueError, match=f"the weights of 3 updates add up to {weight}"):
            decode_update(np.array([0, 0, weight], np.uint32), 3, received, codec, into)


def test_arrays_that_are_no_plain_numbers_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"arrays \['z'\] hold neither"):
        vector_length(Layout.of_record(record(z=np.zeros(2, np.complex64))))


def test_the_digest_tells_models_and_settings_apart_and_does_not_depend_on_how_they_are_written() -> None:
    codec = FixedPoint(clip=8.0, bits=32, summands=2)
    model = mixed(1, 2, 3, 4, True, 5)
    digests = {codec.digest(model)}
    for other in (mixed(1, 2, 3, 4, True, 6), mixed(1, 2, 3, 4, False, 5), mixed(1, 2.5, 3, 4, True, 5)):
        digests.add(codec.digest(other))
    for settings_ in ({"clip": 4.0}, {"bits": 64}, {"summands": 3}, {"max_weight": 2}):
        digests.add(FixedPoint(**{"clip": 8.0, "bits": 32, "summands": 2, **settings_}).digest(model))
    turned = ArrayRecord(dict(reversed(list(model.to_record().items()))))
    digests.add(codec.digest(flat(turned)))
    assert len(digests) == 9
    assert FixedPoint(clip=8, bits=32, summands=2).digest(mixed(1, 2, 3, 4, True, 5)) == codec.digest(model)
