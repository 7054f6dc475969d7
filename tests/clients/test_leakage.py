from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedplat.arrays import FlatArrays
from fedplat.clients.attacks.base import Scene
from fedplat.clients.attacks.leakage import (
    Inversion,
    Upload,
    class_means,
    input_of,
    invert,
    labels_of,
    matched,
    mse,
    nearest,
    protected,
    psnr,
    ssim,
    upload_of,
)
from fedplat.clients.attacks.leakage.inversion import distance, total_variation
from fedplat.clients.attacks.leakage.upload import simulated, tensors_of
from fedplat.clients.training import train_one
from fedplat.errors import UserError
from fedplat.models import build, loss_fn
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.flat import FlatModel
from fedplat.training_config import LocalTraining

SHAPE, CLASSES, LR = (1, 6, 6), 4, 0.1
SCENE = Scene(0, CLASSES, (0.4,), (0.5,), SHAPE)


def net(seed: int = 1, hidden: tuple[int, ...] = (16, 12, 12, 12)) -> FlatModel:
    return FlatModel(build(mlp, SHAPE, CLASSES, seed, hidden=hidden))


def weights(model: FlatModel) -> FlatArrays:
    copy = model.layout.new()
    model.store(copy)
    return copy


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.uniform(0, 1, (count, *SHAPE)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(CLASSES, size=count))


def one_client(
    model: FlatModel, count: int = 1, steps: int = 1, seed: int = 0
) -> tuple[FlatArrays, FlatArrays, Tensor, Tensor]:
    """Return what was sent, what a client made of it, and the client's pixels and labels."""
    pixels, y = images(count, seed)
    sent = weights(model)
    training = LocalTraining(steps=steps, batch_size=count, lr=LR)
    train_one(model, training, SCENE.prepared(pixels), y, np.random.default_rng(0))
    return sent, weights(model), pixels, y


# What is uploaded ------------------------------------------------------------------------------------------


def test_an_upload_holds_its_layers_and_the_head_and_nothing_else() -> None:
    sent, trained, _, _ = one_client(net())
    upload = upload_of(sent, trained, ["fc2"], LR)
    assert set(upload.gradient) == {"fc2.weight", "fc2.bias", "fc5.weight", "fc5.bias"}
    assert upload.returned.layout.dim == 16 * 12 + 12 + 12 * 4 + 4


def test_what_was_left_out_does_not_change_what_the_server_sees() -> None:
    sent, trained, _, y = one_client(net())
    other = FlatArrays(trained.layout, trained.vector.copy(), trained.side.copy())
    for name in ("fc1.weight", "fc2.weight", "fc4.bias"):
        other.view(name)[...] += 1
    found = [
        invert(
            net().module, upload_of(sent, one, ["fc3"], LR), y, SCENE, Inversion(5), np.random.default_rng(1)
        )
        for one in (trained, other)
    ]
    assert torch.equal(found[0].pixels, found[1].pixels)
    assert found[0].objective == found[1].objective


def test_the_server_completes_the_model_with_what_it_sent() -> None:
    sent, trained, _, _ = one_client(net())
    completed = upload_of(sent, trained, ["fc3"], LR).completed
    for entry in sent.layout.entries:
        source = trained if entry.name.startswith(("fc3", "fc5")) else sent
        assert np.array_equal(completed.view(entry.name), source.view(entry.name))
    assert np.array_equal(upload_of(sent, trained, None, LR).completed.vector, trained.vector)


def test_the_gradient_of_one_step_is_that_of_the_loss() -> None:
    model = net()
    sent, trained, pixels, y = one_client(model, 3)
    model.load(sent)
    parameters = dict(model.module.named_parameters())
    exact = torch.autograd.grad(loss_fn(model.module(SCENE.prepared(pixels)), y), list(parameters.values()))
    found = upload_of(sent, trained, None, LR).gradient
    for name, value in zip(parameters, exact, strict=True):
        assert torch.allclose(found[name], value, atol=2e-6), name


