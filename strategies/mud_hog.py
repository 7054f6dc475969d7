"""MUD-HoG: short and long histories of updates tell malicious, targeted and unreliable clients apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedplat.updates import ClientUpdates
from fedplat.verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED

from .aggregators import Aggregate, Aggregator, mean, median
from .aggregators import hog_detection as detect
from .aggregators import hog_standing as hog
from .aggregators.coverage import Covered
from .aggregators.history import Histories, HistoryDtype
from .composed import FederatedStrategy
from .parts import StrategyParts

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Mode = Literal["intended", "reference"]

_DELAYS = hog.Delays()
_RELEASED_EPS = 0.5
_ROUNDING = 1e-6
_NOISE_SPREADS = 5.0  # a noise suspect is that many deviations from the median, besides noise_distance
_MEMBER = 2 / 3  # share of the separation asked of the group that each new suspect must show itself
_KEEP = 0.8  # share of the separation at which those convicted stay so
_GAP_SPREADS, _LEAST_GAP = 1.25, 0.1  # the gap in cosines below which nobody is unreliable


@dataclass(frozen=True)
class HogSettings:
    """The rule's parameters; :class:`MudHog` explains them."""

    mode: Mode = "intended"
    window: int = 3
    warmup: int = 3
    delays: hog.Delays = _DELAYS
    eps: float | None = None
    min_samples: int = 5
    noise_distance: float = 2.5
    separation: float = 0.22
    unreliable_weight: float = 0.5
    history_dtype: HistoryDtype = "float32"


@dataclass(frozen=True)
class _Found:
    """What a round's detectors say of n clients: suspects and judged (n, 3) by kind, poor (n,), figures."""

    suspects: Mask
    poor: Mask
    figures: dict[str, float]


