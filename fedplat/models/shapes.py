"""What shape of sample a model can take, said before the first layer is built."""

from __future__ import annotations

from ..errors import UserError


def image_shape(model: str, input_shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """Return (channels, height, width) of an image sample; raises UserError for text or too small images."""
    if len(input_shape) == 1:
        raise UserError(
            f"model '{model}' reads images, but the samples are sequences of {input_shape[0]} tokens: "
            "use char-lstm for text"
        )
    if len(input_shape) != 3:
        raise UserError(f"model '{model}' reads images of shape (channels, height, width), got {input_shape}")
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise UserError(
            f"model '{model}' needs images of at least {smallest}x{smallest} pixels, got {height}x{width}"
        )
    return channels, height, width


def text_length(model: str, input_shape: tuple[int, ...]) -> int:
    """Return the number of tokens of a text sample; raises UserError for anything else."""
    if len(input_shape) != 1:
        raise UserError(
            f"model '{model}' reads token sequences of shape (length,), but the samples have shape "
            f"{input_shape}: use an image model"
        )
    return input_shape[0]
