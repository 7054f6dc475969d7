"""Rules that look for the clients who agree best: pure functions on the matrix (n, d) of a round's updates.

All but MoNNA need nothing but the distances between clients once those are known, so a search among many
subsets costs nothing that depends on d. With ``covered`` these are over what two clients share, stretched to
d (inferred); they need not fit into any space, so eigenvalues are then those of what the distances suggest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations, islice

import torch

from .base import Aggregate, InfeasibleError
from .coordinatewise import mean, median
from .coverage import Covered, covered_distances
from .distances import distances_to, squared_distances

# The search for the smallest diameter branches 1.47^f times at worst, which is 100,000 for f = 30.
MDA_MOST = 30
SMEA_MOST_SUBSETS = 20_000

_BATCH_ELEMENTS = 1 << 20


def check_majority(clients: int, f: int, rule: str) -> None:
    """Raise InfeasibleError, in the name of ``rule``, unless 0 ≤ 2f < n."""
    if f < 0 or 2 * f >= clients:
        raise InfeasibleError(f"{rule}: 2f = {2 * f} must be less than n = {clients}")


def check_mda(clients: int, f: int) -> None:
    """Raise InfeasibleError unless 0 ≤ 2f < n and f ≤ 30."""
    check_majority(clients, f, "MDA")
    if f > MDA_MOST:
        raise InfeasibleError(
            f"MDA: f = {f} must be at most {MDA_MOST}, since its exact search takes up to 1.47^f steps"
        )


def most_mda(clients: int) -> int:
    """Return the largest f that MDA allows."""
    return min((clients - 1) // 2, MDA_MOST)


def check_smea(clients: int, f: int) -> None:
    """Raise InfeasibleError unless 0 ≤ 2f < n and C(n, f) ≤ 20,000."""
    check_majority(clients, f, "SMEA")
    subsets = math.comb(clients, f)
    if subsets > SMEA_MOST_SUBSETS:
        raise InfeasibleError(
            f"SMEA: C(n, f) = C({clients}, {f}) = {subsets:,} subsets must be at most {SMEA_MOST_SUBSETS:,}"
        )


def most_smea(clients: int) -> int:
    """Return the largest f that SMEA allows.

    >>> most_smea(10), most_smea(20), most_smea(40)
    (4, 5, 3)
    """
    f = -1
    # C(n, f) rises up to f = n/2, so the first that is too large ends the search.
    while 2 * (f + 1) < clients and math.comb(clients, f + 1) <= SMEA_MOST_SUBSETS:
        f += 1
    return f


def minimum_diameter(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Return the plain mean of the n − f updates whose largest distance between two is smallest.

    Of several such subsets the one whose second largest distance is smallest is taken, and so on (inferred;
    the paper takes any), so that the order of clients does not matter. Exact: n − f clients lie within a
    diameter if f clients cover all pairs that are farther apart. ``diagnostics`` has the diameter. Raises
    InfeasibleError unless 2f < n and f ≤ 30. O(n²·d), and O(1.47^f) for the search at worst. El Mhamdi et
    al., PODC 2020, after Rousseeuw, 1985.

    >>> minimum_diameter(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), 1).vector
    tensor([1.])
    """
    n = len(matrix)
    check_mda(n, f)
    squared = squared_distances(matrix, covered).nan_to_num(nan=float("inf"))
    rows = list(_members(_tightest(squared.tolist(), f)))
    diameter = float(squared[rows][:, rows].max().sqrt())
    return _mean_of(matrix, rows, {"diameter": diameter}, covered)