class MudHogRule(Aggregator):
    """Keeps histories and standings by node id; judges, and averages those who are left."""

    def __init__(self, settings: HogSettings) -> None:
        self.settings = settings
        self.released = settings.mode == "reference"
        self.histories = Histories(settings.window, settings.history_dtype, frozen=self.released)
        self.standing = hog.Standing.clean(0)
        self.rounds = 0

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Take the updates into the histories, judge their clients, and average those not left out."""
        slots = self.histories.record(updates).numpy()
        self.standing = self.standing.enlarged(len(self.histories.nodes))
        self.rounds += 1
        n = len(slots)
        found = _Found(np.zeros((n, 3), bool), np.zeros(n, bool), {})
        if self.rounds > self.settings.warmup:
            # In the order of node ids, so that the clusters do not depend on the order of the rows.
            order = np.argsort(updates.node_ids)
            inverse = np.argsort(order)
            now = self.standing.rows(slots[order])
            found = self._detect(slots[order], now)
            self.standing.put(slots[order], now)
            found = _Found(found.suspects[inverse], found.poor[inverse], found.figures)
        return self._combine(updates, self.standing.rows(slots), found)

    # The four stages ---------------------------------------------------------------------------------------

    def _detect(self, slots: NDArray[np.int64], now: hog.Standing) -> _Found:
        """Run all detectors on the clients of these slots and bring ``now``, their standing, up to date."""
        short = self.histories.short(torch.from_numpy(slots))
        covered = self.histories.short_covered(torch.from_numpy(slots))
        n = len(slots)
        free = ~now.malicious if not now.malicious.all() else np.ones(n, bool)
        flipped = detect.alike(short, detect.centre(short, free, covered), covered) < 0
        aiming = now.confirmed[:, hog.TARGETED]
        if not self.released:
            # Once left out, targeted attackers drift away and may come to point backwards.
            flipped &= ~aiming
        rest = ~flipped & ~now.confirmed[:, hog.SIGN_FLIP]
        if not self.released:
            # Their updates grow too; then they would hide the noisy ones.
            rest &= (now.suspicion[:, hog.TARGETED] == 0) & ~aiming
        noisy, noise_judged, eps = self._noisy(short, covered, rest, now)
        noise = now.confirmed[:, hog.ADDITIVE_NOISE]
        learners = ~flipped & ~now.confirmed[:, hog.SIGN_FLIP] & ~noisy & ~noise
        targeted, separation = self._targeted(slots, learners, now)
        suspects = np.stack([flipped, noisy, targeted], axis=1)
        if self.released:
            hog.convict_as_released(now, suspects, self.settings.delays)
        else:
            judged = np.stack([~aiming, noise_judged, learners], axis=1)
            hog.convict(now, suspects, judged, self.settings.delays)
        poor = self._poor(short, covered, rest & ~now.malicious, suspects, now)
        return _Found(suspects, poor, {"eps": eps, "separation": separation})

    def _noisy(
        self, short: torch.Tensor, covered: Covered | None, rest: Mask, now: hog.Standing
    ) -> tuple[Mask, Mask, float]:
        """Return who adds noise, who could be judged, and the radius used."""
        settings, nobody = self.settings, np.zeros(len(rest), bool)
        rows = np.flatnonzero(rest)
        between, lengths = detect.between_and_norms(short, rows, covered)
        eps = settings.eps
        if eps is None:
            natural = detect.natural_eps(between, settings.min_samples)
            eps = _RELEASED_EPS if self.released else natural
        labels = detect.clusters(between, eps, settings.min_samples)
        normal, lonely = nobody.copy(), nobody.copy()
        normal[rows] = detect.normal_cluster(labels, noise_too=self.released)
        lonely[rows] = labels == -1
        if not normal.any():
            return nobody, nobody, eps
        middle = detect.centre(short, normal, covered)
        if self.released:
            away = detect.away_from(short, middle, covered)
            return lonely & (away > detect.gap_midpoint(away[rest & ~normal])), rest, eps
        norms = np.zeros(len(rest))
        norms[rows] = lengths
        off = detect.aside(norms, detect.alike(short, middle, covered))
        usual, deviation = detect.spread(off[normal])
        # Clients that differ by rounding alone are not noisy.
        least = _ROUNDING * float(np.median(norms[normal]))
        limit = max(settings.noise_distance * usual, usual + _NOISE_SPREADS * deviation, least)
        # Those convicted must come back half of the way before a round of theirs is clean.
        still = rest & now.confirmed[:, hog.ADDITIVE_NOISE] & (off > (usual + limit) / 2)
        return lonely & (off > limit) | still, rest, eps

    def _targeted(self, slots: NDArray[np.int64], among: Mask, now: hog.Standing) -> tuple[Mask, float]:
        """Return who follows an aim of their own, and how far apart they stand."""
        suspects = np.zeros(len(among), bool)
        rows = np.flatnonzero(among)
        gram = self.histories.long_products(torch.from_numpy(slots[rows]))
        if self.released:
            suspects[rows] = detect.minority(detect.two_groups(gram), len(rows), even=True)
            return suspects, float("nan")
        convicted = now.confirmed[rows, hog.TARGETED]
        left = np.arange(len(rows))
        clearest = 0.0
        # A group far off hides a nearer one: look at the rest again while they are more than half.
        while 2 * len(left) > len(rows):
            group, shown = detect.apart(gram[np.ix_(left, left)])
            how_far = float(shown[group].mean()) if group.any() else 0.0
            clearest = max(clearest, how_far)
            new = (
                group & (shown >= _MEMBER * self.settings.separation) & (how_far >= self.settings.separation)
            )
            still = group & convicted[left] & (how_far >= _KEEP * self.settings.separation)
            if not (new | still).any():
                break
            suspects[rows[left[new | still]]] = True
            left = left[~group]
        return suspects, clearest

    def _poor(
        self,
        short: torch.Tensor,
        covered: Covered | None,
        among: Mask,
        suspects: Mask,
        now: hog.Standing,
    ) -> Mask:
        """Return whose updates point away from the others', and count that."""
        poor = np.zeros(len(among), bool)
        delay = self.settings.delays.unreliable
        if not self.released:
            among = among & ~suspects.any(axis=1)
        if among.any():
            alike = detect.alike(short, detect.centre(short, among, covered), covered)
            if self.released:
                poor = among & (alike < detect.gap_midpoint(alike[among]))
            else:
                usual, deviation = detect.spread(alike[among])
                poor[among] = detect.low_outliers(alike[among], max(_GAP_SPREADS * deviation, _LEAST_GAP))
                poor |= among & now.unreliable & (alike < usual - deviation)
        if self.released:
            hog.note_quality_as_released(now, poor, delay)
        else:
            hog.note_quality(now, poor, among, delay)
        return poor

    # The outcome -------------------------------------------------------------------------------------------

    def _combine(self, updates: ClientUpdates, standing: hog.Standing, found: _Found) -> Aggregate:
        """Average those not left out; if nobody is left, take the coordinate-wise median of all."""
        # The released code leaves out suspects of noise and aims at once, but those of turned signs later.
        at_once = found.suspects[:, 1:] if self.released else found.suspects
        left_out = standing.malicious | at_once.any(axis=1)
        psi = 1.0 if self.released else self.settings.unreliable_weight
        weights = torch.from_numpy(np.where(left_out, 0.0, np.where(standing.unreliable, psi, 1.0)))
        covered = Covered.by(updates)
        if bool(weights.sum() > 0):
            result = mean(updates.params, weights, covered)
        else:
            result = median(updates.params, covered)
        blamed = (found.suspects & left_out[:, None]) | standing.confirmed
        diagnostics = {"left_out": float(left_out.sum())}
        for kind, name in enumerate(hog.KINDS):
            diagnostics[f"{name}_suspects"] = float(found.suspects[:, kind].sum())
            diagnostics[f"{name}_confirmed"] = float(standing.confirmed[:, kind].sum())
        diagnostics["unreliable_suspects"] = float(found.poor.sum())
        diagnostics["unreliable_confirmed"] = float(standing.unreliable.sum())
        return Aggregate(
            result.vector,
            result.weights,
            result.accepted,
            verdicts=_verdicts(blamed, left_out, standing.unreliable),
            diagnostics={**diagnostics, **{k: v for k, v in found.figures.items() if np.isfinite(v)}},
            scores={"suspicion": torch.from_numpy(standing.suspicion.max(axis=1)).double()},
        )

    # State -------------------------------------------------------------------------------------------------

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return the bytes of the histories; counters take a few dozen bytes per client besides."""
        return self.histories.state_bytes(clients, dim)

    def state_dict(self) -> dict[str, Any]:
        """Return histories, standings and the number of rounds."""
        return {
            "rounds": self.rounds,
            "histories": self.histories.state_dict(),
            "standing": self.standing.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.rounds = int(state["rounds"])
        self.histories.load_state_dict(state["histories"])
        self.standing = hog.Standing.of_state(state["standing"])


def _verdicts(blamed: Mask, left_out: Mask, unreliable: Mask) -> dict[int, str]:
    """Return a word for every client (n,), from what each is blamed for (n, 3)."""
    words = {}
    for row, kinds in enumerate(blamed.tolist()):
        if left_out[row] and any(kinds):
            words[row] = UNTARGETED if kinds[hog.SIGN_FLIP] or kinds[hog.ADDITIVE_NOISE] else TARGETED
        else:
            words[row] = UNRELIABLE if unreliable[row] else HONEST
    return words


Rounds = Annotated[int, Field(ge=1, description="suspicious rounds that confirm")]


class MudHog(FederatedStrategy):
    """The plain mean without those whose history of updates gives them away, and with less of the unreliable.

    A client's short history Sᵢ is the mean of its last ``window`` updates, its long one Lᵢ the sum of all.
    For ``warmup`` rounds everybody is averaged; from then on there are four tests in every round:

    1. sign flipping: cos(Sᵢ, median S) < 0;
    2. additive noise: DBSCAN on the S of the others; the largest cluster is the normal one, c its median;
       noisy are those in no cluster that are too far from c;
    3. targeted: 2-means on the L of the others; the smaller group;
    4. unreliable: those left whose cos(Sᵢ, median S) lies below a gap.

    Suspects of 1 to 3 are left out at once. ``untargeted_delay`` suspicious rounds in a row confirm 1 and 2,
    ``targeted_delay`` 3, and two clean ones in a row lift that; ``unreliable_delay`` rounds confirm 4. Then
    w ← w + (Σ_K Dᵢ + psi·Σ_U Dᵢ) / (|K| + psi·|U|) with the updates D, the unreliable U of those left, the
    rest K, and psi = ``unreliable_weight``. Sample counts play no part. If nobody is left, it is the
    coordinate-wise median of all. Among fewer than ``min_samples`` clients nobody is called noisy; absent
    clients keep history and standing.

    ``mode="reference"`` follows the released code, faults included: the short history stands still once the
    window is full, one counter serves all kinds, eps is 0.5 (1.3 was used for Fashion-MNIST), DBSCAN's noise
    can be the normal cluster, 2 and 4 cut at the largest gap whatever its size, the smaller group of 3 is
    always guilty, sign flippers are averaged until confirmed, psi = 1.

    ``intended`` is what the abstract and figure describe. Inferred, since the paper's text could not be had:
    a window that slides; a counter per kind; psi = 0.5; ``eps`` 1.5 times the median distance to the
    neighbours that ``min_samples`` asks for; noisy is whose distance from the ray along c is above
    ``noise_distance`` times the normal cluster's median, and above its median + 5 MAD, targeted suspects
    being kept out of 2; the group of 3 must stand apart, with a mean silhouette of at least ``separation`` in
    the angles between the L, for the better of 2-means on L and on L/‖L‖, and the rest is tested again; a gap
    in 4 must be at least 1.25 MAD and 0.1; limits are stricter for a confirmed client's round to count as
    clean. All limits were set on recorded updates for MNIST split by Dirichlet(0.9).

    It needs most of the clients left at 2 and at 3 to be honest. A single targeted attacker passes; honest
    groups that share classes of their own may look targeted: then raise ``separation``. Keeps n·d·(4 +
    window·b) bytes, b = 4, or 2 for half types. O(n²·d). Of sub-models histories are means over the rounds in
    which an element was trained, and clients are compared on what both cover, sums of squares over N of d
    elements counting d/N times (inferred). Gupta, Luo, Ngo, Das, ESORICS 2022.

        MudHog().start(grid, initial_arrays, num_rounds=40)
    """

    def __init__(
        self,
        *,
        mode: Mode = "intended",
        window: Annotated[int, Field(ge=1, description="updates in the short history")] = 3,
        warmup: Annotated[int, Field(ge=0, description="first rounds without detection")] = 3,
        untargeted_delay: Rounds = 2,
        targeted_delay: Rounds = 4,
        unreliable_delay: Rounds = 3,
        eps: Annotated[float, Field(gt=0, description="radius of DBSCAN; none: from the data")] | None = None,
        min_samples: Annotated[int, Field(ge=1, description="of DBSCAN, the point itself included")] = 5,
        noise_distance: Annotated[float, Field(gt=0, description="of noise, in normal distances")] = 2.5,
        separation: Annotated[float, Field(gt=0, le=1, description="silhouette of a targeted group")] = 0.22,
        unreliable_weight: Annotated[float, Field(ge=0, le=1, description="psi, if intended")] = 0.5,
        history_dtype: HistoryDtype = "float32",
        **parts: Unpack[StrategyParts],
    ) -> None:
        settings = HogSettings(
            mode,
            window,
            warmup,
            hog.Delays(untargeted_delay, targeted_delay, unreliable_delay),
            eps,
            min_samples,
            noise_distance,
            separation,
            unreliable_weight,
            history_dtype,
        )
        super().__init__(MudHogRule(settings), **parts)
