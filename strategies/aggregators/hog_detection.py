"""The detectors of MUD-HoG, as pure functions on histories and on the products between them.

Distances, clusters and separations of n clients follow from the n x n products of their vectors, so that the
(n, d) histories are read once: O(n²·d), the rest O(n³).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import column_chunks

from .coordinatewise import median
from .coverage import Covered, covered_cosines, covered_distances, pairs_of
from .credibility import cosines
from .distances import distances_to, scalar_products

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

_NORMAL_MAD = 1.4826  # the median absolute deviation of a normal law, times this, is its standard deviation
_SAME = 1e-6  # distance of unit vectors that float32 does not tell apart
_LEAST = 1e-12  # share of the largest eigenvalue below which a direction is rounding


def centre(matrix: torch.Tensor, members: Mask, covered: Covered | None = None) -> torch.Tensor:
    """Return the coordinate-wise median (d,) of the members (n,) of a matrix (n, d), without copying them.

    With ``covered``, of those who cover a coordinate; 0 if none of them does.
    """
    rows = torch.from_numpy(np.flatnonzero(members))
    n, d = matrix.shape
    if covered is not None:
        return torch.cat(
            [
                median(matrix[rows, a:b], Covered(covered.mask[rows, a:b])).vector
                for a, b in column_chunks(n, d)
            ]
        )
    return torch.cat([median(matrix[rows, a:b]).vector for a, b in column_chunks(n, d)])


def alike(matrix: torch.Tensor, point: torch.Tensor, covered: Covered | None = None) -> Floats:
    """Return the cosines (n,) of the rows of (n, d) with a point (d,), over what each covers."""
    found = cosines(matrix, point) if covered is None else covered_cosines(matrix, point, covered)
    values: Floats = found.numpy()
    return values


def away_from(matrix: torch.Tensor, point: torch.Tensor, covered: Covered | None = None) -> Floats:
    """Return the distances (n,) of rows (n, d) from a point (d,), over N of d elements times √(d/N)."""
    if covered is None:
        found = distances_to(matrix, point)
    else:
        found = covered_distances(matrix, point, covered) * covered.stretch.sqrt()
    values: Floats = found.numpy()
    return values


def between_and_norms(
    matrix: torch.Tensor, rows: NDArray[np.int64], covered: Covered | None = None
) -> tuple[Floats, Floats]:
    """Return distances (m, m) and norms (m,) of some rows of (n, d), over what is shared, stretched to d."""
    if covered is None:
        gram = scalar_products(matrix, torch.from_numpy(rows)).numpy()
        return distances(gram), np.sqrt(gram.diagonal())
    d, plain = matrix.shape[1], Covered(covered.mask)
    pairs = pairs_of(len(rows), d, lambda start, stop: plain.block(matrix, start, stop, rows))
    return pairs.squared_distances().sqrt().numpy(), np.sqrt(pairs.gram().diagonal())


def directions(gram: Floats) -> Floats:
    """Return the products (n, n) of the vectors scaled to length 1, from those of the vectors; zeros stay."""
    norms = np.sqrt(gram.diagonal())
    scale = np.divide(1, norms, out=np.zeros_like(norms), where=norms > 0)
    return gram * scale[:, None] * scale[None, :]


def distances(gram: Floats) -> Floats:
    """Return ‖xᵢ − xⱼ‖ (n, n) from the products ⟨xᵢ, xⱼ⟩ (n, n)."""
    squares = gram.diagonal()
    squared = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0)
    np.fill_diagonal(squared, 0)
    root: Floats = np.sqrt(squared)
    return root


def gap_midpoint(values: Floats) -> float:
    """Return the middle of the largest gap between sorted values (n,), the lowest such; 0 for n < 2.

    >>> gap_midpoint(np.array([1.0, 9.0, 2.0])), gap_midpoint(np.array([4.0]))
    (5.5, 0.0)
    """
    if len(values) < 2:
        return 0.0
    ordered = np.sort(values)
    at = int(np.diff(ordered).argmax())
    return float(ordered[at] + ordered[at + 1]) / 2


def low_outliers(values: Floats, floor: float) -> Mask:
    """Return who (n,) is below the highest gap of at least ``floor`` among the lower half of the values.

    The floor keeps a set without outliers whole, where the largest of its gaps would always split it; the
    highest of the wide gaps, not the widest, since outliers may lie apart from each other too.

    >>> low_outliers(np.array([0.9, 0.2, 0.85, 0.5, 0.88, 0.9]), 0.1).tolist()
    [False, True, False, True, False, False]
    """
    ordered = np.sort(values)
    wide = np.flatnonzero(np.diff(ordered)[: (len(values) - 1) // 2] >= floor)
    if not len(wide):
        return np.zeros(len(values), bool)
    below: Mask = values <= ordered[wide[-1]]
    return below


def spread(values: Floats) -> tuple[float, float]:
    """Return median and median absolute deviation of values (n,), the latter scaled to a standard deviation.

    >>> spread(np.array([1.0, 2.0, 3.0, 100.0]))
    (2.5, 1.4826)
    """
    middle = float(np.median(values))
    return middle, _NORMAL_MAD * float(np.median(np.abs(values - middle)))


def natural_eps(between: Floats, min_samples: int, factor: float = 1.5) -> float:
    """Return a radius for DBSCAN from the distances (n, n): ``factor`` times a typical neighbour's distance.

    That is the median, over the points, of the distance to the nearest others that ``min_samples`` needs. It
    scales with the data, and makes at least half of the points cores of a cluster. 0 for n < min_samples.

    >>> natural_eps(np.array([[0.0, 1, 4], [1, 0, 3], [4, 3, 0]]), 2)
    1.5
    """
    if len(between) < min_samples:
        return 0.0
    reach = np.sort(between, axis=1)[:, min_samples - 1]
    return factor * float(np.median(reach))


def clusters(between: Floats, eps: float, min_samples: int) -> NDArray[np.int64]:
    """Return DBSCAN's labels (n,) from distances (n, n); −1 is noise. A point counts among its neighbours.

    A radius of 0 joins points that are equal. Ester et al., KDD 1996.
    """
    from sklearn.cluster import DBSCAN

    if not len(between):
        return np.zeros(0, np.int64)
    # scikit-learn wants a positive radius.
    search = DBSCAN(eps=max(eps, math.ulp(0.0)), min_samples=min_samples, metric="precomputed")
    return np.asarray(search.fit_predict(between), np.int64)


def normal_cluster(labels: NDArray[np.int64], *, noise_too: bool) -> Mask:
    """Return the members (n,) of the most frequent label, the lowest on a tie; nobody if there is none.

    ``noise_too`` lets label −1 win as well, as in the released code: with a radius too small everybody is
    noise, and noise the normal.
    """
    names, counts = np.unique(labels if noise_too else labels[labels >= 0], return_counts=True)
    if not len(names):
        return np.zeros(len(labels), bool)
    members: Mask = labels == names[counts.argmax()]
    return members


def aside(norms: Floats, cosines: Floats) -> Floats:
    """Return the distance (n,) of vectors from the ray through a centre, given norms and cosines with it.

    Unlike the distance from the centre it does not grow for a client that moves farther the same way because
    it has more data.

    >>> aside(np.array([5.0, 2.0]), np.array([0.6, -1.0])).tolist()
    [4.0, 2.0]
    """
    off: Floats = norms * np.sqrt(1 - np.clip(cosines, 0, 1) ** 2)
    return off


def two_groups(gram: Floats) -> NDArray[np.int64] | None:
    """Return labels (n,) of 2-means on the vectors with products (n, n), or None if all vectors are equal.

    k-means depends on the distances alone, so it runs on coordinates of at most n dimensions that have the
    same ones: the eigenvectors of the centred products, scaled by the roots of the eigenvalues.
    """
    from sklearn.cluster import KMeans

    if len(gram) < 2:
        return None
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    kept = values > _LEAST * max(float(values[-1]), float(np.abs(gram).max()))
    if not kept.any():
        return None
    points = vectors[:, kept] * np.sqrt(values[kept])
    # A tolerance relative to the variance per column would depend on the number of columns.
    search = KMeans(n_clusters=2, n_init=10, random_state=0, tol=0)
    return np.asarray(search.fit_predict(points), np.int64)


def minority(labels: NDArray[np.int64] | None, clients: int, *, even: bool) -> Mask:
    """Return the members (n,) of the smaller of two groups, nobody for None.

    For groups of the same size it is label 1 if ``even``, as in the released code, otherwise nobody.
    """
    if labels is None:
        return np.zeros(clients, bool)
    ones = int(labels.sum())
    if 2 * ones == clients and not even:
        return np.zeros(clients, bool)
    members: Mask = labels == int(2 * ones <= clients)
    return members


def silhouettes(between: Floats, group: Mask) -> Floats:
    """Return each client's silhouette (n,) for a cut into a group and the others, from distances (n, n).

    It is (b − a) / max(a, b), with a the mean distance to the rest of one's own side and b to the other side:
    near 1 for sides far apart, near 0 for a cut through one cloud, and 0 for those alone on their side.
    Rousseeuw, 1987.

    >>> silhouettes(np.array([[0.0, 1, 4], [1, 0, 4], [4, 4, 0]]), np.array([True, True, False])).tolist()
    [0.75, 0.75, 0.0]
    """
    values = np.zeros(len(group))
    for side in (group, ~group):
        inside = int(side.sum())
        if 1 < inside < len(group):
            a = between[np.ix_(side, side)].sum(axis=1) / (inside - 1)
            b = between[np.ix_(side, ~side)].mean(axis=1)
            larger = np.maximum(a, b)
            values[side] = np.divide(b - a, larger, out=np.zeros_like(larger), where=larger > 0)
    return values


def apart(gram: Floats) -> tuple[Mask, Floats]:
    """Return the smaller of two groups of long histories with products (n, n), and its members' silhouettes.

    2-means on the histories is drawn to groups that differ in the amount of data, 2-means on their directions
    to groups that differ in classes; of the two cuts it is the one whose smaller group stands out more in the
    angles between histories. The others must be nearer to each other than to it: a dense middle, with the
    rest scattered around it, is no group apart. Both arrays are (n,), with 0 for the silhouettes of others;
    an even cut gives nobody.
    """
    unit = directions(gram)
    between = distances(unit)
    between[between < _SAME] = 0
    best, values, clearest = np.zeros(len(gram), bool), np.zeros(len(gram)), 0.0
    for view in (gram, unit):
        smaller = minority(two_groups(view), len(gram), even=False)
        shown = silhouettes(between, smaller)
        if not smaller.any() or shown[~smaller].mean() <= 0:
            continue
        if (how_far := float(shown[smaller].mean())) > clearest:
            best, values, clearest = smaller, np.where(smaller, shown, 0.0), how_far
    return best, values
