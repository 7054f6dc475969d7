"""Settings of a client's local training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LocalTraining(BaseModel):
    """Settings of a client's training in one round; raises pydantic's ValidationError if out of range."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epochs: Annotated[int, Field(ge=1, description="passes over the client's samples")] = 1
    steps: Annotated[int | None, Field(ge=1, description="number of batches, instead of epochs")] = None
    batch_size: Annotated[int, Field(ge=1, description="samples per step")] = 32
    optimizer: Annotated[Literal["sgd", "adam"], Field(description="SGD or Adam of torch.optim")] = "sgd"
    lr: Annotated[float, Field(gt=0, description="learning rate")] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1, description="momentum of SGD")] = 0.0
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty added to the gradient")] = 0.0
    nesterov: Annotated[bool, Field(description="Nesterov's form of momentum")] = False
    drop_last: Annotated[
        bool, Field(description="leave out an epoch's last, smaller batch, unless it is the only one")
    ] = False
    keep_optimizer: Annotated[
        bool, Field(description="carry momentum from round to round, as in MUD-HoG's released code")
    ] = False
    max_grad_norm: Annotated[
        float | None, Field(gt=0, description="scale longer gradients down to this L2 norm")
    ] = None

    precision: Annotated[
        Literal["float32", "bf16"], Field(description="bf16: the layers compute in bfloat16, weights do not")
    ] = "float32"

    @model_validator(mode="after")
    def _momentum_fits(self) -> Self:
        if self.optimizer == "adam" and (self.momentum or self.nesterov):
            raise ValueError("momentum and nesterov belong to optimizer = 'sgd'; leave them out for 'adam'")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self
