"""What clients know who trained only a part of the model: means, distances and cosines over what they share.

A rule that is given ``covered`` looks at the elements that a client trained and at no others. A mean is
taken, per element, over those who cover it; an element that nobody with a share covers keeps its old value
bit for bit. Two clients are compared on what both cover, and a sum of squares over N of d elements counts d/N
times, so that a small sub-model is neither nearer to the others nor shorter than they are. Everything works
through the columns in chunks: besides its input it holds a few megabytes and the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import ClientUpdates, added, column_chunks, spread

Floats = NDArray[np.float64]
Block = tuple[Floats, Floats]

_ALL = slice(None)
_TINY = 1e-300


@dataclass(frozen=True)
class Covered:
    """Which elements of a matrix (n, d) count: ``mask`` (n, d) bool; ``origin`` (d,) is kept elsewhere.

    Without ``origin`` zero is kept, as is right for updates.
    """

    mask: torch.Tensor
    origin: torch.Tensor | None = None

    @classmethod
    def by(cls, updates: ClientUpdates) -> Covered | None:
        """Return what the clients' models cover; None if all of them cover everything."""
        return None if updates.partial is None else cls(updates.partial, updates.reference)

    @classmethod
    def deltas(cls, updates: ClientUpdates) -> Covered | None:
        """Return the same for their updates, which are zero elsewhere."""
        return None if updates.partial is None else cls(updates.partial)

    @property
    def dim(self) -> int:
        """The number of elements d."""
        return self.mask.shape[1]

    @cached_property
    def sizes(self) -> torch.Tensor:
        """How many elements each client covers, (n,) float64."""
        return self.mask.sum(dim=1).double()

    @cached_property
    def stretch(self) -> torch.Tensor:
        """By how much a sum of squares is multiplied, (n,) float64: d/N, and 1 for who covers nothing."""
        return torch.where(self.sizes > 0, self.dim / self.sizes.clamp(min=1), 1.0)

    def block(
        self, matrix: torch.Tensor, start: int, stop: int, rows: slice | NDArray[np.int64] = _ALL
    ) -> Block:
        """Return columns of matrix − origin, zero where not covered, and of the mask, as new arrays."""
        mask = self.mask.numpy()[rows, start:stop].astype(np.float64)
        values = matrix.numpy()[rows, start:stop].astype(np.float64)
        if self.origin is not None:
            values -= self.origin[start:stop].numpy()
        values *= mask
        return values, mask

    def kept(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return what elements start..stop keep if nobody covers them, a new array."""
        if self.origin is None:
            return np.zeros(stop - start, np.float32)
        kept: NDArray[np.float32] = self.origin[start:stop].numpy().copy()
        return kept


# Sums over the clients ---------------------------------------------------------------------------------


def covered_mean(matrix: torch.Tensor, weights: torch.Tensor, covered: Covered) -> torch.Tensor:
    """Return Σ wᵢ xᵢ / Σ wᵢ (d,) float32, per element over those who cover it; what is kept if they weigh 0.

    >>> mask = torch.tensor([[True, False, False], [True, True, False]])
    >>> two = Covered(mask, torch.tensor([7.0, 7.0, 7.0]))
    >>> covered_mean(torch.tensor([[1.0, 7.0, 7.0], [5.0, 6.0, 7.0]]), torch.tensor([3.0, 1.0]), two)
    tensor([2., 6., 7.])
    """
    plain = Covered(covered.mask)

    def mean(start: int, stop: int, rows: slice | NDArray[np.int64], w: Floats, _: Floats) -> Floats:
        x, mask = plain.block(matrix, start, stop, rows)
        total = w @ mask
        return np.divide(w @ x, total, out=covered.kept(start, stop).astype(np.float64), where=total > 0)

    return _chunked(mean, weights, weights, covered)


def covered_step(
    matrix: torch.Tensor, factors: torch.Tensor, weights: torch.Tensor, covered: Covered
) -> torch.Tensor:
    """Return origin + Σ fᵢ (xᵢ − origin) / Σ wᵢ (d,) float32, per element over those who cover it."""

    def step(start: int, stop: int, rows: slice | NDArray[np.int64], w: Floats, f: Floats) -> Floats:
        x, mask = covered.block(matrix, start, stop, rows)
        total = w @ mask
        change = np.divide(f @ x, total, out=np.zeros_like(total), where=total > 0)
        kept = covered.kept(start, stop)
        # Not even the sign of a zero changes where nothing moves.
        return np.where(change == 0, kept, kept + change)

    return _chunked(step, weights, factors, covered)


def _chunked(
    work: Callable[[int, int, slice | NDArray[np.int64], Floats, Floats], Floats],
    weights: torch.Tensor,
    factors: torch.Tensor,
    covered: Covered,
) -> torch.Tensor:
    """Put together what ``work`` gives for ranges of columns; those without weight are not even read."""
    w, f = weights.double().numpy(), factors.double().numpy()
    used = np.flatnonzero(w)
    rows: slice | NDArray[np.int64] = _ALL if len(used) == len(w) else used
    out = np.empty(covered.dim, np.float32)

    def piece(bounds: tuple[int, int]) -> None:
        out[slice(*bounds)] = work(*bounds, rows, w[rows], f[rows])

    for _ in spread(piece, column_chunks(max(len(used), 1), covered.dim)):
        pass
    return torch.from_numpy(out)


def moved(reference: torch.Tensor, step: torch.Tensor, covered: Covered | None) -> torch.Tensor:
    """Return reference + step; with ``covered`` bit for bit the reference where the step is zero."""
    if covered is None:
        return reference + step
    return torch.where(step == 0, reference, reference + step)


# Lengths, distances and cosines ------------------------------------------------------------------------


def covered_distances(matrix: torch.Tensor, point: torch.Tensor | None, covered: Covered) -> torch.Tensor:
    """Return ‖xᵢ − point‖ (n,) float64 over what client i covers, not stretched; from 0 without a point.

    >>> one = Covered(torch.tensor([[True, True, False, False]]))
    >>> (covered_distances(torch.ones(1, 4), None, one) * one.stretch.sqrt()).float()
    tensor([2.])
    """
    n, d = matrix.shape
    plain = Covered(covered.mask, point)

    def piece(bounds: tuple[int, int]) -> Floats:
        x, _ = plain.block(matrix, *bounds)
        return np.einsum("ij,ij->i", x, x)

    return torch.from_numpy(added(piece, column_chunks(n, d), n)).sqrt_()


def covered_cosines(matrix: torch.Tensor, point: torch.Tensor, covered: Covered) -> torch.Tensor:
    """Return the cosine (n,) of each row (n, d) with ``point`` (d,) over what it covers; 0 for zeros.

    >>> half = Covered(torch.tensor([[True, False]]))
    >>> covered_cosines(torch.tensor([[2.0, 0.0]]), torch.tensor([3.0, 9.0]), half).tolist()
    [1.0]
    """
    n, d = matrix.shape
    plain = Covered(covered.mask)

    def piece(bounds: tuple[int, int]) -> Floats:
        x, mask = plain.block(matrix, *bounds)
        part = point[bounds[0] : bounds[1]].numpy().astype(np.float64)
        return np.stack([x @ part, np.einsum("ij,ij->i", x, x), mask @ np.square(part)])

    return _cosines(*added(piece, column_chunks(n, d), 3, n))


def _cosines(products: Floats, squares: Floats, others: Floats) -> torch.Tensor:
    norms = np.sqrt(squares) * np.sqrt(others)
    cosines = np.divide(products, np.maximum(norms, _TINY), out=np.zeros_like(norms), where=norms > 0)
    return torch.from_numpy(np.clip(cosines, -1, 1))


@dataclass(frozen=True)
class Peers:
    """Everybody's cosine with a point over what they share with each client, and whether they share anything.

    Row i of ``cosines`` and of ``known`` (n, n) is about what client i covers: a client can be told from the
    others there without the size of its sub-model telling it from them.
    """

    cosines: torch.Tensor
    known: torch.Tensor

    def usual(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean, median and median absolute deviation (n,) of each row, over those it knows."""
        values = torch.where(self.known, self.cosines, torch.nan)
        middle = values.nanquantile(0.5, dim=1)
        deviation = (values - middle[:, None]).abs().nanquantile(0.5, dim=1)
        return values.nanmean(dim=1), middle, deviation


def peer_cosines(matrix: torch.Tensor, point: torch.Tensor, covered: Covered) -> Peers:
    """Compare every client with the others over its own elements; O(n·d) per sub-model that differs."""
    n, d = matrix.shape
    plain = Covered(covered.mask)
    firsts, of = _distinct(covered.mask)

    def piece(bounds: tuple[int, int]) -> Floats:
        x, mask = plain.block(matrix, *bounds)
        part = point[bounds[0] : bounds[1]].numpy().astype(np.float64)
        regions = mask[firsts]
        return np.stack(
            [(regions * part) @ x.T, regions @ np.square(x).T, (regions * np.square(part)) @ mask.T,
             regions @ mask.T]
        )  # fmt: skip

    products, squares, others, overlap = added(piece, column_chunks(n, d), 4, len(firsts), n)
    known = torch.from_numpy(overlap > 0)[of]
    known |= torch.eye(n, dtype=torch.bool)
    return Peers(_cosines(products, squares, others)[of], known)


def _distinct(mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the first row of every distinct one, and for each row which of these it equals."""
    places: dict[bytes, int] = {}
    firsts: list[int] = []
    of: list[int] = []
    for row in range(len(mask)):
        key = np.packbits(mask[row].numpy()).tobytes()
        if key not in places:
            places[key] = len(firsts)
            firsts.append(row)
        of.append(places[key])
    return firsts, of


@dataclass(frozen=True)
class Pairs:
    """Sums over what two clients both cover, all (n, n) float64, of d elements.

    ``products`` are ⟨xᵢ, xⱼ⟩, ``squares`` ‖xᵢ‖² where j covers too, ``overlap`` the number of elements.
    """

    products: Floats
    squares: Floats
    overlap: Floats
    dim: int

    def squared_distances(self) -> torch.Tensor:
        """Return ‖xᵢ − xⱼ‖²·d/N over the N elements of the overlap; a pair without any is at the median.

        So nobody is near to others, or far from them, for having nothing in common with them.
        """
        squared = np.maximum(self.squares + self.squares.T - 2 * self.products, 0)
        known = self.overlap > 0
        squared *= np.divide(self.dim, self.overlap, out=np.zeros_like(squared), where=known)
        pairs = ~np.eye(len(squared), dtype=bool)
        if not known[pairs].all():
            squared[~known] = np.median(squared[known & pairs]) if (known & pairs).any() else 0.0
        np.fill_diagonal(squared, 0)
        return torch.from_numpy(squared)

    def cosines(self) -> torch.Tensor:
        """Return the cosines over the overlaps; 0 where there is none, 1 on the diagonal."""
        return _cosines(self.products, self.squares, self.squares.T).fill_diagonal_(1)

    def gram(self) -> Floats:
        """Return products of vectors with these cosines, and each client's own length stretched to d."""
        own, sizes = self.squares.diagonal(), self.overlap.diagonal()
        lengths = np.sqrt(own * np.where(sizes > 0, self.dim / np.maximum(sizes, 1), 1.0))
        gram: Floats = self.cosines().numpy() * lengths[:, None] * lengths[None, :]
        np.fill_diagonal(gram, np.square(lengths))
        return gram


def pair_sums(matrix: torch.Tensor, covered: Covered) -> Pairs:
    """Return the sums over all pairs of rows of (n, d), taken from the origin. O(n²·d)."""
    n, d = matrix.shape
    return pairs_of(n, d, lambda start, stop: covered.block(matrix, start, stop))


def pairs_of(n: int, d: int, block: Callable[[int, int], Block]) -> Pairs:
    """Return the same for values that ``block(start, stop)`` gives, zero where not covered, with the mask."""
    products, squares, overlap = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    with np.errstate(all="ignore"):
        for start, stop in column_chunks(-(-n // 2), d):
            x, mask = block(start, stop)
            products += x @ x.T
            overlap += mask @ mask.T
            squares += np.square(x, out=x) @ mask.T
    return Pairs(products, squares, overlap, d)
