"""How much memory a client needs to train a model: told without data and without computing, and measured.

The estimate plays one training step through with *fake* tensors, which have shapes and sizes but no
numbers: no memory of the model's size is taken and no arithmetic is done, yet PyTorch builds the same graph
and saves the same tensors as on data. All sizes are in bytes.

::

    total = parameters + buffers + gradients + optimiser + batch + activations + workspace + constant

What is counted is memory of tensors on the device, as ``clients.training.train_one`` uses it. Not counted:
the client's data set besides one batch, the arrays sent and received and, unless ``constant`` says it, the
interpreter, the libraries and the CUDA context.

Nor is what a kernel takes and frees inside one operation, which depends on the processor. On one with
AVX2 that was nothing for most nets, but for oneDNN's LSTM and some convolutions (char-lstm, resnet18,
cnn-mudhog-fashion) a fifth of the total with 4 to 8 samples and 8 to 17 % with 16 to 32.
``kernel_memory`` measures it, so that it can be given as ``constant``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import registry
from ..clients.training import OnBatch, train_one
from ..errors import UserError
from ..models import build, loss_fn
from ..models.flat import FlatModel
from ..rng import generator, seeded_torch
from ..training_config import LocalTraining
from .fake import Model, fake_module, start_autograd
from .memory_tracer import LiveBytes, SavedBytes, allocated_peak

_PAGE = 4096


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes at its peak, by what they are for; ``total`` is their sum.

    =============== ================================================================================
    ``parameters``  the weights
    ``buffers``     BatchNorm's statistics and counters
    ``gradients``   one number per trainable weight: they stay allocated between steps
    ``optimiser``   SGD: nothing, with momentum one number per weight; Adam: two, and a step count
    ``batch``       samples and labels of one step
    ``activations`` what the forward pass saves for the backward pass, each storage once; weights
                    and the batch are not counted again, a batch put in channels-last order is
    ``workspace``   what the backward pass needs at its peak beyond all of these: gradients of
                    activations, a layer's weight gradient before it is added, the logits
    ``constant``    the process and the framework, as given
    =============== ================================================================================
    """

    parameters: int
    buffers: int
    gradients: int
    optimiser: int
    batch: int
    activations: int
    workspace: int
    constant: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def training_memory(
    model: Model,
    sample_shape: tuple[int, ...],
    batch_size: int,
    training: LocalTraining,
    constant: int = 0,
) -> MemoryEstimate:
    """Return what training ``model`` takes at the peak of a step after the first, on a CPU.

    ``model`` is a module, which is left as it is, or a function that builds one; the function is called with
    fake tensors, so a model that would not fit this machine costs nothing either. ``sample_shape`` is
    (C, H, W) or, for tokens, (T,). Of ``training``, the optimiser and the precision count; ``batch_size`` is
    given here, since ``training.batch_size`` may be more than a client has.

    ``constant`` depends on the device and is 0 unless given: what the process takes before it trains.

    The peak is the larger of two moments, both found by counting tensors over the fake step: the forward
    pass's (everything saved, or a large intermediate), and the backward pass's, in which saved tensors
    go one by one while gradients come. The optimiser's kernels need nothing beyond its state.

    Inferred: the workspace that the CPU's LSTM kernel saves (``lstm_workspace``). Approximate: with bf16,
    weights are cast and outputs halved where autocast does so on a CPU, but a processor without bf16
    instructions converts back inside its kernels; and CUDA chooses other operations, so for it the
    estimate is the CPU's, and ``constant`` has to make up for the workspaces of cuDNN and cuBLAS.

    Raises UserError for sizes below 1 and for a model that cannot take such samples.

    >>> from fedplat.models.dense import softmax_regression
    >>> adam = LocalTraining(optimizer="adam")
    >>> training_memory(lambda: softmax_regression((1, 28, 28), 10), (1, 28, 28), 32, adam)
    ... # doctest: +NORMALIZE_WHITESPACE
    MemoryEstimate(parameters=31400, buffers=0, gradients=31400, optimiser=62804, batch=100608,
                   activations=101636, workspace=31404, constant=0)
    """
    if batch_size < 1 or constant < 0 or any(size < 1 for size in sample_shape):
        raise UserError(
            f"memory of batch_size = {batch_size}, sample_shape = {sample_shape}, constant = {constant}: "
            "sizes have to be 1 or more, the constant 0 or more"
        )
    start_autograd()
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = fake_module(model)
        parameters, buffers = list(module.parameters()), list(module.buffers())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        x = torch.zeros(batch_size, *sample_shape, dtype=torch.int64 if len(sample_shape) == 1 else None)
        saved = SavedBytes([*parameters, *buffers, x])
        live = LiveBytes(_as_onednn)
        try:
            labels = _step(module, x, training.precision == "bf16", live, saved)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"the model cannot train on samples of shape {sample_shape}: {error}") from error
    weights = _nbytes(trained)
    return MemoryEstimate(
        parameters=_nbytes(parameters),
        buffers=_nbytes(buffers),
        gradients=weights,
        optimiser=_optimiser_bytes(training, weights),
        batch=_nbytes([x]) + labels,
        activations=saved.total,
        workspace=live.peak - saved.total - labels,
        constant=constant,
    )


