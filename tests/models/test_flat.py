from collections.abc import Callable
from copy import deepcopy
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedplat.arrays import LayoutError
from fedplat.errors import UserError
from fedplat.models import build, loss_fn
from fedplat.models.cnn import hfl_cnn
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import char_lstm
from fedplat.models.resnet import resnet18
from fedplat.rng import seeded_torch


def small_batch_norm_net() -> nn.Module:
    with seeded_torch(1, "test"):
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4), nn.BatchNorm1d(4)
        )


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build(mlp, (1, 8, 8), 4, seed=1, hidden=(11,)),
    "batch norm": small_batch_norm_net,
    "cnn": lambda: build(hfl_cnn, (1, 16, 16), 4, seed=1),
    "lstm": lambda: build(char_lstm, (8,), 5, seed=1, hidden=12),
}


def sample(name: str) -> tuple[Tensor, Tensor]:
    with seeded_torch(2, "test"):
        if name == "lstm":
            return torch.randint(0, 5, (6, 8)), torch.randint(0, 5, (6, 8))
        size = 16 if name == "cnn" else 8
        return torch.randn(6, 1, size, size), torch.randint(0, 4, (6,))


@pytest.fixture(params=list(BUILDERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_float_is_a_view_of_one_vector(name: str) -> None:
    original = BUILDERS[name]()
    flat = FlatModel(deepcopy(original))
    assert flat.vector.shape == (flat.layout.dim,)
    assert flat.vector.is_contiguous()
    for key, tensor in flat.module.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[key])
        home = flat.vector if tensor.is_floating_point() else flat.side
        assert tensor.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()


def test_parameters_come_first_and_float_buffers_after_them() -> None:
    flat = FlatModel(small_batch_norm_net())
    parameters = torch.cat([p.flatten() for p in flat.module.parameters()])
    buffers = torch.cat([b.flatten() for b in flat.module.buffers() if b.is_floating_point()])
    assert torch.equal(flat.params, parameters)
    assert torch.equal(flat.vector, torch.cat([parameters, buffers]))
    assert flat.layout.num_params == len(parameters)
    assert flat.layout.side_bytes == 16


def test_a_float_buffer_of_any_name_is_no_parameter() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(3))
    module.register_buffer("scratch", torch.ones(5), persistent=False)
    flat = FlatModel(module)
    assert (flat.layout.num_params, flat.layout.dim) == (6, 9)


def test_forward_is_the_one_of_the_plain_module(name: str) -> None:
    x, _ = sample(name)
    module = BUILDERS[name]()
    expected = deepcopy(module)(x)
    torch.testing.assert_close(FlatModel(module)(x), expected)


def test_forward_sees_changes_of_the_vector_in_place(name: str) -> None:
    x, _ = sample(name)
    flat = FlatModel(BUILDERS[name]())
    before = flat(x).detach()
    flat.vector.mul_(0.5)
    halved = BUILDERS[name]()
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(before, flat(x))
    torch.testing.assert_close(flat(x), halved(x))


def test_gradient_is_the_concatenation_of_the_plain_gradients_and_stays_in_place(name: str) -> None:
    x, y = sample(name)
    plain = BUILDERS[name]()
    flat = FlatModel(BUILDERS[name]())
    address = flat.grad.data_ptr()
    for _ in range(2):
        flat.zero_grad()
        loss_fn(flat(x), y).backward()
    loss_fn(plain(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(flat.grad, expected)
    assert flat.params.grad is flat.grad
    assert flat.grad.data_ptr() == address


def test_bind_grad_mends_a_gradient_that_was_cut_off() -> None:
    x, y = sample("mlp")
    flat = FlatModel(BUILDERS["mlp"]())
    flat.module.zero_grad()
    torch.optim.SGD([flat.params], lr=0.1).zero_grad()
    flat.bind_grad()
    loss_fn(flat(x), y).backward()
    assert flat.params.grad is not None
    assert flat.params.grad.abs().sum() > 0


def test_store_and_load_carry_weights_statistics_and_counters(name: str) -> None:
    x, _ = sample(name)
    trained, fresh = FlatModel(BUILDERS[name]()), FlatModel(BUILDERS[name]())
    for _ in range(3):
        trained(x)
    trained.vector.add_(0.25)
    arrays = trained.layout.new()
    trained.store(arrays)
    fresh.load(arrays)
    for key, tensor in trained.module.state_dict().items():
        assert torch.equal(fresh.module.state_dict()[key], tensor)
        assert np.array_equal(arrays.view(key), tensor.numpy())
    trained.vector.zero_()
    assert fresh.vector.abs().sum() > 0


def test_load_takes_read_only_arrays_without_a_warning() -> None:
    flat = FlatModel(BUILDERS["batch norm"]())
    arrays = flat.layout.new()
    arrays.vector.flags.writeable = False
    arrays.side.flags.writeable = False
    with catch_warnings():
        simplefilter("error")
        flat.load(arrays)
    assert not flat.vector.any()


def test_load_and_store_refuse_another_layout() -> None:
    flat = FlatModel(BUILDERS["mlp"]())
    other = FlatModel(build(mlp, (1, 8, 8), 4, seed=1, hidden=(12,))).layout.new()
    with pytest.raises(LayoutError, match=r"fc1\.weight"):
        flat.load(other)
    with pytest.raises(LayoutError, match=r"fc1\.weight"):
        flat.store(other)


def test_two_models_of_one_architecture_have_equal_layouts() -> None:
    first, second = (FlatModel(BUILDERS["batch norm"]()).layout for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_resnet_with_batch_norm_keeps_its_statistics_behind_the_parameters() -> None:
    flat = FlatModel(build(resnet18, (1, 9, 9), 10, seed=1, norm="batch"))
    assert flat.layout.dim - flat.layout.num_params == 2 * 4_800
    assert flat.layout.side_bytes == 20 * 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.decoder.weight.data = self.encoder.weight.data


@pytest.mark.parametrize("kind", [Tied, Aliased])
def test_tied_weights_are_refused_by_both_names(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(UserError, match=r"'decoder\.weight' and 'encoder\.weight' share"):
        FlatModel(kind())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_modules_of_another_type_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"'weight' is {str(dtype)[6:]}; build the model in float32"):
        FlatModel(nn.Linear(2, 2).to(dtype))


def test_float_buffers_of_another_type_are_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(3, dtype=torch.float64))
    with pytest.raises(UserError, match="'scale' is float64"):
        FlatModel(module)


def test_frozen_parameters_are_refused() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    with pytest.raises(UserError, match="'bias' is frozen"):
        FlatModel(module)


def test_the_latest_flat_model_of_a_module_owns_its_weights() -> None:
    module = BUILDERS["mlp"]()
    first = FlatModel(module)
    second = FlatModel(module)
    assert torch.equal(first.vector, second.vector)
    second.vector.zero_()
    assert first.vector.any()
    assert not module.fc1.weight.any()