def monna(
    matrix: torch.Tensor, f: int, pivot: int | None = None, covered: Covered | None = None
) -> Aggregate:
    """Return the plain mean of the n − f updates nearest to a trusted one, that one among them.

    ``pivot`` is the row that is trusted. The paper is about servers that trust themselves; where nobody is
    trusted, None stands for the coordinate-wise median (inferred). Of equally near clients the first are
    taken. Raises InfeasibleError unless 2f < n, IndexError if there is no such row. O(n·d), with the median
    O(n log n · d). Farhadkhani et al., ICML 2023.

    >>> monna(torch.tensor([[0.0], [1.0], [5.0]]), 1, pivot=2).vector
    tensor([3.])
    """
    n = len(matrix)
    check_majority(n, f, "MoNNA")
    trusted = median(matrix, covered).vector if pivot is None else matrix[range(n)[pivot]]
    if covered is None:
        distances = distances_to(matrix, trusted)
    else:
        shared = covered if pivot is None else Covered(covered.mask & covered.mask[pivot])
        distances = covered_distances(matrix, trusted, shared) * shared.stretch.sqrt()
        if pivot is not None and bool((known := shared.sizes > 0).any()):
            distances[~known] = distances[known].quantile(0.5)  # nothing is known: neither near nor far
    if pivot is not None:
        distances[pivot] = -1  # before others at the same place
    rows = torch.sort(distances, stable=True).indices[: n - f].tolist()
    return _mean_of(matrix, rows, covered=covered)


def smallest_eigenvalue(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Return the plain mean of the n − f updates whose covariance has the smallest top eigenvalue.

    Exact, by trying all subsets; of equal ones the first is taken. ``diagnostics`` has the eigenvalue. Raises
    InfeasibleError unless 2f < n and C(n, f) ≤ 20,000. O(n²·d) and O((n − f)³) a subset. Allouah et al.,
    ICML 2023 (SMEA).

    >>> smallest_eigenvalue(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), 1).vector
    tensor([1.])
    """
    n = len(matrix)
    check_smea(n, f)
    squared = squared_distances(matrix, covered)
    best, chosen = float("inf"), tuple(range(n - f))
    everything = combinations(range(n), n - f)
    while subsets := list(islice(everything, max(1, _BATCH_ELEMENTS // (n - f) ** 2))):
        top = _top_eigenvalues(squared, torch.tensor(subsets))
        first = int(top.argmin())
        if float(top[first]) < best:
            best, chosen = float(top[first]), subsets[first]
    return _mean_of(matrix, chosen, {"eigenvalue": best}, covered)


def covariance_filter(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Return the mean under those weights, of a sequence, whose covariance has the smallest top eigenvalue.

    Weights cᵢ start at 1; cᵢ ← cᵢ·(1 − τᵢ / max τ) as long as they add up to more than n − 2f, where τᵢ is
    the squared distance of client i from the weighted mean along the top eigenvector. Inferred: the maximum
    is over clients that still have weight, so that each step ends one of them at least; and equal weights
    are always a candidate. No bound on the covariance is needed. ``diagnostics`` has the eigenvalue and the
    number of steps. Raises InfeasibleError unless 2f < n. O(n²·d), and O(n³) a step, n steps at most. Allouah
    et al., ICML 2025 (CAF).

    >>> covariance_filter(torch.tensor([[0.0], [1.0], [2.0], [9.0]]), 1).vector
    tensor([1.0851])
    """
    n = len(matrix)
    check_majority(n, f, "CAF")
    squared = squared_distances(matrix, covered)
    finite = squared.isfinite()
    # Whoever is infinitely far from most has no weight to begin with.
    c = (2 * finite.sum(dim=1) > n).double()
    squared = torch.where(finite, squared, 0.0)
    best, weights, steps = float("inf"), torch.ones(n, dtype=torch.float64), 0
    while True:
        eigenvalue, tau = _along_top(squared, c / c.sum())
        steps += 1
        if eigenvalue < best:
            best, weights = eigenvalue, c
        highest = float(tau[c > 0].max())
        if not highest > 0:
            break  # nobody differs
        c = torch.where(c > 0, c * (1 - tau / highest).clamp(min=0), 0.0)
        if not float(c.sum()) > n - 2 * f:
            break
    result = mean(matrix, weights, covered)
    diagnostics = {"eigenvalue": best, "steps": float(steps)}
    return Aggregate(result.vector, result.weights, result.accepted, diagnostics=diagnostics)


def _mean_of(
    matrix: torch.Tensor,
    rows: Iterable[int],
    diagnostics: dict[str, float] | None = None,
    covered: Covered | None = None,
) -> Aggregate:
    weights = torch.zeros(len(matrix), dtype=torch.float64)
    weights[list(rows)] = 1
    result = mean(matrix, weights, covered)
    return Aggregate(result.vector, result.weights, result.accepted, diagnostics=diagnostics or {})


