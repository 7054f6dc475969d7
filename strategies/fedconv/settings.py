"""FedConv's settings, and the sets of them that are known by a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from fedplat.errors import UserError

from .filters import BlockSettings, Init, Residual
from .fitting import FitPlan, Schedule

Preset = Literal["default", "paper", "released-code"]
Dilate = Literal["update", "model"]

Ratio = Annotated[float, Field(gt=0, le=1)]
Ratios = Annotated[tuple[Ratio, ...], Field(min_length=1, description="widths of sub-models, widest first")]
Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[
    tuple[Share, ...] | None,
    Field(description="share of the clients of each width, where devices have no budgets"),
]
Channels = Annotated[
    Literal[1, 16] | None, Field(description="channels of the projection before a filter's convolution")
]
Slope = Annotated[float, Field(ge=0, le=1)]
Activation = Annotated[
    tuple[Slope, Slope] | Literal["none"] | None,
    Field(description="slopes for positive and negative weights after the convolution, or none"),
]
Epochs = Annotated[int | None, Field(ge=0, description="passes over the server's data")]
Rate = Annotated[float | None, Field(gt=0, description="learning rate of Adam")]
Cautious = Annotated[
    bool | None, Field(description="keep a fit's start unless it is beaten by two standard errors")
]
Accuracy = Annotated[
    float | None,
    Field(ge=0, le=1, description="accuracy on the choosing part below which filters start anew"),
]


@dataclass(frozen=True)
class FedConvSettings:
    """What a preset decides; :class:`FedConvScheme` explains it."""

    block: BlockSettings = field(default_factory=BlockSettings)
    dilate: Dilate = "update"
    compress_plan: FitPlan = field(default_factory=FitPlan)
    dilate_plan: FitPlan = field(default_factory=FitPlan)
    compress_least: float = 0.0
    dilate_least: float = 0.0
    pretrain: FitPlan = field(default_factory=lambda: FitPlan(epochs=5))
    finetune_global: FitPlan = field(default_factory=lambda: FitPlan(epochs=0))
    finetune_client: FitPlan = field(default_factory=lambda: FitPlan(epochs=0))


_PAPER_FIT = FitPlan(schedule="cosine", t_max=4, min_lr=1e-5)
_RELEASED_TUNING = FitPlan(epochs=10, lr=1e-4)

PRESETS: dict[str, FedConvSettings] = {
    "default": FedConvSettings(compress_plan=FitPlan(cautious=True), dilate_plan=FitPlan(cautious=True)),
    "paper": FedConvSettings(
        BlockSettings(16, "all", (0.85, 0.001), 1, "random"),
        dilate="model",
        compress_plan=_PAPER_FIT,
        dilate_plan=_PAPER_FIT,
    ),
    "released-code": FedConvSettings(
        BlockSettings(1, "conv", (0.85, 0.001), 2, "random"),
        dilate="model",
        compress_least=0.4,
        dilate_least=0.8,
        pretrain=_RELEASED_TUNING,
        finetune_global=_RELEASED_TUNING,
        finetune_client=_RELEASED_TUNING,
    ),
}


def settings_of(
    preset: str,
    *,
    projection_channels: Channels = None,
    residual: Residual | None = None,
    activation: Activation = None,
    init: Init | None = None,
    dilate: Dilate | None = None,
    compress_epochs: Epochs = None,
    dilate_epochs: Epochs = None,
    lr: Rate = None,
    schedule: Schedule | None = None,
    cautious: Cautious = None,
    least_accuracy: Accuracy = None,
    pretrain_epochs: Epochs = None,
    finetune_global_epochs: Epochs = None,
    finetune_client_epochs: Epochs = None,
    finetune_lr: Rate = None,
) -> FedConvSettings:
    """Return a preset with some of its settings changed: those that are not None."""
    if preset not in PRESETS:
        raise UserError(f"preset = '{preset}': there are {', '.join(PRESETS)}")
    start = PRESETS[preset]
    fits = {"lr": lr, "schedule": schedule, "cautious": cautious}
    slopes = {} if activation is None else {"activation": None if activation == "none" else activation}
    block = _with(start.block, channels=projection_channels, residual=residual, init=init)
    return replace(
        start,
        block=replace(block, **slopes),
        dilate=dilate or start.dilate,
        compress_plan=_with(start.compress_plan, epochs=compress_epochs, **fits),
        dilate_plan=_with(start.dilate_plan, epochs=dilate_epochs, **fits),
        compress_least=start.compress_least if least_accuracy is None else least_accuracy,
        dilate_least=start.dilate_least if least_accuracy is None else least_accuracy,
        pretrain=_with(start.pretrain, epochs=pretrain_epochs, lr=finetune_lr),
        finetune_global=_with(start.finetune_global, epochs=finetune_global_epochs, lr=finetune_lr),
        finetune_client=_with(start.finetune_client, epochs=finetune_client_epochs, lr=finetune_lr),
    )


def checked_shares(ratios: Sequence[float], shares: Sequence[float] | None) -> tuple[float, ...]:
    """Return the share of each width; raises UserError unless there is one for each and they sum to 1.

    Without any, those of the paper's four classes of devices, or equal ones for other widths.

    >>> checked_shares((1.0, 0.75, 0.5, 0.25), None)
    (0.2, 0.4, 0.2, 0.2)
    """
    if not ratios or list(ratios) != sorted(set(ratios), reverse=True):
        raise UserError(f"widths = {list(ratios)}: give widths from wide to narrow, each one once")
    if any(not 0 < ratio <= 1 for ratio in ratios):
        raise UserError(f"widths = {list(ratios)}: each has to be above 0 and at most 1")
    if shares is None:
        return (0.2, 0.4, 0.2, 0.2) if len(ratios) == 4 else (1 / len(ratios),) * len(ratios)
    if len(shares) != len(ratios) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise UserError(f"shares = {list(shares)}: give one for each of {len(ratios)} widths; their sum is 1")
    return tuple(shares)


def _with(settings: Any, **changes: Any) -> Any:
    return replace(settings, **{name: value for name, value in changes.items() if value is not None})
