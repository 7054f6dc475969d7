"""A round's replies as one matrix: the only place where Flower's records become tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .arrays import FlatArrays, Layout

# A chunk and its float64 copy stay in a core's cache: measured 3x faster than chunks of 16 MB.
_CHUNK_ELEMENTS = 1 << 18

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ClientUpdates:
    """The accepted replies of one round, one row per client, ordered by partition and then by node id.

    ``params`` (n, d) float32 holds the models the clients returned, ``reference`` (d,) the model they were
    sent, ``num_examples`` (n,) int64 what they claim to have trained on, ``update_norms`` (n,) float64 the L2
    norms of their updates, buffers left out. ``coverage`` (n, d) bool tells which elements a client trained;
    None means all, and elsewhere ``params`` has the reference's value. ``server_round`` is the round's
    number, and ``refused`` names the nodes whose replies were not valid in this round. Treat every array as
    read-only: rows may be views of memory that Flower's records share.
    """

    layout: Layout
    node_ids: NDArray[np.uint64]
    num_examples: NDArray[np.int64]
    params: torch.Tensor
    reference: torch.Tensor
    side: NDArray[np.uint8]
    update_norms: NDArray[np.float64]
    coverage: torch.Tensor | None = None
    server_round: int = 0
    refused: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.node_ids)

    @classmethod
    def stack(
        cls,
        models: Sequence[FlatArrays],
        reference: FlatArrays,
        node_ids: Sequence[int],
        num_examples: Sequence[int],
        coverage: torch.Tensor | None = None,
    ) -> ClientUpdates:
        """Make the matrix of models in the reference's layout; without a copy if they are rows of one."""
        matrix, side = _as_rows(models)
        params, sent = torch.from_numpy(matrix), torch.from_numpy(_writable(reference.vector))
        p = reference.layout.num_params
        return cls(
            reference.layout,
            np.asarray(node_ids, np.uint64),
            np.asarray(num_examples, np.int64),
            params,
            sent,
            side,
            update_norms(params[:, :p], sent[:p]),
            coverage,
        )

    @cached_property
    def partial(self) -> torch.Tensor | None:
        """``coverage`` if some client did not train everything, else None."""
        return None if self.coverage is None or bool(self.coverage.all()) else self.coverage

    def deltas(self) -> torch.Tensor:
        """Return params − reference, (n, d); a new tensor."""
        return self.params - self.reference

    def select(self, keep: NDArray[np.bool_]) -> ClientUpdates:
        """Return the updates of some clients, given as a mask (n,)."""
        if keep.all():
            return self
        rows = torch.from_numpy(keep)
        return replace(
            self,
            node_ids=self.node_ids[keep],
            num_examples=self.num_examples[keep],
            params=self.params[rows],
            side=self.side[keep],
            update_norms=self.update_norms[keep],
            coverage=None if self.coverage is None else self.coverage[rows],
        )

    def columns(self, start: int, stop: int) -> ClientUpdates:
        """Return the updates restricted to elements start..stop of the vector; views."""
        if (start, stop) == (0, self.params.shape[1]):
            return self
        coverage = None if self.coverage is None else self.coverage[:, start:stop]
        return replace(
            self, params=self.params[:, start:stop], reference=self.reference[start:stop], coverage=coverage
        )

    def finite_rows(self) -> NDArray[np.bool_]:
        """Return which clients (n,) sent finite numbers only."""
        # A finite norm or sum has finite terms; only rows that have neither are looked at element by element.
        p = self.layout.num_params
        finite = np.isfinite(self.update_norms) & torch.isfinite(self.params[:, p:].sum(dim=1)).numpy()
        for row in np.flatnonzero(~finite).tolist():
            finite[row] = bool(torch.isfinite(self.params[row]).all())
        return finite


def update_norms(params: torch.Tensor, reference: torch.Tensor) -> NDArray[np.float64]:
    """Return ‖params − reference‖₂ of each row (n,); no square overflows."""
    squares = squares_from(params, reference)
    return squares.sqrt_().cpu().numpy()


