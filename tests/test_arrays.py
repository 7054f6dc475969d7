from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from fedplat.arrays import FlatArrays, Layout, LayoutError, payload_bytes, peek
from fedplat.compat import records_from_bytes, records_to_bytes

from .flower_apps import record


def model() -> ArrayRecord:
    return record(
        **{
            "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
            "bn.running_mean": np.array([7.0, 8.0], np.float32),
            "bn.num_batches_tracked": np.array(5, np.int64),
            "fc.bias": np.array([1.5], np.float32),
            "half": np.array([0.25, 0.5], np.float16),
        }
    )


def test_parameters_come_first_then_float_buffers_and_the_rest_lies_beside() -> None:
    flat = FlatArrays.of_record(model())
    assert flat.vector.tolist() == [0, 1, 2, 3, 4, 5, 1.5, 7, 8]
    assert flat.layout.num_params == 7
    assert flat.layout.dim == 9
    assert flat.view("bn.num_batches_tracked") == 5
    assert flat.view("half").dtype == np.float16


def test_record_of_views_returns_every_array_with_its_type_and_order() -> None:
    original = model()
    views = FlatArrays.of_record(original).to_record()
    assert list(views) == list(original)
    for name, array in original.items():
        np.testing.assert_array_equal(views[name].numpy(), array.numpy(), strict=True)
        assert views[name].data == array.data
        assert views[name].object_id == array.object_id


def test_promoted_layout_computes_in_float32_and_returns_the_models_own_types() -> None:
    layout = Layout.of_record(model(), promote=True)
    flat = FlatArrays.of_record(model(), layout)
    assert layout.dim == 11
    flat.vector += 1
    assert flat.to_record()["half"].numpy().tolist() == [1.25, 1.5]
    assert flat.to_record()["half"].numpy().dtype == np.float16


def test_numpy_gives_a_copy_and_view_gives_read_only_memory() -> None:
    flat = FlatArrays.of_record(model())
    array = flat.to_record()["fc.bias"]
    array.numpy()[0] = 99
    assert flat.view("fc.bias")[0] == 1.5
    with pytest.raises(ValueError, match="read-only"):
        peek(array)[0] = 99


def test_memory_behind_a_record_is_found_without_a_copy_until_the_record_is_changed() -> None:
    flat = FlatArrays.of_record(model())
    views = flat.to_record()
    assert FlatArrays.behind(views) is flat
    assert FlatArrays.of_record(views) is flat
    views["fc.bias"] = Array(np.array([3.0], np.float32))
    assert FlatArrays.behind(views) is None
    assert FlatArrays.of_record(views).view("fc.bias")[0] == 3.0


def test_arrays_are_matched_by_name_not_by_position() -> None:
    flat = FlatArrays.of_record(model())
    shuffled = ArrayRecord(dict(reversed(list(model().items()))))
    np.testing.assert_array_equal(FlatArrays.of_record(shuffled, flat.layout).vector, flat.vector)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc.bias": None}, "missing arrays ['fc.bias']"),
        ({"extra": np.zeros(1, np.float32)}, "unexpected arrays ['extra']"),
        ({"fc.bias": np.zeros(2, np.float32)}, "'fc.bias' has shape (2,), expected (1,)"),
        ({"fc.bias": np.zeros(1, np.float64)}, "'fc.bias' is float64, expected float32"),
    ],
)
def test_record_that_does_not_fit_is_refused_by_name_before_anything_is_written(change, words) -> None:
    flat = FlatArrays.of_record(model())
    before = flat.vector.copy()
    wrong = {
        name: array.numpy() + np.asarray(1, array.numpy().dtype) for name, array in model().items()
    } | change
    with pytest.raises(LayoutError) as error:
        flat.fill(record(**{name: value for name, value in wrong.items() if value is not None}))
    assert words in str(error.value)
    np.testing.assert_array_equal(flat.vector, before)


def test_array_whose_bytes_are_not_numbers_is_refused() -> None:
    layout = Layout.of_record(record(a=np.zeros(2, np.float32)))
    for bad in (
        Array("float32", (2,), "numpy.ndarray", b"nonsense"),
        Array("float32", (2,), "numpy.ndarray", Array(np.zeros(2, np.float32)).data[:-1]),
        Array("float32", (2,), "pickle", b""),
        Array(np.array(["a", "b"])),
    ):
        with pytest.raises(LayoutError, match="'a'"):
            FlatArrays.of_record(ArrayRecord({"a": bad}), layout)


def test_views_survive_pickling_deepcopy_and_flowers_wire_format_as_ordinary_arrays() -> None:
    flat = FlatArrays.of_record(model())
    views = flat.to_record()
    for travelled in (
        pickle.loads(pickle.dumps(views)),
        copy.deepcopy(views),
        records_from_bytes(records_to_bytes(RecordDict({"m": views})))["m"],
    ):
        assert type(travelled["fc.bias"]) is Array
        np.testing.assert_array_equal(FlatArrays.of_record(travelled).vector, flat.vector)
        np.testing.assert_array_equal(FlatArrays.of_record(travelled).side, flat.side)


def test_fortran_order_and_empty_arrays_are_read_right() -> None:
    tricky = record(
        f=np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), e=np.zeros((0, 4), np.float32)
    )
    flat = FlatArrays.of_record(tricky)
    assert flat.vector.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.view("e").shape == (0, 4)


def test_payload_counts_each_array_in_its_own_type() -> None:
    expected = 4 * 9 + 8 + 2 * 2
    assert payload_bytes(model()) == expected
    assert payload_bytes(FlatArrays.of_record(model()).to_record()) == expected


@pytest.mark.parametrize(
    "header", [b"{'descr': (", b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }"]
)
def test_a_header_that_is_no_header_is_a_misfit_and_not_the_end_of_a_run(header: bytes) -> None:
    body = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4)
    odd = Array("float32", (1,), "numpy.ndarray", body)
    layout = Layout.of_record(record(a=np.zeros(1, np.float32)))
    with pytest.raises(LayoutError, match="'a' cannot be read"):
        FlatArrays.of_record(ArrayRecord({"a": odd}), layout)
