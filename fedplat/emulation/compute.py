"""How much work a client's training is: floating-point operations, and bits of data, told without training.

One multiplication and one addition are two operations (FLOPs). Counted are the products that make up
practically all of it: convolutions, linear layers, LSTM layers, forward and backward. Not counted are
element-wise operations, pooling, normalisation, the loss and the optimiser's step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ..errors import UserError
from ..models import loss_fn
from ..training_config import LocalTraining
from .fake import Model, fake_module, start_autograd


def training_flops(model: Model, sample_shape: tuple[int, ...], batch_size: int) -> int:
    """Return the FLOPs of one training step, forward and backward, without data and without computing.

    ``model`` is a module, which is left as it is, or a function that builds one; ``sample_shape`` is
    (C, H, W) or, for tokens, (T,). The backward pass makes each product twice more, once for the weights and
    once for the layer's input; the first layer's input needs none. It grows in proportion to the batch.

    Raises UserError for sizes below 1 and for a model that cannot take such samples.

    >>> from fedplat.models.dense import softmax_regression
    >>> training_flops(lambda: softmax_regression((1, 28, 28), 10), (1, 28, 28), 32) == 2 * 2 * 32 * 784 * 10
    True
    """
    if batch_size < 1 or any(size < 1 for size in sample_shape):
        raise UserError(
            f"work of batch_size = {batch_size}, sample_shape = {sample_shape}: sizes have to be 1 or more"
        )
    start_autograd()
    counter = FlopCounterMode(display=False, custom_mapping=_LSTM)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = fake_module(model)
        x = torch.zeros(batch_size, *sample_shape, dtype=torch.int64 if len(sample_shape) == 1 else None)
        try:
            with counter:
                logits = module(x)
                loss_fn(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64)).backward()
        except (RuntimeError, ValueError) as error:
            raise UserError(f"the model cannot train on samples of shape {sample_shape}: {error}") from error
    return int(counter.get_total_flops())


def sample_flops(model: Model, sample_shape: tuple[int, ...]) -> int:
    """Return the FLOPs of training on one sample: those of a step over its batch size."""
    # Of two samples: BatchNorm cannot train on one where it sees a single pixel.
    return training_flops(model, sample_shape, 2) // 2


def sample_bits(sample_shape: tuple[int, ...]) -> int:
    """Return the bits of one sample as it is stored: a byte per pixel and channel, or per character.

    >>> sample_bits((1, 28, 28)), sample_bits((80,))
    (6272, 640)
    """
    return 8 * prod(sample_shape)


def samples_seen(num_samples: int, training: LocalTraining) -> int:
    """Return how many samples a client with so many trains on in one round; each epoch counts.

    >>> samples_seen(7, LocalTraining(batch_size=3, epochs=2))
    14
    >>> samples_seen(7, LocalTraining(batch_size=3, drop_last=True)), samples_seen(7, LocalTraining(steps=2))
    (6, 14)
    """
    size = training.batch_size
    epoch = num_samples // size * size if training.drop_last and num_samples >= size else num_samples
    if not epoch:
        return 0
    if training.steps is None:
        return training.epochs * epoch
    epochs, steps = divmod(training.steps, -(-epoch // size))
    # The smaller batch is an epoch's last, so the steps of one that has begun are full batches.
    return epochs * epoch + steps * size


def task_flops(flops_of_sample: int, num_samples: int, training: LocalTraining) -> int:
    """Return the FLOPs of a client's round; ``flops_of_sample`` is what :func:`sample_flops` returns."""
    return flops_of_sample * samples_seen(num_samples, training)


def task_bits(bits_of_sample: int, num_samples: int, training: LocalTraining) -> int:
    """Return the bits of data that a client's round goes through; see :func:`sample_bits`."""
    return bits_of_sample * samples_seen(num_samples, training)


def _lstm_forward(x: Any, to_gates: Any, to_state: Any, *_: Any, **__: Any) -> int:
    # Shapes: x (T, n, inputs), weights (4 hidden, inputs) and (4 hidden, hidden).
    return 2 * x[0] * x[1] * (prod(to_gates) + prod(to_state))


def _lstm_backward(*shapes: Any, **__: Any) -> int:
    return 2 * _lstm_forward(*shapes)


_LSTM: dict[Any, Callable[..., int]] = {
    # PyTorch's counter has no formula for the CPU's LSTM kernel and would take it for free.
    torch.ops.aten.mkldnn_rnn_layer: _lstm_forward,
    torch.ops.aten.mkldnn_rnn_layer_backward: _lstm_backward,
}