def _along_top(squared: torch.Tensor, p: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the top eigenvalue of the covariance under shares ``p``, and all squared distances along it."""
    # Inner products about the weighted mean, from distances alone.
    to_mean = squared @ p
    inner = (to_mean[:, None] + to_mean[None, :] - squared - p @ to_mean) / 2
    root = p.sqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * inner * root[None, :])
    top = float(values[-1])
    if not top > 0:
        return 0.0, torch.zeros_like(p)
    return top, (inner @ (root * vectors[:, -1])).square() / top


def _top_eigenvalues(squared: torch.Tensor, subsets: torch.Tensor) -> torch.Tensor:
    """Return the top eigenvalue of the covariance of each subset (b, m); infinite where a distance is."""
    among = squared[subsets[:, :, None], subsets[:, None, :]]
    wild = ~among.isfinite().flatten(1).all(dim=1)
    among[wild] = 0
    # Double centring turns squared distances into inner products about the mean of the subset.
    rows = among.mean(dim=2, keepdim=True)
    inner = (rows + rows.transpose(1, 2) - among - rows.mean(dim=1, keepdim=True)) / 2
    top = torch.linalg.eigvalsh(inner)[:, -1].clamp(min=0) / subsets.shape[1]
    return torch.where(wild, float("inf"), top)


# The smallest diameter: sets of clients are the bits of an int -----------------------------------------


def _tightest(squared: list[list[float]], f: int) -> int:
    """Return the n − f clients whose distances, from the largest down, are smallest in lexical order."""
    n = len(squared)
    # Of equal distances, those between later clients are given up first.
    pairs = sorted(((squared[i][j], i, j) for i in range(n) for j in range(i)), reverse=True)
    kept, fixed = (1 << n) - 1, 0
    low, high = 0, len(pairs)
    while low < high:  # the most of the longest distances that can be avoided together
        middle = (low + high + 1) // 2
        found = _kept(_graph(n, pairs[:middle]), 0, f)
        if found is None:
            high = middle - 1
        else:
            low, kept = middle, found
    apart = _graph(n, pairs[:low])
    for _, i, j in pairs[low:]:
        both = 1 << i | 1 << j
        if fixed & both == both:
            continue
        apart[i] |= 1 << j
        apart[j] |= 1 << i
        if kept & both != both:
            continue
        found = _kept(apart, fixed, f)
        if found is None:  # this distance cannot be avoided any more: both stay
            apart[i] ^= 1 << j
            apart[j] ^= 1 << i
            fixed |= both
        else:
            kept = found
    return kept


def _graph(n: int, pairs: list[tuple[float, int, int]]) -> list[int]:
    apart = [0] * n
    for _, i, j in pairs:
        apart[i] |= 1 << j
        apart[j] |= 1 << i
    return apart


def _kept(apart: list[int], fixed: int, budget: int) -> int | None:
    """Return who is left after at most ``budget`` removals that part all pairs in ``apart``, or None.

    Those in ``fixed`` are not removed.
    """
    alive = (1 << len(apart)) - 1
    for v in _members(fixed):
        out = apart[v] & alive
        if out & fixed:
            return None
        alive ^= out
        budget -= out.bit_count()
    return _covered(apart, alive, budget)


def _covered(apart: list[int], alive: int, budget: int) -> int | None:
    while budget >= 0:
        degrees = [(apart[v] & alive).bit_count() if alive >> v & 1 else 0 for v in range(len(apart))]
        most = max(degrees)
        if most == 0:
            return alive
        if sum(degrees) > 2 * budget * most:
            return None
        if 1 in degrees:  # removing the only neighbour is never worse
            out = apart[degrees.index(1)] & alive
        elif most == 2:  # only rings are left: any of their members will do
            out = 1 << _last(degrees, 2)
        elif most > budget:  # too many neighbours to remove
            out = 1 << _last(degrees, most)
        else:
            v = _last(degrees, most)
            without = _covered(apart, alive ^ 1 << v, budget - 1)
            if without is not None:
                return without
            out = apart[v] & alive
        alive ^= out
        budget -= out.bit_count()
    return None


def _last(values: list[int], value: int) -> int:
    return len(values) - 1 - values[::-1].index(value)


def _members(group: int) -> Iterator[int]:
    while group:
        lowest = group & -group
        yield lowest.bit_length() - 1
        group ^= lowest
