"""Named arrays as one flat vector, and Flower records that are views of it.

A model travels as ``FlatArrays``: every float32 array lies in one contiguous vector, parameters first and
float buffers after them; all else (integer counters, arrays of other types) lies byte for byte in a side
block. ``to_record`` dresses that memory as a Flower ``ArrayRecord`` without copying or serialising it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import BytesIO
from tokenize import TokenError
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from .compat import SType, array_record

Float32Array = NDArray[np.float32]

_BUFFER_SUFFIXES = ("running_mean", "running_var")
_SIDE_ALIGNMENT = 8


class LayoutError(ValueError):
    """A record does not have the names, shapes or types that a layout asks for."""


@dataclass(frozen=True)
class Entry:
    """One named array, at elements start..stop of the float32 vector, or at such bytes of the side block."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    in_vector: bool

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of the array."""
        return np.dtype(self.dtype)


@dataclass(frozen=True)
class Layout:
    """Where each named array lies. Two layouts are equal if all their entries are.

    ``dim`` is d, the length of the vector; its first ``num_params`` elements are parameters, the rest are
    float buffers such as BatchNorm's running mean and variance.
    """

    entries: tuple[Entry, ...]
    dim: int
    num_params: int
    side_bytes: int
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.entries))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(
        cls,
        named: Mapping[str, tuple[tuple[int, ...], str]],
        buffers: Collection[str] | None = None,
        promote: bool = False,
    ) -> Layout:
        """Lay out arrays given as name -> (shape, dtype), in the order of ``named``.

        ``buffers`` names the float buffers (default: recognised by their torch names). ``promote`` puts
        floating arrays of every width into the float32 vector, for arithmetic on models of other types.
        """

        def is_buffer(name: str) -> bool:
            return name in buffers if buffers is not None else name.rsplit(".", 1)[-1] in _BUFFER_SUFFIXES

        def in_vector(dtype: str) -> bool:
            return dtype == "float32" or (promote and np.dtype(dtype).kind == "f")

        sizes = {name: math.prod(shape) for name, (shape, _) in named.items()}
        floats = [name for name, (_, dtype) in named.items() if in_vector(dtype)]
        starts, position, num_params = {}, 0, 0
        for name in sorted(floats, key=is_buffer):  # stable: parameters keep their order, then buffers
            starts[name] = position
            position += sizes[name]
            if not is_buffer(name):
                num_params = position
        entries, side = [], 0
        for name, (shape, dtype) in named.items():
            if name in starts:
                entries.append(Entry(name, shape, dtype, starts[name], starts[name] + sizes[name], True))
            else:
                nbytes = sizes[name] * np.dtype(dtype).itemsize
                entries.append(Entry(name, shape, dtype, side, side + nbytes, False))
                side += -(-nbytes // _SIDE_ALIGNMENT) * _SIDE_ALIGNMENT
        return cls(tuple(entries), position, num_params, side)

    @classmethod
    def of_record(cls, record: ArrayRecord, promote: bool = False) -> Layout:
        """Lay out the arrays of a Flower record: all floating ones in the vector with ``promote``."""
        source = FlatArrays.behind(record)
        if source is not None:
            known = source.layout
            if not (known.has_other_floats if promote else known.has_promoted):
                return known
        decoded = {name: peek(array) for name, array in record.items()}
        return cls.of({name: (a.shape, a.dtype.name) for name, a in decoded.items()}, promote=promote)

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        """Entries by name."""
        return {entry.name: entry for entry in self.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in their own types: what a transfer of the model has to carry."""
        return sum(math.prod(e.shape) * np.dtype(e.dtype).itemsize for e in self.entries)

    @property
    def has_other_floats(self) -> bool:
        """Whether floating arrays lie in the side block because they are not float32."""
        return any(not e.in_vector and np.dtype(e.dtype).kind == "f" for e in self.entries)

    @property
    def has_promoted(self) -> bool:
        """Whether floating arrays of another type than float32 lie in the vector, as float32."""
        return any(e.in_vector and e.dtype != "float32" for e in self.entries)

    def new(self) -> FlatArrays:
        """Allocate zeroed memory for one model of this layout."""
        return FlatArrays(self, np.zeros(self.dim, np.float32), np.zeros(self.side_bytes, np.uint8))


