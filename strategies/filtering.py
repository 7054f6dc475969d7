"""Defences that leave clients out, or reduce them to a vote, as ready strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Unpack

from pydantic import Field

from fedplat.rng import generator
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator
from .aggregators.coverage import Covered, moved
from .aggregators.flame import flame
from .aggregators.signs import sign_vote, signguard
from .aggregators.spectral import check_dnc, dnc, removal_count
from .composed import FederatedStrategy
from .parts import StrategyParts

Compared = Literal["models", "updates"]


class FlameRule(Aggregator):
    """Mean of the majority's clipped updates, with noise."""

    def __init__(self, noise: float, compare: Compared, seed: int) -> None:
        self.noise = noise
        self.compare = compare
        self.seed = seed

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Choose the majority, and move the model by the mean of its clipped updates."""
        rng = generator(self.seed, "flame-noise", updates.server_round)
        compared = updates.params if self.compare == "models" else None
        covered = Covered.deltas(updates)
        result = flame(updates.deltas(), compared, noise=self.noise, rng=rng, covered=covered)
        return replace(result, vector=moved(updates.reference, result.vector, covered))


class Flame(FederatedStrategy):
    """The clipped mean of the largest group of clients whose models point the same way, plus noise.

    HDBSCAN on 1 − cos(wᵢ, wⱼ) with clusters of ⌊n/2⌋ + 1 at least; S = median ‖Δᵢ‖ over all clients;
    w ← w + mean of Δᵢ·min(1, S / ‖Δᵢ‖) over the cluster + N(0, (noise·S)²) per coordinate. Sample counts play
    no part. Needs an honest majority, and keeps hardly more than a majority even of honest clients.

    From the paper: all of it, noise = 0.001 for images included. Inferred: everybody is kept if no cluster is
    found. ``compare="updates"`` takes the cosines of updates, as many re-implementations do: between models
    they differ little once training is under way, but then updates of honest clients differ much.
    The noise is not scaled to a privacy guarantee. O(n²·d). Nguyen et al., USENIX Security 2022.

        Flame(noise=0.001).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        noise: Annotated[float, Field(ge=0, description="standard deviation, in median lengths")] = 0.001,
        compare: Compared = "models",
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(FlameRule(noise, compare, parts.get("seed", 0)), **parts)


class SignGuardRule(Aggregator):
    """Mean of the clipped updates of usual length and usual signs."""

    def __init__(self, lower: float, upper: float, sample: float, similarity: bool, seed: int) -> None:
        self.lower, self.upper = lower, upper
        self.sample = sample
        self.similarity = similarity
        self.seed = seed

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Filter the clients, and move the model by the mean of the others' clipped updates."""
        covered = Covered.deltas(updates)
        result = signguard(
            updates.deltas(),
            generator(self.seed, "signguard", updates.server_round),
            lower=self.lower,
            upper=self.upper,
            sample=self.sample,
            similarity=self.similarity,
            covered=covered,
        )
        return replace(result, vector=moved(updates.reference, result.vector, covered))


