from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedplat.clients.attacks.base import Scene
from fedplat.clients.attacks.leakage import (
    Inversion,
    calibrated_scores,
    loss_scores,
    membership,
    same_labels,
    sample_losses,
)
from fedplat.clients.attacks.leakage.membership import auc, tpr_at
from fedplat.clients.attacks.leakage.study import (
    MEAN,
    NOISE,
    NOTHING,
    TRUTH,
    Noise,
    Samples,
    World,
    inversions,
    memberships,
    names_of,
    overlap,
)
from fedplat.errors import UserError
from fedplat.experiments.benchmarks import leakage as benchmark
from fedplat.experiments.benchmarks.common import Report
from fedplat.models import build
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.training_config import LocalTraining

SHAPE, CLASSES = (1, 6, 6), 4
LONG = LocalTraining(epochs=40, batch_size=10, lr=0.3)
UPLOADS = {"all": None, "last": ("fc3",)}


def world(seed: int = 0, pool: int = 400) -> World:
    """Images whose labels have nothing to do with them: what is learnt of them is learnt by heart."""
    rng = np.random.default_rng(seed)
    model = FlatModel(build(mlp, SHAPE, CLASSES, 1, hidden=(64, 32, 16)))
    sides = []
    for count in (pool, 200):
        x = torch.from_numpy(rng.normal(size=(count, *SHAPE)).astype(np.float32))
        sides.append(Samples(x, torch.from_numpy(rng.integers(CLASSES, size=count))))
    return World(model, Scene(0, CLASSES, (0.5,), (0.25,), SHAPE), *sides)


# Scores and figures ----------------------------------------------------------------------------------------


def test_auc_by_hand_and_by_pairs() -> None:
    assert auc([3, 4], [1, 2]) == 1
    assert auc([1, 2], [3, 4]) == 0
    assert auc([1, 1, 1], [1, 1]) == 0.5
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 8, 30), rng.integers(0, 6, 41)
    pairs = [(x > y) + (x == y) / 2 for x in a for y in b]
    assert auc(a, b) == pytest.approx(np.mean(pairs))


def test_identical_distributions_give_one_half() -> None:
    scores = np.random.default_rng(0).normal(size=2000)
    assert auc(scores, scores) == 0.5
    found = membership(scores[:1000], scores[1000:], np.random.default_rng(1), draws=200)
    assert found.auc_range[0] < 0.5 < found.auc_range[1]
    assert found.auc_range[1] - found.auc_range[0] < 0.06
    assert found.tpr < 0.04


@given(st.lists(st.integers(-9, 9), min_size=1), st.lists(st.integers(-9, 9), min_size=1))
def test_auc_keeps_its_value_under_growing_maps_and_turns_around(a: list[int], b: list[int]) -> None:
    assert auc(a, b) == pytest.approx(auc([x**3 for x in a], [x**3 for x in b]))
    assert auc(a, b) + auc(b, a) == pytest.approx(1)


def test_the_threshold_lets_no_more_through_than_allowed() -> None:
    others = np.arange(200.0)
    assert tpr_at([196.5, 197.5, 198.5, 500], others, 0.01) == 0.75
    # Ties are not told apart, so none of them counts.
    assert tpr_at([1.0, 1.0], np.ones(100), 0.01) == 0


def test_the_same_draws_give_the_same_ranges() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 150))
    first, second = (membership(a + 1, b, np.random.default_rng(5), draws=50) for _ in range(2))
    assert first == second
    assert first.auc_range[0] <= first.auc <= first.auc_range[1]


def test_bootstrap_ranges_are_those_of_samples_drawn_one_by_one() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 40, 120) + 8, rng.integers(0, 40, 150)
    found = membership(a, b, np.random.default_rng(1), 0.05, 2000)
    draws = [(rng.choice(a, 120), rng.choice(b, 150)) for _ in range(2000)]
    for value, pairs in (
        (found.auc_range, [auc(*pair) for pair in draws]),
        (found.tpr_range, [tpr_at(*pair, 0.05) for pair in draws]),
    ):
        assert value == pytest.approx(tuple(np.quantile(pairs, (0.025, 0.975))), abs=0.02)


def test_calibration_takes_out_how_hard_a_sample_is() -> None:
    hard = np.random.default_rng(0).exponential(5, 400)
    losses = hard.copy()
    losses[:200] -= 0.1  # members are only a little better known than they were
    assert auc(loss_scores(losses)[:200], loss_scores(losses)[200:]) < 0.6
    scores = calibrated_scores(losses, hard)
    assert auc(scores[:200], scores[200:]) == 1


