"""What a FedP3 training message says: which layers come how, and how they are to be trained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from .errors import UserError

FEDP3 = "fedplat.fedp3"
"""Under which a message holds :meth:`PartOptions.dumps`; without it, the training is the usual one."""
KEPT = "fedplat.fedp3-kept"
"""On the client alone: the bytes of the mask that came, once the message holds the whole model."""

Local = Literal["fixed", "uniform", "ordered"]


@dataclass(frozen=True)
class PartOptions:
    """How a client trains; layers by name.

    ================ =======================================================================================
    ``trained``      layers sent whole and returned, without the head, which always is
    ``pruned``       layers sent with the largest ``share`` of each weight's elements alone
    ``local``        what each step leaves out besides, of ``pruned`` layers: nothing (``fixed``), elements at
                     random (``uniform``), or all but the first outputs and inputs (``ordered``)
    ``least``        the least share that a step keeps; it is drawn from [least, 1], or ``constant``
    ``enforce``      whether what is pruned stays zero while training
    ``freeze``       whether only ``trained`` layers and the head are trained
    ``local_head``   whether the client goes on with its own head
    ``clip``         largest L2 norm of one sample's gradient; 0: no differential privacy
    ``noise``        standard deviation of the noise on the sum of these, over ``clip``
    ================ =======================================================================================
    """

    trained: tuple[str, ...]
    pruned: tuple[str, ...] = ()
    share: float = 1.0
    local: Local = "fixed"
    least: float = 1.0
    constant: bool = False
    enforce: bool = True
    freeze: bool = False
    local_head: bool = False
    clip: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("share", "least"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"FedP3: {name} = {getattr(self, name)}: expected above 0 and at most 1")
        if self.local not in get_args(Local):
            raise UserError(f"FedP3: local = {self.local!r}: expected one of {', '.join(get_args(Local))}")
        if not (0 <= self.clip < math.inf and 0 <= self.noise < math.inf) or (self.clip > 0) != (
            self.noise > 0
        ):
            raise UserError(
                f"FedP3: clip = {self.clip} with noise = {self.noise}: both have to be above 0, or both 0"
            )

    @property
    def private(self) -> bool:
        """Whether gradients are clipped and noised."""
        return self.clip > 0

    @property
    def masked(self) -> tuple[str, ...]:
        """The layers of which a mask travels."""
        return self.pruned if self.share < 1 else ()

    @property
    def returned_sparse(self) -> tuple[str, ...]:
        """The layers that are trained, pruned and held so: of these the kept weights alone come back."""
        return tuple(name for name in self.trained if self.enforce and name in self.masked)

    def dumps(self) -> str:
        """Return one line of JSON; equal options give equal lines."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PartOptions | None:
        """Read them from a message's configuration, None if it has none; raises UserError for nonsense."""
        text = config.get(FEDP3)
        if text is None:
            return None
        try:
            found = json.loads(str(text))
            trained, pruned = (tuple(map(str, found.pop(key))) for key in ("trained", "pruned"))
            usual = {k: v for k, v in asdict(cls(())).items() if k not in ("trained", "pruned")}
            if found.keys() != usual.keys():
                raise ValueError(f"keys {sorted(found)}")
            given: dict[str, Any] = {key: type(value)(found[key]) for key, value in usual.items()}
            return cls(trained, pruned, **given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"FedP3: {str(text)[:80]!r} is not what PartOptions.dumps writes") from error