@dataclass(frozen=True)
class RowBlock:
    """A batch of models of one layout: ``matrix`` (n, d) float32 and ``side`` (n, side bytes)."""

    layout: Layout
    matrix: Float32Array
    side: NDArray[np.uint8]

    def row(self, index: int) -> FlatArrays:
        """Return one model of the batch as a view."""
        return FlatArrays(self.layout, self.matrix[index], self.side[index], self, index)


@dataclass(eq=False)
class FlatArrays:
    """One model: ``vector`` (d,) float32 and ``side`` bytes, arranged by ``layout``.

    ``block`` and ``row`` tell of which matrix the vector is a row, if it is one.
    """

    layout: Layout
    vector: Float32Array
    side: NDArray[np.uint8]
    block: RowBlock | None = None
    row: int = -1

    def view(self, name: str) -> NDArray[Any]:
        """Return one array with its own shape; a view, except for promoted types, which are converted."""
        return self._view(self.layout.by_name[name])

    def _view(self, entry: Entry) -> NDArray[Any]:
        if entry.in_vector:
            part = self.vector[entry.start : entry.stop].reshape(entry.shape)
            return part if entry.dtype == "float32" else part.astype(entry.dtype)
        return self.side[entry.start : entry.stop].view(entry.dtype).reshape(entry.shape)

    def fill(self, record: ArrayRecord) -> FlatArrays:
        """Copy a record's arrays in, matched by name; raises LayoutError where it does not fit."""
        source = FlatArrays.behind(record)
        # Promoted arrays may have more digits in memory than in the record.
        if source is not None and source.layout == self.layout and not self.layout.has_promoted:
            self.vector[:] = source.vector
            self.side[:] = source.side
            return self
        for entry, array in matched(record, self.layout):
            if entry.in_vector:
                self.vector[entry.start : entry.stop] = array.reshape(-1)
            else:
                self._view(entry)[...] = array
        return self

    def to_record(self) -> ArrayRecord:
        """Return a Flower record whose arrays are views of this memory, serialised only when asked to be."""
        return array_record({entry.name: ViewArray(self, entry) for entry in self.layout.entries})

    @classmethod
    def of_record(cls, record: ArrayRecord, layout: Layout | None = None) -> FlatArrays:
        """Return the memory behind a record if it is laid out so, else a copy in that layout."""
        source = cls.behind(record)
        if source is not None and (layout is None or source.layout == layout):
            return source
        return (layout or Layout.of_record(record)).new().fill(record)

    @classmethod
    def copy_of(cls, named: Mapping[str, NDArray[Any]]) -> FlatArrays:
        """Return a copy of named arrays in the layout that they have."""
        flat = _layout_of(tuple((name, a.shape, a.dtype.str) for name, a in named.items())).new()
        for entry in flat.layout.entries:
            flat._view(entry)[...] = named[entry.name]
        return flat

    @staticmethod
    def behind(record: ArrayRecord) -> FlatArrays | None:
        """Return the memory that all arrays of a record view, or None if any array was made elsewhere."""
        first = next(iter(record.values()), None)
        if not isinstance(first, ViewArray) or len(record) != len(first.source.layout.entries):
            return None
        source = first.source
        for name, array in record.items():
            if not isinstance(array, ViewArray) or array.source is not source or array.entry.name != name:
                return None
        return source


@lru_cache(maxsize=256)
def _layout_of(key: tuple[tuple[str, tuple[int, ...], str], ...]) -> Layout:
    named = {name: (shape, np.dtype(dtype)) for name, shape, dtype in key}
    if wrong := [name for name, (_, dtype) in named.items() if dtype.kind not in "fiubc"]:
        raise ValueError(f"arrays {wrong} do not hold plain numbers")
    return Layout.of({name: (shape, dtype.name) for name, (shape, dtype) in named.items()})