def test_others_have_the_members_labels_and_are_none_of_them() -> None:
    labels = np.random.default_rng(0).integers(5, size=300)
    members, others = same_labels(labels, 60, np.random.default_rng(1))
    assert not set(members) & set(others)
    assert len(set(others)) == 60
    assert np.array_equal(np.bincount(labels[members]), np.bincount(labels[others]))


def test_losses_are_those_of_the_weights_given() -> None:
    here = world()
    zero = here.model.layout.new()
    losses = sample_losses(here.model, zero, here.private.x, here.private.y, batch_size=7)
    assert losses == pytest.approx(np.full(400, np.log(CLASSES)))


# The study -------------------------------------------------------------------------------------------------


def test_an_overfit_client_gives_its_members_away_and_one_that_learnt_nothing_does_not() -> None:
    here = world()
    sent = here.weights()
    found = memberships(here, sent, UPLOADS, 50, 2, 1, LONG, 3)
    assert list(found) == [NOTHING, "all", "last"]
    assert found[NOTHING].scores["loss"].auc_range[0] < 0.5 < found[NOTHING].scores["loss"].auc_range[1]
    assert found["all"].scores["loss"].auc > 0.95
    # Random labels are learnt by heart by the references too, so what they say is noisy.
    assert found["all"].scores["calibrated"].auc > 0.6
    assert found["last"].scores["loss"].auc < found["all"].scores["loss"].auc
    assert found["all"].accuracy < 0.5
    idle = LocalTraining(steps=1, lr=1e-6)
    none = memberships(here, sent, {"all": None}, 50, 2, 0, idle, 3)["all"].scores["loss"]
    assert none.auc_range[0] < 0.5 < none.auc_range[1]


def test_noise_hides_members_and_images() -> None:
    here = world()
    sent = here.weights()
    found = [
        memberships(here, sent, {"all": None}, 50, 2, 1, LONG, 3, Noise(20.0, value))["all"]
        .scores["loss"]
        .auc
        for value in (0.0, 1.0)
    ]
    assert found[0] > 0.95
    assert found[1] < 0.65
    step, search = LocalTraining(steps=1, lr=0.1), Inversion(60, 1, 0.1, 0.0)
    errors = [
        np.mean(inversions(here, sent, {"all": None}, 1, 2, step, search, 3, Noise(1.0, value))["all"].mse)
        for value in (0.0, 1.0)
    ]
    assert errors[1] > 2 * errors[0]


def test_an_inversion_study_has_the_guesses_beside_the_uploads() -> None:
    here = world()
    sent = here.weights()
    step, search = LocalTraining(steps=1, lr=0.1), Inversion(40, 1, 0.1, 0.0)
    found = inversions(here, sent, UPLOADS, 2, 2, step, search, 3)
    assert list(found) == [TRUTH, MEAN, NOISE, *UPLOADS]
    assert found[TRUTH].mse == [0.0] * 4
    assert found[MEAN].beats_mean == [0.0] * 4
    assert len(found["all"].psnr) == 4
    assert len(found["all"].labels) == 2
    # Every upload has the head, which is all that tells labels.
    assert found["all"].labels == found["last"].labels
    assert inversions(here, sent, UPLOADS, 2, 2, step, search, 3)["last"].mse == found["last"].mse


def test_labels_are_counted_as_often_as_they_are_there() -> None:
    assert overlap(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)
    assert overlap(torch.tensor([0]), torch.tensor([9])) == 0


def test_layer_sets_are_named_by_their_layers() -> None:
    assert names_of(world(), {"LowerB": [(0,), (2,)], "OPU2": [(2, 0)]}) == {
        "LowerB: fc1": ("fc1",),
        "LowerB: fc3": ("fc3",),
        "OPU2: fc1+fc3": ("fc1", "fc3"),
    }


# The benchmark ---------------------------------------------------------------------------------------------