@pytest.mark.parametrize("steps", [1, 3])
def test_the_server_simulates_the_clients_training(steps: int) -> None:
    model = net()
    sent, trained, pixels, y = one_client(model, 2, steps)
    upload = upload_of(sent, trained, ["fc2", "fc4"], LR, steps)
    x = SCENE.prepared(pixels)
    guess = simulated(model.module, tensors_of(sent), upload.gradient.keys(), x, y, LR, steps)
    assert guess.keys() == upload.gradient.keys()
    assert float(distance(upload.gradient, {n: g.detach() for n, g in guess.items()}, "l2")) < 1e-7


def test_clipping_bounds_the_update_and_noise_has_its_deviation() -> None:
    model = net(hidden=(200, 200))
    sent, trained, _, _ = one_client(model)
    clipped = protected(sent, trained, 0.01, 0, np.random.default_rng(0))
    assert np.linalg.norm(clipped.vector - sent.vector) == pytest.approx(0.01, rel=1e-4)
    noisy = protected(sent, trained, 0.01, 3.0, np.random.default_rng(0))
    assert np.std(noisy.vector - clipped.vector) == pytest.approx(0.03, rel=0.02)
    assert np.array_equal(protected(sent, trained, 1e3, 0, np.random.default_rng(0)).vector, trained.vector)


# Labels and closed forms -----------------------------------------------------------------------------------


def test_one_samples_label_is_the_negative_entry() -> None:
    # softmax of (0, 0, ln 2) is (1/4, 1/4, 1/2); the label 1 takes 1 off its own.
    gradient = torch.tensor([0.25, 0.25 - 1, 0.5])
    assert labels_of(gradient, 1).tolist() == [1]
    # The head's weight has the inputs (2, 0, 3) times that.
    assert labels_of(gradient[:, None] * torch.tensor([2.0, 0.0, 3.0]), 1).tolist() == [1]


@pytest.mark.parametrize("seed", range(8))
def test_one_samples_label_is_found_in_every_upload(seed: int) -> None:
    model = net(seed)
    sent, trained, _, y = one_client(model, seed=seed)
    for layers in (None, ["fc1"], ["fc3", "fc4"]):
        gradient = upload_of(sent, trained, layers, LR).gradient
        assert labels_of(gradient["fc5.bias"], 1).tolist() == y.tolist()
        assert labels_of(gradient["fc5.weight"], 1).tolist() == y.tolist()


def test_repeated_labels_are_counted_exactly_where_the_mean_softmax_is_known() -> None:
    softmax = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    truth = torch.tensor([2, 2, 0])
    gradient = (softmax - nn.functional.one_hot(truth, 4)).mean(dim=0)
    assert labels_of(gradient, 3, softmax.mean(dim=0)).tolist() == [0, 2, 2]
    assert labels_of(gradient, 3).tolist() == [0, 2, 2]


def test_a_linear_softmax_models_input_is_recovered_in_closed_form() -> None:
    model = FlatModel(build(softmax_regression, SHAPE, CLASSES, 1))
    sent, trained, pixels, y = one_client(model)
    gradient = upload_of(sent, trained, None, LR).gradient
    found = SCENE.pixels(input_of(gradient["fc.weight"], gradient["fc.bias"]).view(1, *SHAPE))
    assert float(mse(pixels, found)) < 1e-8
    assert labels_of(gradient["fc.bias"], 1).tolist() == y.tolist()


def test_a_first_linear_layer_gives_the_image_away_and_later_ones_only_features() -> None:
    model = net()
    sent, trained, pixels, _ = one_client(model)
    first = upload_of(sent, trained, ["fc1"], LR).gradient
    found = SCENE.pixels(input_of(first["fc1.weight"], first["fc1.bias"]).view(1, *SHAPE))
    assert float(mse(pixels, found)) < 1e-6
    later = upload_of(sent, trained, ["fc2"], LR).gradient
    features = input_of(later["fc2.weight"], later["fc2.bias"])
    model.load(sent)
    assert torch.allclose(features, model.module[:3](SCENE.prepared(pixels))[0], atol=1e-3)