class SignGuard(FederatedStrategy):
    """The clipped mean of the clients whose updates have a usual length and a usual mix of signs.

    M = median ‖Δᵢ‖; kept are those with lower·M ≤ ‖Δᵢ‖ ≤ upper·M who are also in the largest cluster, by mean
    shift, of the shares of positive, zero and negative values among a random part ``sample`` of the
    coordinates; w ← w + mean of Δᵢ·min(1, M / ‖Δᵢ‖). Sample counts play no part. Needs an honest majority.
    A turned update is seen only if honest ones have more of one sign than of the other.

    From the paper: the filters and default values. From the authors' code: the radius of mean shift (half of
    the clients), and the median cosine with the other clients, which ``similarity`` adds to the features in
    every round and their code in the first ones. Inferred: shares are not scaled by the largest, coordinates
    are scattered instead of one block, and the length filter decides alone if nobody passes both.
    O(n·d), with similarity O(n²·d). Xu et al., ICDCS 2022.

        SignGuard().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        lower: Annotated[float, Field(ge=0, le=1, description="least length, in median lengths")] = 0.1,
        upper: Annotated[float, Field(ge=2, description="largest length, in median lengths")] = 3.0,
        sample: Annotated[float, Field(gt=0, le=1, description="part of the coordinates")] = 0.1,
        similarity: bool = False,
        **parts: Unpack[StrategyParts],
    ) -> None:
        rule = SignGuardRule(lower, upper, sample, similarity, parts.get("seed", 0))
        super().__init__(rule, **parts)


class DivideAndConquerRule(Aggregator):
    """Mean without the ⌈c·f⌉ clients that stick out most along the direction of largest spread."""

    def __init__(self, f: int | None, c: float, iterations: int, subset: int, seed: int) -> None:
        self.f = f
        self.c = c
        self.iterations = iterations
        self.subset = subset
        self.seed = seed

    def check(self, clients: int) -> None:
        """Raise InfeasibleError if the declared f does not fit."""
        if self.f is not None:
            check_dnc(clients, self.f, self.c)

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Apply the rule with the declared f, or the largest that fits this round."""
        n = len(updates)
        f = (n - 1) // 2 if self.f is None else self.f
        while removal_count(self.c, f) >= n:
            f -= 1
        covered = Covered.deltas(updates)
        result = dnc(
            updates.deltas(),
            f,
            generator(self.seed, "dnc", updates.server_round),
            c=self.c,
            iterations=self.iterations,
            subset=self.subset,
            covered=covered,
        )
        vector = moved(updates.reference, result.vector, covered)
        return replace(result, vector=vector, diagnostics={**result.diagnostics, "f": float(f)})


class DivideAndConquer(FederatedStrategy):
    """The plain mean without the clients that stick out most where updates differ most (DnC).

    In each of ``iterations`` passes ``subset`` random coordinates are centred; the score is the square of an
    update's part along their top singular vector; the ⌈c·f⌉ highest are left out. The mean is over those kept
    in every pass. ``f`` is the declared number of liars, by default the most below n/2; needs ⌈c·f⌉ < n.
    Sample counts play no part.

    From the paper: all of it; its experiments use one pass and 10,000 coordinates. Inferred: if the passes
    leave nobody, those kept most often; a short round uses the largest f that fits.
    O(iterations·n²·subset + n·d). Shejwalkar and Houmansadr, NDSS 2021.

        DivideAndConquer(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        f: Annotated[int, Field(ge=0)] | None = None,
        c: Annotated[float, Field(gt=0, description="clients left out per liar")] = 1.0,
        iterations: Annotated[int, Field(ge=1)] = 1,
        subset: Annotated[int, Field(ge=1, description="coordinates looked at in a pass")] = 10_000,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(DivideAndConquerRule(f, c, iterations, subset, parts.get("seed", 0)), **parts)


class SignVoteRule(Aggregator):
    """A step of fixed size per coordinate, in the direction that most clients moved."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Count the votes and make the step."""
        covered = Covered.deltas(updates)
        result = sign_vote(updates.deltas(), covered)
        return replace(result, vector=moved(updates.reference, self.lr * result.vector, covered))


class SignVote(FederatedStrategy):
    """Every coordinate moves by ``lr`` in the direction in which most clients moved it.

    w ← w + lr·sign(Σ sign(Δᵢ)); a tie moves nothing. A client has one vote per coordinate whatever the length
    of its update; sample counts play no part. The weights that are reported tell how often a client agreed
    with the vote, and combine buffers. Needs an honest majority.

    The paper votes on the signs of gradients, one step at a time; here on those of whole local updates, and
    the default ``lr`` is inferred: it should be about the size of a usual change of a parameter in a round.
    O(n·d). Bernstein et al., ICLR 2019.

        SignVote(lr=1e-3).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        lr: Annotated[float, Field(gt=0, description="step per coordinate and round")] = 1e-3,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(SignVoteRule(lr), **parts)