def test_the_benchmark_takes_every_set_of_the_rotation_once() -> None:
    here = world()
    deep = FlatModel(build(mlp, SHAPE, CLASSES, 1, hidden=(8, 8, 8, 8)))
    kinds = benchmark.by_kind(
        [{"upload": n} for n in benchmark.uploads_of(World(deep, here.scene, here.private, here.public))]
    )
    assert {kind: len(rows) for kind, rows in kinds.items()} == {
        "FedAvg": 1,
        "LowerB": 4,
        "OPU2": 4,
        "OPU3": 4,
    }
    # With three hidden layers OPU3 is the whole model, so it has no rows of its own.
    assert "OPU3" not in benchmark.by_kind([{"upload": name} for name in benchmark.uploads_of(here)])


def test_the_benchmark_fills_all_its_sections(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(benchmark, "world_of", lambda model, options: (world(), "noise images"))
    options = benchmark.Options(
        models=("mlp",), batches=(1, 2), repeats=1, iterations=2, samples=50, clients=2, references=1,
        epochs=1, public=200, pretraining=1, noises=(0.0, 1.0), keep=tmp_path / "new",
    )  # fmt: skip
    benchmark.check(options)
    report = Report("leakage", {})
    benchmark.measure(options, report)
    assert len(report.sections) == 7
    for section in report.sections:
        assert section.rows
        assert all(set(section.columns) == set(row) for row in section.rows)
    whole = next(row for row in report.sections[0].rows if row["upload"] == benchmark.WHOLE)
    assert whole["share %"] == 100
    assert (tmp_path / "new" / "reconstructions-mlp.png").stat().st_size > 1000


def test_a_part_of_the_benchmark_does_not_depend_on_the_parts_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "world_of", lambda model, options: (world(), "noise images"))
    found = []
    for parts in (("membership",), ("inversion", "membership")):
        options = benchmark.Options(
            models=("mlp",), batches=(1,), repeats=1, iterations=1, samples=50, clients=2, references=0,
            epochs=1, public=200, pretraining=1, parts=parts,
        )  # fmt: skip
        report = Report("leakage", {})
        benchmark.measure(options, report)
        found.append(report.sections[-2].rows)
    assert found[0] == found[1]


def test_options_of_the_benchmark_that_make_no_sense_are_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for wrong, what in (
        ({"batches": (0,)}, "1 to 64"),
        ({"samples": 20}, "too few"),
        ({"samples": 800}, "at least twice"),
        ({"models": ("cnn-cifer",)}, "did you mean 'cnn-cifar'"),
        ({"iterations": 0}, "1 or more iterations"),
        ({"parts": ("inversions",)}, "did you mean 'inversion'"),
        ({"keep": tmp_path}, "exists already"),
    ):
        with pytest.raises(UserError, match=what):
            benchmark.check(benchmark.Options(**wrong))  # type: ignore[arg-type]


# Bad inputs ------------------------------------------------------------------------------------------------


def test_figures_of_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="at least one member"):
        auc([], [1.0])
    with pytest.raises(UserError, match="none of them NaN"):
        auc([np.nan], [1.0])
    with pytest.raises(UserError, match="cannot be told from 99 samples"):
        tpr_at([1.0], np.zeros(99), 0.01)
    with pytest.raises(UserError, match="between 0 and 1"):
        tpr_at([1.0], np.zeros(99), 1.5)
    with pytest.raises(UserError, match="draws"):
        membership(np.zeros(5), np.zeros(100), np.random.default_rng(0), draws=0)
    with pytest.raises(UserError, match="references"):
        calibrated_scores([1.0, 2.0], [[1.0]])


def test_samples_that_are_too_few_are_refused() -> None:
    labels = np.array([0] * 18 + [1])
    with pytest.raises(UserError, match="cannot be drawn from 19"):
        same_labels(labels, 11, np.random.default_rng(0))
    with pytest.raises(UserError, match="has too few samples"):
        same_labels(np.arange(10), 5, np.random.default_rng(0))


def test_worlds_and_studies_that_make_no_sense_are_refused() -> None:
    here = world()
    batch_norm = FlatModel(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 4)))
    with pytest.raises(UserError, match="without BatchNorm"):
        World(batch_norm, here.scene, here.private, here.public)
    with pytest.raises(UserError, match="1 to 64 images"):
        inversions(here, here.weights(), UPLOADS, 0, 1, LONG, Inversion(1), 1)
    with pytest.raises(UserError, match="1 or more clients"):
        memberships(here, here.weights(), UPLOADS, 50, 0, 0, LONG, 1)
    with pytest.raises(UserError, match="and there are 200"):
        memberships(here, here.weights(), UPLOADS, 201, 1, 1, LONG, 1)