def lstm_workspace(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Return the bytes that oneDNN's LSTM layer saves in float32 for its backward pass.

    Inferred: PyTorch does not tell the size. Gates and outputs of every step, and, for both sides of the
    layer, states, cells and their gradients of every step and the one before. All rows but the cells' are
    padded to 64 bytes, and by 64 more where they would be a multiple of 1,024; each array fills its last
    page. To the byte what oneDNN asked for with 1 to 80 steps, 1 to 32 samples, 3 to 300 inputs and 32 to
    256 units, on one processor.

    >>> lstm_workspace(20, 4, 8, 32)
    176128
    """
    rows, both_sides = steps * batch, 2 * (steps + 1) * batch
    sizes = [
        rows * _padded(4 * hidden),
        rows * _padded(hidden),
        *[both_sides * _padded(max(inputs, hidden))] * 3,
        *[both_sides * hidden] * 2,
    ]
    return sum(math.ceil(4 * size / _PAGE) * _PAGE for size in sizes)


def measured_memory(
    module: nn.Module, x: Tensor, y: Tensor, training: LocalTraining, device: str = "cpu"
) -> int:
    """Really train a copy of ``module`` on one batch, ``x`` and ``y``; return a step's peak in bytes.

    Three steps of ``train_one``; the peak is the last one's, when the optimiser has its state. On a CPU it is
    counted by ``LiveBytes``; on a GPU it is ``torch.cuda.max_memory_allocated`` less the data and what was
    there before, so there the workspaces of kernels are in it. Torch's generators stay as they were.
    """
    on_gpu = torch.device(device).type == "cuda"
    x, y = x.to(device), y.to(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    flat = FlatModel(copy.deepcopy(module), device)
    live = LiveBytes()
    for tensor in _resident(flat):
        live.hold(tensor)

    def restart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        live.restart()
        return x, y

    with seeded_torch(0, "memory-steps"):
        if on_gpu:
            _three_steps(flat, x, y, training, restart)
            return int(torch.cuda.max_memory_allocated(device)) - before
        with live:
            _three_steps(flat, x, y, training, restart)
    return live.peak


def kernel_memory(module: nn.Module, x: Tensor, y: Tensor, training: LocalTraining) -> int:
    """Return how many bytes the CPU's kernels need beyond ``measured_memory``, from PyTorch's allocator.

    It trains twice, and what it returns holds for this processor and this number of threads.
    """
    flat = FlatModel(copy.deepcopy(module))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _resident(flat)}
    with seeded_torch(0, "memory-steps"):
        peak = allocated_peak(lambda: _three_steps(flat, x, y, training, lambda x, y: (x, y)))
    return max(0, peak + sum(held.values()) - measured_memory(module, x, y, training))


@dataclass(frozen=True)
class MemoryRow:
    """One line of ``memory_table``: an estimate and the measured peak in bytes."""

    model: str
    training: LocalTraining
    sample_shape: tuple[int, ...]
    estimate: MemoryEstimate
    measured: int

    @property
    def error_percent(self) -> float:
        """How far the estimate is above (+) or below (−) the measured peak."""
        return 100 * (self.estimate.total / self.measured - 1)


def memory_table(
    models: Mapping[str, Mapping[str, Any]] | None = None,
    trainings: Sequence[LocalTraining] = (LocalTraining(momentum=0.9), LocalTraining(optimizer="adam")),
    batch_sizes: Sequence[int] = (8, 32),
    image_shape: tuple[int, int, int] = (3, 32, 32),
    text_length: int = 80,
    classes: int = 10,
    device: str = "cpu",
) -> Iterator[MemoryRow]:
    """Yield a row per model of the registry, training and batch size, estimated and really trained.

    ``models`` names those wanted, each with its settings; by default all, as they are without settings.
    Those that read text get sequences of ``text_length`` tokens, the others images.
    """
    names = {name: {} for name in registry.entries("models")} if models is None else models
    for name, settings in names.items():
        target = registry.find("models", name).load()
        module, shape = _built(target, image_shape, text_length, classes, settings)
        for training in trainings:
            for size in batch_sizes:
                of_size = training.model_copy(update={"batch_size": size})
                text = len(shape) == 1
                x = torch.zeros(size, *shape, dtype=torch.int64 if text else torch.float32)
                y = torch.zeros(x.shape if text else size, dtype=torch.int64)
                estimate = training_memory(module, shape, size, of_size)
                yield MemoryRow(
                    name, of_size, shape, estimate, measured_memory(module, x, y, of_size, device)
                )


def _built(
    target: Callable[..., nn.Module],
    image: tuple[int, ...],
    text_length: int,
    classes: int,
    settings: Mapping[str, Any],
) -> tuple[nn.Module, tuple[int, ...]]:
    try:
        return build(target, image, classes, 0, **settings), image
    except UserError:  # a model of text; one that takes neither says so now
        return build(target, (text_length,), classes, 0, **settings), (text_length,)


def _resident(flat: FlatModel) -> list[Tensor]:
    return [flat.vector, flat.grad, flat.side, *flat.module.buffers()]


def _three_steps(flat: FlatModel, x: Tensor, y: Tensor, training: LocalTraining, on_batch: OnBatch) -> None:
    training = training.model_copy(update={"batch_size": len(y), "steps": 3, "keep_optimizer": False})
    train_one(flat, training, x, y, generator(0, "memory-steps"), on_batch=on_batch)


def _step(module: nn.Module, x: Tensor, bf16: bool, live: LiveBytes, saved: SavedBytes) -> int:
    """Play one step of ``train_one`` through, counting; return the bytes of the labels."""
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16), saved.hooks():
            # Held as FlatModel holds it; the caller still has ``x``.
            ordered = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
            logits = module(ordered)
            del ordered
            y = torch.zeros(logits.shape[:-1], dtype=torch.int64)
            saved.ignore(y)
            logits = logits.float()
            loss = loss_fn(logits, y)
            del logits
        loss.backward()
    return _nbytes([y])


def _as_onednn(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Correct what the fake LSTM kernel returns, where the real one returns other memory."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        *outputs, workspace = result
        (steps, batch, inputs), hidden = args[0].shape, outputs[0].shape[-1]
        # The fake one has 0 bytes, because only oneDNN knows the size.
        return (*outputs, workspace.new_empty(lstm_workspace(steps, batch, inputs, hidden)))
    if func is torch.ops.aten.mkldnn_rnn_layer_backward.default:
        # Both biases get one gradient tensor; the fake kernel makes one or two, as its cache has it.
        return (*result[:4], result[3], *result[5:])
    return result


def _optimiser_bytes(training: LocalTraining, weights: int) -> int:
    if training.optimizer == "adam":
        return 2 * weights + 4
    return weights if training.momentum else 0


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _padded(numbers: int) -> int:
    padded = math.ceil(numbers / 16) * 16
    return padded + 16 if padded % 256 == 0 else padded