class ViewArray(Array):
    """A Flower ``Array`` over memory here; its ``.npy`` bytes are made only when ``data`` is read."""

    source: FlatArrays
    entry: Entry

    # Flower writes the class name into the wire format, where this is an ordinary Array.
    __qualname__ = "Array"

    def __init__(self, source: FlatArrays, entry: Entry) -> None:
        # Past Flower's __setattr__, which keeps books for serialised arrays and would take most of the time.
        self.__dict__.update(
            source=source, entry=entry, dtype=entry.dtype, shape=entry.shape, stype=SType.NUMPY
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in NumPy's ``.npy`` format, as every other ``Array`` stores it."""
        buffer = BytesIO()
        np.save(buffer, self.view(), allow_pickle=False)
        return buffer.getvalue()

    def view(self) -> NDArray[Any]:
        """Return the array without a copy, read-only."""
        view = self.source._view(self.entry)
        view.flags.writeable = False
        return view

    def numpy(self) -> NDArray[Any]:
        """Return a fresh copy, as Flower's own ``Array`` does."""
        return self.source._view(self.entry).copy()

    # The memory may change, so neither an object id nor its chunks may be remembered.
    is_dirty = property(lambda self: True, lambda self, value: None)

    def slice_array(self) -> list[tuple[str, Any]]:
        """Cut the serialised array into chunks for Flower's object store."""
        self.__dict__.pop("_chunks", None)
        return super().slice_array()

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)


def peek(array: Array) -> NDArray[Any]:
    """Read a Flower array without copying it; read-only. Raises ValueError on anything but plain numbers."""
    if isinstance(array, ViewArray):
        return array.view()
    if array.stype != SType.NUMPY:
        raise ValueError(f"cannot read an array serialised as {array.stype!r}")
    data = array.data
    # A .npy file: 6 bytes of magic, 2 of version, the header's length in 2 bytes, or in 4 since version 2.
    wide = data[6:7] > b"\x01"
    start = 12 if wide else 10
    end = start + int.from_bytes(data[8:start], "little")
    shape, fortran_order, dtype = _npy_header(data[:end])
    flat = np.frombuffer(data, dtype, count=math.prod(shape), offset=end)
    return flat.reshape(shape, order="F" if fortran_order else "C")


@lru_cache(maxsize=1024)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse the start of a .npy file; clients send the same few headers in every round."""
    stream = BytesIO(header)
    major, _ = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    try:
        shape, fortran_order, dtype = read_header(stream)
    except TokenError as error:
        raise ValueError(f"the header is not one: {error}") from error
    if any(size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    if dtype.kind not in "fiubc":
        raise ValueError(f"arrays of type {dtype} are not accepted")
    return shape, fortran_order, dtype


def matched(record: ArrayRecord, layout: Layout) -> list[tuple[Entry, NDArray[Any]]]:
    """Pair each entry of a layout with the record's array of that name.

    Raises LayoutError naming the first name, shape or type that differs. Nothing is copied, so a record can
    be checked completely before the first byte is written.
    """
    if record.keys() != layout.by_name.keys():
        missing = sorted(layout.by_name.keys() - record.keys())
        extra = sorted(record.keys() - layout.by_name.keys())
        problems = {"missing arrays": missing, "unexpected arrays": extra}
        raise LayoutError("; ".join(f"{what} {names}" for what, names in problems.items() if names))
    pairs = []
    for entry in layout.entries:
        try:
            array = peek(record[entry.name])
        except (ValueError, SyntaxError, TypeError) as error:
            raise LayoutError(f"array '{entry.name}' cannot be read: {error}") from error
        if array.shape != entry.shape:
            raise LayoutError(f"array '{entry.name}' has shape {array.shape}, expected {entry.shape}")
        if array.dtype != entry.numpy_dtype and array.dtype.name != entry.dtype:
            raise LayoutError(f"array '{entry.name}' is {array.dtype.name}, expected {entry.dtype}")
        pairs.append((entry, array))
    return pairs


def payload_bytes(record: ArrayRecord) -> int:
    """Bytes of a record's arrays in their own types, without names and headers."""
    source = FlatArrays.behind(record)
    if source is not None:
        return source.layout.nbytes
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in record.values())