# The search ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("match", ["cosine", "l2"])
def test_the_search_finds_the_image_of_a_smooth_network(match: str) -> None:
    layers = [nn.Flatten(), nn.Linear(36, 24), nn.Sigmoid(), nn.Linear(24, CLASSES)]
    model = FlatModel(build(lambda shape, classes: nn.Sequential(*layers), SHAPE, CLASSES, 3))
    sent, trained, pixels, y = one_client(model)
    settings = Inversion(300, 1, 0.05, 0.0, match, signed=False)  # type: ignore[arg-type]
    upload = upload_of(sent, trained, None, LR)
    found = invert(model.module, upload, y, SCENE, settings, np.random.default_rng(7))
    assert float(mse(pixels, found.pixels)) < 1e-2
    assert found.objective < 1e-2


def test_the_search_gets_nearer_with_relu_and_several_images_too() -> None:
    model = net(hidden=(64, 32))
    sent, trained, pixels, y = one_client(model, 2)
    upload = upload_of(sent, trained, None, LR)
    settings = Inversion(200, 1, 0.1, 0.0)
    found = invert(model.module, upload, y, SCENE, settings, np.random.default_rng(7))
    start = torch.from_numpy(np.random.default_rng(7).uniform(0, 1, pixels.shape).astype(np.float32))
    assert mse(pixels, matched(pixels, found.pixels)).mean() < 0.5 * mse(pixels, start).mean()


def test_the_search_sees_through_several_local_steps() -> None:
    model = net(hidden=(64, 32))
    sent, trained, pixels, y = one_client(model, 1, steps=4)
    upload = upload_of(sent, trained, None, LR, 4)
    found = invert(model.module, upload, y, SCENE, Inversion(150, 1, 0.1, 0.0), np.random.default_rng(7))
    assert float(mse(pixels, found.pixels)) < 0.03


def test_a_search_repeats_and_leaves_everything_as_it_is() -> None:
    model = net()
    sent, trained, _, y = one_client(model)
    before, own = sent.vector.copy(), model.vector.clone()
    upload = upload_of(sent, trained, ["fc1"], LR)
    pair = [invert(model.module, upload, y, SCENE, Inversion(8), np.random.default_rng(4)) for _ in range(2)]
    assert torch.equal(pair[0].pixels, pair[1].pixels)
    assert np.array_equal(sent.vector, before)
    assert torch.equal(model.vector, own)
    assert 0 <= float(pair[0].pixels.min()) <= float(pair[0].pixels.max()) <= 1


def test_more_starts_never_reach_a_higher_objective() -> None:
    model = net()
    sent, trained, _, y = one_client(model)
    upload = upload_of(sent, trained, ["fc3"], LR)
    found = [
        invert(model.module, upload, y, SCENE, Inversion(8, n), np.random.default_rng(4)) for n in (1, 3)
    ]
    assert found[1].objective <= found[0].objective


def test_total_variation_by_hand() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]])
    assert float(total_variation(image)) == pytest.approx((0.5 + 0.5) / 2 + (1 + 0) / 2)


# Quality ---------------------------------------------------------------------------------------------------


def test_errors_by_hand_and_equal_images_are_perfect() -> None:
    a = torch.zeros(2, 1, 12, 12)
    b = a + torch.tensor([0.5, 0.0]).view(2, 1, 1, 1)
    assert mse(a, b).tolist() == [0.25, 0.0]
    assert psnr(a, b).tolist() == pytest.approx([10 * math.log10(4), 100])
    # Flat images of means 0 and 1/2: no variance, so only the first factor counts.
    assert ssim(a, b).tolist() == pytest.approx([1e-4 / (0.25 + 1e-4), 1.0])


