"""FedConv's filters and their fitting."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedplat.errors import UserError
from fedplat.models.cnn import hfl_cnn
from fedplat.models.cutting import CutPlan, plan_of, shrink
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import CharLSTM
from fedplat.strategies.fedconv.filters import BlockSettings, FilterBank, convolved, modified_leaky_relu
from fedplat.strategies.fedconv.fitting import FitPlan, Named, PublicSplit, fit, judged, losses
from fedplat.strategies.fedconv.settings import PRESETS, checked_shares, settings_of

from ..models.cutting_nets import arrays_of, seeded, tiny_resnet

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp((1, 4, 4), 3, hidden=(10, 6)), (1, 4, 4)),
    "cnn": (lambda: hfl_cnn((1, 16, 16), 4), (1, 16, 16)),
    "resnet": (tiny_resnet, (1, 8, 8)),
    "lstm": (lambda: CharLSTM(10, 4, 8, 2), (6,)),
    "softmax": (lambda: softmax_regression((1, 4, 4), 3), (1, 4, 4)),
}
PRESET_BLOCKS = [settings.block for settings in PRESETS.values()]


def bank(plan: CutPlan, width: float, settings: BlockSettings, enlarge: bool = False, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    return FilterBank(plan, plan.prefix(width).sizes, settings, enlarge=enlarge, rng=rng)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("width", [1.0, 0.75, 0.5625, 0.5, 0.4, 0.3, 0.25, 0.05])
def test_filters_give_the_shapes_of_the_small_model_and_transposed_ones_those_of_the_large(
    name: str, width: float
) -> None:
    # Trap: the released rule int(O·SR) does not fit flattened layers at 0.4, 0.3 and 0.05.
    make, shape = NETS[name]
    module = seeded(make)
    plan = plan_of(module, shape)
    small = shrink(module, plan, plan.prefix(width).sizes)
    for settings in PRESET_BLOCKS:
        made = bank(plan, width, settings)(weights_of(module))
        assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in weights_of(small).items()}
        back = bank(plan, width, settings, enlarge=True)(made)
        assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in weights_of(module).items()}


def test_first_inputs_and_last_outputs_keep_their_number() -> None:
    make, shape = NETS["cnn"]
    module = seeded(make)
    plan = plan_of(module, shape)
    blocks = bank(plan, 0.5, BlockSettings()).blocks
    made = bank(plan, 0.5, BlockSettings())(weights_of(module))
    assert made["conv1.weight"].shape == (5, 1, 5, 5)
    assert made["fc2.weight"].shape == (4, 25)
    sizes = {name: tuple(block.kernel.shape) for name, block in blocks.items()}
    assert sizes["conv1/weight"] == (25, 6, 1)
    assert sizes["conv2/weight"] == (25, 11, 6)
    assert sizes["fc1/weight"] == (1, 26, 11)  # one pixel of each channel is left of 16x16
    assert sizes["fc2/weight"] == (1, 1, 26)
    assert sizes["fc1/bias"] == (1, 1, 26)
    assert sizes["fc2/bias"] == (1, 1, 1)


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("channels", [1, 16])
@pytest.mark.parametrize("residual", ["all", "conv"])
def test_delta_filters_without_activation_are_the_prefix_slice_exactly(
    name: str, channels: int, residual
) -> None:
    make, shape = NETS[name]
    flat = FlatModel(seeded(make))
    plan = plan_of(flat.module, shape)
    part = plan.index_map(plan.prefix(0.5), flat.layout)
    settings = BlockSettings(channels, residual, None, 1, "delta")
    made = bank(plan, 0.5, settings)(weights_of(flat.module))
    expected = part.extract(arrays_of(flat))
    for entry in part.layout.entries:
        torch.testing.assert_close(
            made[entry.name].detach(), torch.from_numpy(expected.view(entry.name)), rtol=0, atol=0
        )
    # The other way round, the slice comes to where it was, with zeros around it.
    back = bank(plan, 0.5, settings, enlarge=True)(made)
    zeros = part.whole.new()
    full, _ = part.restore(expected, zeros)
    for entry in part.whole.entries:
        torch.testing.assert_close(
            back[entry.name].detach(), torch.from_numpy(full.view(entry.name)), rtol=0, atol=0
        )


def test_a_filter_block_computes_the_papers_formula_on_each_place_of_a_kernel() -> None:
    module = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    plan = plan_of(module, (2, 6, 6))
    settings = BlockSettings(16, "all", (0.85, 0.001), 1, "random")
    filters = bank(plan, 0.5, settings)
    block = filters.blocks["2/weight"]
    made = filters(weights_of(module))["2.weight"]
    weight = module[2].weight.detach()
    for place in range(9):
        matrix = weight[:, :, place // 3, place % 3]
        first = nn.Conv2d(1, 16, 1)
        last = nn.Conv2d(16, 1, 1)
        with torch.no_grad():
            first.weight.copy_(block.first[place].view(16, 1, 1, 1))
            first.bias.copy_(block.shift[place])
            last.weight.copy_(block.last[place].view(1, 16, 1, 1))
            last.bias.copy_(block.last_shift[place].view(1))
            y = last(first(matrix[None, None]))[0, 0] + matrix
            v = block.kernel[place]
            kernel = block.magnitude[place] * v / v.norm()
        rows, columns = 4 - kernel.shape[0] + 1, 6 - kernel.shape[1] + 1
        for i in range(rows):
            for j in range(columns):
                total = (kernel * y[i : i + kernel.shape[0], j : j + kernel.shape[1]]).sum()
                expected = total * (0.85 if total > 0 else 0.001)
                assert made[i, j, place // 3, place % 3].item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_flattened_layer_is_compressed_by_channels_with_a_filter_per_pixel() -> None:
    # What a pixel of one channel becomes depends on that pixel of other channels, never on other pixels.
    module = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 2))
    plan = plan_of(module, (1, 2, 2))
    filters = bank(plan, 0.5, BlockSettings(1, "all", None, 1, "random"))
    arrays = weights_of(module)
    before = filters(arrays)["2.weight"]
    changed = dict(arrays)
    changed["2.weight"] = arrays["2.weight"].clone()
    changed["2.weight"].view(6, 4, 4)[:, :, 2] += 1
    after = filters(changed)["2.weight"]
    moved = (after != before).view(3, 2, 4).any(0).any(0)
    assert moved.tolist() == [False, False, True, False]


@pytest.mark.parametrize("enlarge", [False, True])
def test_large_kernels_by_fourier_transform_agree_with_sums(enlarge: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    kernels = torch.randn(3, 60, 50, generator=rng, requires_grad=True)
    rows, columns = (40, 7) if enlarge else (99, 57)
    matrices = torch.randn(3, rows, columns, generator=rng)
    by_fourier = convolved(matrices, kernels, enlarge)
    convolve = nn.functional.conv_transpose2d if enlarge else nn.functional.conv2d
    by_sums = convolve(matrices[None], kernels[:, None], groups=3)[0]
    torch.testing.assert_close(by_fourier, by_sums, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        *(torch.autograd.grad(one.square().sum(), kernels)[0] for one in (by_fourier, by_sums)),
        rtol=1e-3,
        atol=1e-1,
    )


def test_only_filters_get_gradients() -> None:
    make, shape = NETS["cnn"]
    module = seeded(make)
    plan = plan_of(module, shape)
    small = shrink(module, plan, plan.prefix(0.5).sizes)
    filters = bank(plan, 0.5, BlockSettings())
    arrays = {name: tensor.detach() for name, tensor in weights_of(module).items()}
    loss = functional_call(small, filters(arrays), (torch.randn(5, 1, 16, 16),)).square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in filters.parameters())
    assert all(parameter.grad is None for parameter in (*module.parameters(), *small.parameters()))
    assert not any(tensor.requires_grad for tensor in arrays.values())


def test_the_activation_is_applied_once_unless_the_released_code_is_asked_for() -> None:
    # Trap: applied twice, the slopes of the released code are 0.7225 and 1e-6.
    x = torch.tensor([2.0, -2.0])
    assert modified_leaky_relu(x, 0.85, 0.001).tolist() == pytest.approx([1.7, -0.002])
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 4), nn.Linear(4, 2))
    plan = plan_of(module, (1, 1, 1))
    arrays = {name: torch.ones_like(tensor) for name, tensor in weights_of(module).items()}
    for times, slope in ((1, 0.85), (2, 0.7225)):
        settings = BlockSettings(16, "all", (0.85, 0.001), times, "delta")
        assert bank(plan, 0.5, settings)(arrays)["1.weight"].flatten().tolist() == pytest.approx([slope] * 2)
    assert PRESETS["paper"].block.activation_times == 1


def test_the_papers_preset_adds_every_array_to_its_projection_and_has_16_channels() -> None:
    # Trap: in the released code linear layers and vectors have no residual, and one channel.
    make, shape = NETS["mlp"]
    plan = plan_of(seeded(make), shape)
    paper = bank(plan, 0.5, PRESETS["paper"].block)
    released = bank(plan, 0.5, PRESETS["released-code"].block)
    assert all(block.residual and block.first.shape[1] == 16 for block in paper.blocks.values())
    assert not any(block.residual for block in released.blocks.values())


def test_an_array_that_is_no_matrix_of_units_is_refused() -> None:
    from fedplat.models.cutting import ArrayAxes, Axis

    third = ArrayAxes("odd", (2, 2, 4), (None, None, Axis("g")))
    plan = CutPlan.of([third])
    with pytest.raises(UserError, match="'odd'"):
        bank(plan, 0.5, BlockSettings())


# Fitting -------------------------------------------------------------------------------------------------


def split(n: int = 50, seed: int = 0) -> PublicSplit:
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(3, size=n))
    x = torch.nn.functional.one_hot(y, 3).float() + torch.from_numpy(rng.normal(0, 0.3, (n, 3))).float()
    return PublicSplit.of(x, y, np.random.default_rng(seed + 1))


def linear(values: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("nf,mfc->mnc", x, values.view(-1, 3, 3))


def test_a_fifth_of_the_servers_samples_chooses_and_is_never_fitted_on() -> None:
    # Trap: the released code chooses epochs and restarts by the test set.
    x = torch.arange(50.0)[:, None]
    data = PublicSplit.of(x, torch.zeros(50, dtype=torch.int64), np.random.default_rng(0))
    assert (len(data.y), len(data.choose_y)) == (40, 10)
    assert sorted([*data.x.flatten().tolist(), *data.choose_x.flatten().tolist()]) == list(range(50))
    seen: list[Tensor] = []

    def spying(values: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(x)
        return values[:, None, :1] * x[None] @ torch.ones(1, 2)

    fit(spying, torch.ones(1, 1), data, FitPlan(epochs=2), np.random.default_rng(0))
    assert set(torch.cat(seen).flatten().tolist()) == set(data.x.flatten().tolist())


def test_each_problem_is_fitted_as_if_alone() -> None:
    data, plan = split(), FitPlan(epochs=4, lr=0.05, batch_size=8)
    start = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 9))).float()
    together = fit(linear, start, data, plan, np.random.default_rng(3))
    for i in range(3):
        alone = fit(linear, start[i : i + 1], data, plan, np.random.default_rng(3))
        torch.testing.assert_close(together.values[i : i + 1], alone.values)
        assert together.epoch[i] == alone.epoch[0]
        assert together.loss[i] == pytest.approx(float(alone.loss[0]))
    assert together.steps == plan.steps(40) == 20


def test_a_cautious_fit_takes_what_the_samples_teach_and_not_what_was_chance() -> None:
    taught = split(100)
    labels = torch.from_numpy(np.random.default_rng(1).integers(3, size=100))
    nothing = PublicSplit(taught.x, labels[:80], taught.choose_x, labels[80:])
    bold, cautious = (FitPlan(epochs=8, lr=0.02, batch_size=16, cautious=c) for c in (False, True))
    start = torch.zeros(1, 9)
    for data, kept in ((taught, False), (nothing, True)):
        usual = fit(linear, start, data, bold, np.random.default_rng(0))
        careful = fit(linear, start, data, cautious, np.random.default_rng(0))
        assert usual.epoch[0] > 0  # the best of nine looks better than the start in both
        assert (int(careful.epoch[0]) == 0) == kept
        expected = start if kept else usual.values
        assert torch.equal(careful.values, expected)
        torch.testing.assert_close(careful.loss, judged(linear, expected, data)[0])


def test_fitting_is_torch_adam_and_keeps_the_epoch_that_the_choosing_part_likes_best() -> None:
    data, plan = split(), FitPlan(epochs=5, lr=0.3, batch_size=16, schedule="cosine", t_max=2, min_lr=0.01)
    layer = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2, 0.01)
    rng, best, states = np.random.default_rng(5), math.inf, []
    for _ in range(5):
        for batch in torch.from_numpy(rng.permutation(40)).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layer(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
        schedule.step()
        loss = nn.functional.cross_entropy(layer(data.choose_x), data.choose_y).item()
        if loss < best:
            best = loss
            states.append(layer.weight.detach().clone())
    fitted = fit(linear, torch.zeros(1, 9), data, plan, np.random.default_rng(5))
    torch.testing.assert_close(fitted.values.view(3, 3), states[-1].T, rtol=1e-4, atol=1e-5)
    assert float(fitted.loss) == pytest.approx(best, rel=1e-4)


def test_a_start_that_nothing_betters_is_kept_and_one_that_is_no_number_spoils_no_other() -> None:
    data = split()
    start = torch.stack([torch.eye(3).flatten() * 4, torch.full((9,), math.nan)])
    fitted = fit(linear, start, data, FitPlan(epochs=2, lr=50.0), np.random.default_rng(0))
    assert fitted.epoch.tolist() == [0, 0]
    assert torch.equal(fitted.values[0], start[0])
    assert not torch.isfinite(fitted.loss[1])
    assert judged(linear, start[:1], data)[1].item() > 0.9


def test_a_penalty_is_part_of_what_is_minimised() -> None:
    plan = FitPlan(epochs=30, lr=0.05)
    free, held = (
        fit(linear, torch.zeros(1, 9), split(), plan, np.random.default_rng(0), penalty).values.norm()
        for penalty in (None, lambda values: 10 * values.square().sum(1))
    )
    assert held < 0.2 * free


def test_losses_of_tokens_are_over_all_positions() -> None:
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(12).view(3, 4) % 5
    expected = [nn.functional.cross_entropy(one.flatten(0, 1), y.flatten()) for one in logits]
    torch.testing.assert_close(losses(logits, y), torch.stack(expected))


def test_names_and_vectors_go_to_and_fro() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([9.0])}
    named = Named.of(tensors)
    vector = named.join(tensors)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 9]
    assert all(torch.equal(named.split(vector[None])[name][0], tensor) for name, tensor in tensors.items())


def test_presets_are_changed_by_what_is_given() -> None:
    assert settings_of("paper") == PRESETS["paper"]
    changed = settings_of("paper", activation="none", init="delta", dilate="update", compress_epochs=3)
    assert changed.block == BlockSettings(16, "all", None, 1, "delta")
    assert (changed.dilate, changed.compress_plan.epochs, changed.dilate_plan.epochs) == ("update", 3, 20)
    assert changed.compress_plan.schedule == "cosine"
    assert settings_of("default", activation=(0.9, 0.3)).block.activation == (0.9, 0.3)
    assert settings_of("released-code", least_accuracy=0).compress_least == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(settings_of, "papers"), "preset = 'papers'"),
        (partial(checked_shares, (0.5, 1.0), None), "wide to narrow"),
        (partial(checked_shares, (1.5, 1.0), None), "at most 1"),
        (partial(checked_shares, (1.0, 0.5), (0.5, 0.6)), "sum is 1"),
        (partial(checked_shares, (1.0, 0.5), (1.0,)), "one for each of 2"),
        (partial(PublicSplit.of, torch.zeros(1), torch.zeros(1), np.random.default_rng(0)), "1 samples"),
    ],
)
def test_mistakes_are_told(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call()
