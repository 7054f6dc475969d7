"""What became of each client's reply in a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClientReport:
    """What became of one client's reply in one round.

    ``status`` is ``accepted``, ``refused`` (not a valid reply) or ``failed`` (the client sent an error);
    A client whom no sub-model fits is ``failed`` too; ``submodel`` is the kind that it got.
    ``weight`` is its share in the new model, ``update_norm`` the L2 norm of its update; ``scores`` are
    further figures of the rule, such as a credibility.
    """

    node_id: int
    client: int
    status: str
    reason: str = ""
    num_examples: int | None = None
    weight: float = 0.0
    verdict: str = ""
    update_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    submodel: str = "full"