def test_ssim_agrees_with_a_loop_over_windows() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.uniform(size=(2, 13, 14))
    at = np.arange(11) - 5
    window = np.exp(-(at[:, None] ** 2 + at**2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for i in range(3):
        for j in range(4):
            x, y = a[i : i + 11, j : j + 11], b[i : i + 11, j : j + 11]
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            both = (window * (x - mx) * (y - my)).sum()
            top = (2 * mx * my + 1e-4) * (2 * both + 9e-4)
            values.append(top / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    pair = [torch.from_numpy(image)[None, None] for image in (a, b)]
    assert float(ssim(*pair)) == pytest.approx(np.mean(values), abs=1e-6)


def test_reconstructions_are_matched_whatever_their_order() -> None:
    truth, _ = images(5)
    shuffled = truth[torch.tensor([3, 1, 4, 0, 2])] + 0.01
    assert torch.allclose(matched(truth, shuffled), truth + 0.01)
    # One candidate may be nearest to all, but a reconstruction is used once.
    same = nearest(truth, truth[:1])
    assert torch.equal(same, truth[:1].expand(5, -1, -1, -1))


def test_class_means_by_hand() -> None:
    x = torch.tensor([0.0, 1.0, 4.0]).view(3, 1, 1, 1)
    assert class_means(x, torch.tensor([2, 2, 7])).flatten().tolist() == [0.5, 4.0]


# Bad inputs ------------------------------------------------------------------------------------------------


def test_uploads_that_make_no_sense_are_refused() -> None:
    sent, trained, _, _ = one_client(net())
    with pytest.raises(UserError, match="did you mean 'fc2'"):
        upload_of(sent, trained, ["fc22"], LR)
    with pytest.raises(UserError, match="lr above 0 and 1 step"):
        upload_of(sent, trained, None, 0.0)
    with pytest.raises(UserError, match="none of the model sent"):
        Upload(sent, FlatArrays.copy_of({"other": np.zeros(3, np.float32)}), LR)
    trained.vector[7] = np.inf
    with pytest.raises(UserError, match="not finite"):
        upload_of(sent, trained, None, LR)
    with pytest.raises(UserError, match="clip = 0"):
        protected(sent, sent, 0.0, 1.0, np.random.default_rng(0))


def test_labels_that_cannot_be_inferred_are_refused() -> None:
    with pytest.raises(UserError, match="1 to 64 samples"):
        labels_of(torch.zeros(3), 0)
    with pytest.raises(UserError, match="bias"):
        labels_of(torch.zeros(3, 2), 2)
    with pytest.raises(UserError, match="finite"):
        labels_of(torch.tensor([math.nan, 0.0]), 1)
    with pytest.raises(UserError, match="expected 3 mean"):
        labels_of(torch.tensor([0.5, -0.5, 0.0]), 2, torch.zeros(4))
    with pytest.raises(UserError, match="no gradient"):
        input_of(torch.ones(2, 3), torch.zeros(2))
    with pytest.raises(UserError, match="linear layer"):
        input_of(torch.ones(2, 3, 3), torch.zeros(2))


def test_searches_that_cannot_work_are_refused() -> None:
    model = net()
    sent, trained, _, y = one_client(model)
    upload, rng = upload_of(sent, trained, None, LR), np.random.default_rng(0)
    with pytest.raises(UserError, match="no gradient to invert"):
        invert(model.module, upload_of(sent, sent, None, LR), y, SCENE, Inversion(1), rng)
    with pytest.raises(UserError, match="these data are none"):
        invert(model.module, upload, y, Scene(sample_shape=(8,)), Inversion(1), rng)
    with pytest.raises(UserError, match="BatchNorm"):
        invert(nn.BatchNorm2d(1), upload, y, SCENE, Inversion(1), rng)
    for wrong in ({"iterations": 0}, {"lr": 0.0}, {"tv": -1.0}, {"match": "cos"}):
        with pytest.raises(UserError):
            Inversion(**wrong)  # type: ignore[arg-type]


def test_images_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(UserError, match="one shape"):
        mse(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 3))
    with pytest.raises(UserError, match="no mean image"):
        class_means(torch.zeros(0, 1, 2, 2), torch.zeros(0))
