from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.ndimage import correlate

from fedplat.clients.attacks import Attack
from fedplat.clients.attacks.unreliable import Blur, FewSteps, LowResolution, gaussian_kernel
from fedplat.errors import UserError
from fedplat.rng import seeded_torch
from fedplat.training_config import LocalTraining
from fedplat.verdicts import UNRELIABLE

from .test_data_attacks import clean, outcome, rng

Y = torch.arange(4)


def images(channels: int = 1, edge: int = 9) -> torch.Tensor:
    with seeded_torch(3, "test"):
        return torch.randn(4, channels, edge, edge)


@pytest.mark.parametrize(("size", "sigma"), [(5, 30.0), (7, 50.0)])
def test_the_kernels_of_mud_hog_are_boxes_within_half_a_percent(size: int, sigma: float) -> None:
    kernel = gaussian_kernel(size, sigma)
    assert float(kernel.sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(kernel, torch.full((size, size), 1 / size**2), rtol=5e-3, atol=0)
    assert float(kernel[0, 0]) < float(kernel[size // 2, size // 2])


def test_the_kernel_is_the_gaussian_by_hand() -> None:
    # e^(-1/2) = .606531 and e^(-1) = .367879 around 1; together 4.897640.
    row = [0.606531 / 4.897640, 1 / 4.897640, 0.606531 / 4.897640]
    assert gaussian_kernel(3, 1.0)[1].tolist() == pytest.approx(row, abs=1e-6)
    assert float(gaussian_kernel(3, 1.0)[0, 0]) == pytest.approx(0.367879 / 4.897640, abs=1e-6)


def test_a_single_bright_pixel_becomes_a_box() -> None:
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 4] = 1
    expected = torch.zeros(1, 1, 9, 9)
    expected[0, 0, 2:7, 2:7] = 1 / 25
    torch.testing.assert_close(Blur().blurred(x), expected, rtol=4e-3, atol=0)


def test_edges_are_mirrored_without_repeating_them() -> None:
    x = torch.tensor([0.0, 1, 2, 3]).expand(1, 1, 4, 4)
    found = Blur(kernel=3, sigma=1e6, padding=1).blurred(x)[0, 0, 2]
    # Zero padding would give 1/3 at the left, repeating the edge 1/3 as well: (1 + 0 + 1) / 3.
    assert found.tolist() == pytest.approx([2 / 3, 1, 2, 7 / 3], abs=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_blur_agrees_with_scipy_in_every_channel(channels: int) -> None:
    x = images(channels)
    before = x.clone()
    found = Blur(kernel=5, sigma=1.5, padding=2).blurred(x)
    kernel = gaussian_kernel(5, 1.5).numpy()
    for i in range(4):
        for c in range(channels):
            expected = correlate(x[i, c].numpy(), kernel, mode="mirror")
            np.testing.assert_allclose(found[i, c].numpy(), expected, atol=1e-5)
    assert torch.equal(x, before)


def test_the_setting_for_mnist_leaves_30_of_32_pixels() -> None:
    blur = Blur(kernel=7, sigma=50.0, padding=2)
    assert blur.blurred(torch.zeros(2, 1, 32, 32)).shape == (2, 1, 30, 30)
    assert Blur().blurred(torch.zeros(2, 1, 28, 28)).shape == (2, 1, 28, 28)


def test_batches_are_skipped_blurred_or_left_with_the_stated_probabilities() -> None:
    x, blur, draws = images(), Blur(), rng()
    seen = Counter()
    for _ in range(2000):
        batch = blur.on_batch(x, Y, draws)
        seen["skipped" if batch is None else "clean" if batch[0] is x else "blurred"] += 1
        assert batch is None or batch[1] is Y
    # 1400, 300, 300; standard deviations 20 and 16.
    assert seen["skipped"] == pytest.approx(1400, abs=82)
    assert seen["blurred"] == pytest.approx(300, abs=64)
    assert seen["clean"] == pytest.approx(300, abs=64)


def test_a_batch_is_blurred_whole_and_the_same_for_the_same_draw() -> None:
    x, always = images(), Blur(skip=0.0, blur=1.0)
    (found, _) = always.on_batch(x, Y, rng()) or (None, None)
    assert torch.equal(found, always.blurred(x))
    assert Blur(skip=1.0).on_batch(x, Y, rng()) is None
    first, second = ([Blur().on_batch(x, Y, r) is None for _ in range(20)] for r in (rng(5), rng(5)))
    assert first == second


@pytest.mark.parametrize(("kernel", "padding", "edge"), [(5, 2, 2), (9, 0, 8), (3, 4, 4)])
def test_images_too_small_to_blur_are_refused(kernel: int, padding: int, edge: int) -> None:
    with pytest.raises(UserError, match=f"kernel {kernel} and padding {padding} on images {edge}x{edge}"):
        Blur(kernel=kernel, padding=padding).blurred(torch.zeros(1, 1, edge, edge))


def test_text_has_no_resolution() -> None:
    tokens = torch.ones(4, 20, dtype=torch.int64)
    with pytest.raises(UserError, match="attack Blur: works on images"):
        Blur(skip=0.0, blur=1.0).on_batch(tokens, tokens, rng())
    with pytest.raises(UserError, match="attack LowResolution: works on images"):
        LowResolution().on_data(tokens, tokens, rng())


def test_blocks_are_filled_with_their_means() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    coarse, _ = LowResolution(factor=2).on_data(x, Y[:1], rng())
    assert coarse[0, 0].tolist() == [[2.5, 2.5, 4.5, 4.5]] * 2 + [[10.5, 10.5, 12.5, 12.5]] * 2
    assert x[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(LowResolution(factor=1).on_data(x, Y[:1], rng())[0], x)
    assert LowResolution(factor=9).on_data(x, Y[:1], rng())[0].unique().tolist() == [7.5]


def test_edges_that_the_factor_does_not_divide_keep_their_length() -> None:
    coarse, _ = LowResolution(factor=4).on_data(images(3, edge=9), Y, rng())
    assert coarse.shape == (4, 3, 9, 9)
    assert len(coarse[0, 0].unique()) <= 9


def test_only_the_drawn_share_loses_resolution() -> None:
    x = images()
    coarse, y = LowResolution(factor=3, share=0.5).on_data(x, Y, rng())
    changed = (coarse != x).flatten(1).any(dim=1)
    assert changed.sum() == 2
    assert torch.equal(coarse[~changed], x[~changed])
    assert y is Y
    assert torch.equal(LowResolution(share=0.0).on_data(x, Y, rng())[0], x)


def test_few_steps_changes_the_number_of_steps_alone() -> None:
    honest = LocalTraining(epochs=3, lr=0.2, momentum=0.9)
    changed = FewSteps(steps=2).on_training(honest)
    assert changed == LocalTraining(epochs=3, steps=2, lr=0.2, momentum=0.9)
    assert honest.steps is None


def test_unreliable_clients_are_not_malicious() -> None:
    assert Blur.kind == LowResolution.kind == FewSteps.kind == UNRELIABLE
    assert not FewSteps().goal()


@pytest.mark.parametrize(
    "attack", [Blur(), LowResolution(), FewSteps()], ids=lambda attack: type(attack).__name__
)
def test_unreliable_clients_hold_the_mean_back(attack: Attack) -> None:
    attacked = outcome(attack)
    assert attacked.accuracy < clean().accuracy - 0.02
    assert attacked.loss > clean().loss + 0.15
    assert all(report.status == "accepted" for report in attacked.reports)


def test_a_client_that_skips_every_batch_sends_the_model_it_got() -> None:
    norms = [report.update_norm for report in outcome(Blur(skip=1.0), num_rounds=1).reports]
    assert norms[:3] == [0, 0, 0]
    assert min(norms[3:]) > 0.1


def test_few_steps_are_taken_and_move_less() -> None:
    norms = [report.update_norm for report in outcome(FewSteps(), num_rounds=1).reports]
    # One of six batches.
    assert 0 < max(norms[:3]) < 0.35 * min(norms[3:])