def squares_from(matrix: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − point‖² (n,) float64 of float32 rows (n, d) and a float32 point (d,), in one pass.

    Differences and runs of 512 squares are formed in float32, the sum over runs in float64: a relative error
    of a few 1e-8. Rows whose squares leave the range of float32 are done again in float64.
    """
    n, d = matrix.shape
    if not plain_float32(matrix, point):
        squares = torch.zeros(n, dtype=torch.float64, device=matrix.device)
        for start, stop in column_chunks(n, d, matrix.device):
            squares += (matrix[:, start:stop].double() - point[start:stop]).square_().sum(dim=1)
        return squares
    x, p = matrix.numpy(), point.numpy()

    def piece(bounds: tuple[int, int]) -> NDArray[np.float64]:
        start, stop = bounds
        sums = np.empty(n)
        difference = np.empty((min(n, TILE_ROWS), stop - start), np.float32)
        for row in range(0, n, TILE_ROWS):
            tile = difference[: min(TILE_ROWS, n - row)]
            np.subtract(x[row : row + TILE_ROWS, start:stop], p[start:stop], out=tile)
            sums[row : row + TILE_ROWS] = run_squares(tile)
        return sums

    squares = torch.from_numpy(added(piece, tiles(n, d), n))
    for row in out_of_range(squares):
        squares[row] = (matrix[row].double() - point).square_().sum()
    return squares


def column_chunks(rows: int, columns: int, device: torch.device | None = None) -> list[tuple[int, int]]:
    """Cut the columns of a matrix into ranges small enough to work on without a copy of the whole."""
    # A GPU needs more work at a time; its chunks are of 8 million elements.
    elements = _CHUNK_ELEMENTS << (0 if device is None or device.type == "cpu" else 5)
    return column_ranges(columns, max(1, elements // max(rows, 1)))


# Kernels at the speed of memory -------------------------------------------------------------------------
#
# NumPy's calls run on one thread each and let others run meanwhile, so threads over ranges of columns use all
# cores; what a range gives does not depend on who computes it, and results are added in the order of ranges.

# Below this size (16 MB) rules work in float64 throughout: there they cost nothing that is felt.
LARGE_ELEMENTS = 1 << 22

TILE_ROWS = 128
_RUN = 512
_ROWS_AT_ONCE = 16  # times a run, this is too little for BLAS to start threads of its own
_LEAST_SQUARES = 1e-20
_AHEAD = 256


def plain_float32(*tensors: torch.Tensor) -> bool:
    """Tell whether all are float32 tensors that NumPy can see without a copy."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def large_float32(matrix: torch.Tensor, *others: torch.Tensor) -> bool:
    """Tell whether all are plain float32 and the matrix is so large that the speed of memory counts."""
    return matrix.numel() >= LARGE_ELEMENTS and plain_float32(matrix, *others)


def tiles(rows: int, columns: int) -> list[tuple[int, int]]:
    """Cut columns into ranges, 4 MB for up to ``TILE_ROWS`` rows, so that threads rarely wait for Python."""
    width = 4 * _CHUNK_ELEMENTS // max(min(rows, TILE_ROWS), 1)
    return column_ranges(columns, max(1, width - width % _RUN, min(width, _RUN)))


def spread(work: Callable[[P], T], pieces: Sequence[P]) -> Iterator[T]:
    """Yield ``work`` of each piece, in order, done by as many threads as torch uses.

    Numbers that are not finite come and go without NumPy's warnings; ``work`` has to expect them.
    """

    def quiet(piece: P) -> T:
        # Set here, since a thread does not take these settings over from the one that started it.
        with np.errstate(all="ignore"):
            return work(piece)

    threads = min(torch.get_num_threads(), len(pieces))
    if threads < 2:
        yield from map(quiet, pieces)
        return
    with ThreadPoolExecutor(threads) as pool:
        # Not all at once: what is not yet taken would pile up.
        for first in range(0, len(pieces), _AHEAD):
            yield from pool.map(quiet, pieces[first : first + _AHEAD])


def added(work: Callable[[P], NDArray[np.float64]], pieces: Sequence[P], *shape: int) -> NDArray[np.float64]:
    """Return the sum of what ``work`` gives for the pieces, added in their order."""
    total = np.zeros(shape)
    for part in spread(work, pieces):
        total += part
    return total


def run_squares(tile: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sums of squares (m,) of the rows of a tile (m, c); in float32 within runs of 512."""
    m, c = tile.shape
    whole = c - c % _RUN
    runs = tile[:, :whole].reshape(m, whole // _RUN, 1, _RUN)
    # One product of two vectors per run: BLAS keeps the speed of memory where einsum does not.
    sums = np.matmul(runs, runs.transpose(0, 1, 3, 2)).sum(axis=(1, 2, 3), dtype=np.float64)
    return sums if whole == c else sums + np.square(tile[:, whole:].astype(np.float64)).sum(axis=1)


def run_products(tile: NDArray[np.float32], vector: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the products (m,) of the rows of a tile (m, c) with a vector (c,), likewise."""
    m, c = tile.shape
    whole = c - c % _RUN
    runs = vector[:whole].reshape(whole // _RUN, 1, _RUN, 1)
    sums = np.empty(m)
    grouped = m - m % _ROWS_AT_ONCE
    for first, last, size in ((0, grouped, _ROWS_AT_ONCE), (grouped, m, m - grouped)):
        if first < last:
            shape = ((last - first) // size, size, whole // _RUN, _RUN)
            rows = tile[first:last, :whole].reshape(shape).transpose(2, 0, 1, 3)
            sums[first:last] = np.matmul(rows, runs).sum(axis=0, dtype=np.float64).ravel()
    if whole == c:
        return sums
    return sums + tile[:, whole:].astype(np.float64) @ vector[whole:].astype(np.float64)


def out_of_range(squares: torch.Tensor) -> list[int]:
    """Return the rows whose sums of squares may have overflowed or vanished in float32."""
    return torch.nonzero(~(torch.isfinite(squares) & (squares > _LEAST_SQUARES))).flatten().tolist()


def column_ranges(columns: int, width: int) -> list[tuple[int, int]]:
    """Cut columns into ranges of ``width``, the last as wide as is left."""
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]


def _as_rows(models: Sequence[FlatArrays]) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    block = models[0].block
    if block is not None and all(m.block is block for m in models):
        rows = [m.row for m in models]
        first, count = rows[0], len(rows)
        if rows == list(range(first, first + count)):
            return block.matrix[first : first + count], block.side[first : first + count]
    return np.stack([m.vector for m in models]), np.stack([m.side for m in models])


def _writable(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    # torch warns about read-only memory; the reference is only ever read.
    return vector if vector.flags.writeable else vector.copy()
