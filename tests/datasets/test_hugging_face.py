from __future__ import annotations

import doctest
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedplat import experiment
from fedplat.config import load
from fedplat.datasets import hub, hub_images, hugging_face, hugging_face_partitions
from fedplat.datasets.base import Dataset, Source
from fedplat.datasets.hub import installed
from fedplat.engines import LocalEngine
from fedplat.errors import UserError
from fedplat.registry import find
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.summary import summarise

if importlib.util.find_spec("flwr_datasets") is None:
    pytest.skip("needs flwr-datasets", allow_module_level=True)

GREY = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
LABELS = [0, 1, 2] * 4
NAMES = ["ant", "bee", "cat"]


def images(pixels: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(image) for image in pixels]


def split(pixels: np.ndarray = GREY, labels: list[Any] | None = None, **more: list[Any]) -> Any:
    hf = installed()
    values = {"image": images(pixels), "label": LABELS if labels is None else labels, **more}
    kinds = {name: hf.Value("string" if isinstance(v[0], str) else "int64") for name, v in more.items()}
    kind = hf.ClassLabel(names=NAMES)
    return hf.Dataset.from_dict(values, hf.Features({"image": hf.Image(), "label": kind, **kinds}))


def saved(path: Path, **splits: Any) -> str:
    installed().DatasetDict(splits).save_to_disk(str(path))
    return f"hf:{path}"


def loaded(
    name: str, tmp_path: Path, root: Path | None = None, download: bool = False, **given: Any
) -> Dataset:
    source = Source(root=root, cache=tmp_path / "cache", download=download, seed=3)
    dataset: Dataset = find("datasets", name).load()(source, **given)
    return dataset


# Data sets -------------------------------------------------------------------------------------------------


def test_images_of_a_saved_folder_arrive_as_they_were_with_names_and_own_statistics(tmp_path: Path) -> None:
    name = saved(tmp_path / "set", train=split(), test=split(GREY[:3], [2, 0, 1]))
    data = loaded(name, tmp_path)
    np.testing.assert_array_equal(data.train.x, GREY)
    assert data.train.x.dtype == np.uint8
    assert data.train.y.tolist() == LABELS
    assert data.test.y.tolist() == [2, 0, 1]
    assert data.classes == tuple(NAMES)
    assert data.sample_shape == (1, 8, 8)
    assert data.mean == pytest.approx([(GREY / 255).mean()])
    assert data.std == pytest.approx([(GREY / 255).std()])
    prepared = data.prepare(data.train.x)
    assert prepared.shape == (12, 1, 8, 8)
    assert float(prepared.mean()) == pytest.approx(0, abs=1e-5)


def test_colour_images_keep_three_channels_and_one_colour_image_makes_all_of_them_colour(
    tmp_path: Path,
) -> None:
    colour = np.stack([GREY, GREY // 2, 255 - GREY], axis=-1)
    data = loaded(saved(tmp_path / "set", train=split(colour), test=split(GREY)), tmp_path)
    np.testing.assert_array_equal(data.train.x, colour)
    np.testing.assert_array_equal(data.test.x, np.repeat(GREY[..., None], 3, axis=-1))
    assert len(data.mean) == 3
    assert data.mean[2] == pytest.approx((colour[..., 2] / 255).mean())
    assert data.sample_shape == (3, 8, 8)
    grey = loaded(saved(tmp_path / "again", train=split(colour), test=split(GREY)), tmp_path, grayscale=True)
    assert grey.sample_shape == (1, 8, 8)


def test_without_a_test_split_one_is_drawn_by_class_with_the_seed_and_the_note_says_so(
    tmp_path: Path,
) -> None:
    name = saved(tmp_path / "set", train=split(row=[str(i) for i in range(12)]))
    data = loaded(name, tmp_path, test_fraction=0.25)
    assert np.bincount(data.test.y).tolist() == [1, 1, 1]
    assert np.bincount(data.train.y).tolist() == [3, 3, 3]
    assert data.note == "test split of 0.25 drawn with seed 3"
    # Columns stay with their rows.
    rows = data.columns["row"].astype(int)
    np.testing.assert_array_equal(data.train.x, GREY[rows])


def test_a_validation_split_stands_in_for_a_missing_test_split(tmp_path: Path) -> None:
    name = saved(tmp_path / "set", train=split(), validation=split(GREY[:3], [0, 1, 2]))
    assert len(loaded(name, tmp_path).test) == 3


@pytest.mark.parametrize("layout", ["hw", "hwc", "chw"])
def test_arrays_of_bytes_are_images_in_any_usual_layout(tmp_path: Path, layout: str) -> None:
    hf = installed()
    colour = np.stack([GREY, GREY // 2, 255 - GREY], axis=-1)
    pixels = {"hw": GREY, "hwc": colour, "chw": colour.transpose(0, 3, 1, 2)}[layout]
    part = hf.Dataset.from_dict({"pixels": pixels.tolist(), "y": [NAMES[label] for label in LABELS]})
    data = loaded(saved(tmp_path / "set", train=part, test=part), tmp_path)
    np.testing.assert_array_equal(data.train.x, GREY if layout == "hw" else colour)
    assert data.classes == tuple(NAMES)
    assert data.train.y.tolist() == LABELS


def test_text_becomes_windows_that_predict_the_next_character_and_groups_are_natural_clients(
    tmp_path: Path,
) -> None:
    hf = installed()
    part = hf.Dataset.from_dict({"said": ["abcabc", "cab", "b"], "who": ["Ann", "Bob", "Ann"]})
    data = loaded(
        saved(tmp_path / "set", train=part, test=part), tmp_path, text="said", group="who", sequence_length=2
    )
    letters = ["".join(data.classes[t] for t in row) for row in data.train.x]
    following = ["".join(data.classes[t] for t in row) for row in data.train.y]
    assert letters == ["ab", "ca", "ca"]
    assert following == ["bc", "ab", "ab"]
    assert data.group_names == ("Ann", "Bob")
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 1]
    assert data.is_text


def test_the_second_time_it_comes_from_the_cache_and_changed_data_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = saved(tmp_path / "set", train=split(), test=split())
    first = loaded(name, tmp_path)
    real = hugging_face._build
    monkeypatch.setattr(hugging_face, "_build", lambda *args: pytest.fail("decoded again"))
    assert loaded(name, tmp_path).fingerprint == first.fingerprint
    monkeypatch.setattr(hugging_face, "_build", real)
    other = saved(tmp_path / "other", train=split(255 - GREY), test=split())
    assert loaded(other, tmp_path).fingerprint != first.fingerprint


def test_a_copy_below_the_root_is_used_instead_of_the_hub(tmp_path: Path) -> None:
    saved(tmp_path / "root" / "some" / "repository", train=split(), test=split())
    data = loaded("hf:some/repository", tmp_path, root=tmp_path / "root", download=True)
    assert data.name == "hf:some/repository"
    assert len(data.train) == 12


def test_a_folder_of_files_that_the_package_can_read_works_too(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for part, count in (("train", 12), ("test", 3)):
        rows = [{"pixels": GREY[i].tolist(), "label": LABELS[i]} for i in range(count)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = loaded(f"hf:{folder}", tmp_path)
    np.testing.assert_array_equal(data.train.x, GREY)
    assert data.classes == ("0", "1", "2")


def test_normalisation_can_be_said(tmp_path: Path) -> None:
    name = saved(tmp_path / "set", train=split(), test=split())
    assert loaded(name, tmp_path, normalise="half").mean == (0.5,)
    given = loaded(name, tmp_path, mean=(0.1,), std=(0.3,))
    assert (given.mean, given.std) == ((0.1,), (0.3,))
    with pytest.raises(UserError, match=r"data\.mean has 3 numbers, the images 1 channels"):
        loaded(name, tmp_path, mean=(0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"label": "lable"}, "unknown column 'lable': did you mean 'label'"),
        ({"train_split": "trian"}, "data.train_split: unknown split 'trian': did you mean 'train'"),
        ({"test_split": "train"}, "'train' is the training split"),
        ({"image": "label"}, "column 'label' holds no images"),
        ({"text": "image"}, "holds no text"),
        ({"text": "site", "label": "label"}, "give data.text alone"),
        ({"group": "sites"}, "data.group: unknown column 'sites': did you mean 'site'"),
        ({"text": "site"}, "lower data.sequence_length"),
    ],
)
def test_a_wrong_setting_is_told_with_the_nearest_right_one(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    name = saved(tmp_path / "set", train=split(site=["x", "y"] * 6), test=split(site=["x", "y"] * 6))
    with pytest.raises(UserError, match=words):
        loaded(name, tmp_path, **given)


def test_columns_that_could_each_be_meant_are_listed(tmp_path: Path) -> None:
    hf = installed()
    kinds = hf.Features({"image": hf.Image(), "fine": hf.ClassLabel(names=NAMES), "coarse": hf.ClassLabel(2)})
    part = hf.Dataset.from_dict({"image": images(GREY[:3]), "fine": [0, 1, 2], "coarse": [0, 1, 1]}, kinds)
    name = saved(tmp_path / "set", train=part, test=part)
    with pytest.raises(
        UserError, match=r"set data\.label .* fine or coarse\. Columns: image \(image\), fine"
    ):
        loaded(name, tmp_path)
    assert loaded(name, tmp_path, label="coarse").num_classes == 2
    bare = part.remove_columns(["fine", "coarse"])
    with pytest.raises(UserError, match=r"no column looks like one\. Columns: image \(image\)"):
        loaded(saved(tmp_path / "bare", train=bare, test=bare), tmp_path)


def test_images_of_different_sizes_need_a_size_and_hidden_labels_are_no_labels(tmp_path: Path) -> None:
    both = installed().concatenate_datasets(
        [split(GREY[:3], [0, 1, 2]), split(np.ones((3, 9, 9), np.uint8), [0, 1, 2])]
    )
    name = saved(tmp_path / "set", train=both, test=split(GREY[:1], [-1]))
    with pytest.raises(UserError, match="no label of every sample"):
        loaded(name, tmp_path)
    name = saved(tmp_path / "sizes", train=both, test=both)
    with pytest.raises(UserError, match=r"9x9 pixels, the first image 8x8; data\.image_size"):
        loaded(name, tmp_path)
    assert loaded(name, tmp_path, image_size=8).sample_shape == (1, 8, 8)


# What may be missing ---------------------------------------------------------------------------------------


def test_the_missing_package_is_told_with_the_command_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise hub.PackageNotFoundError(name)

    monkeypatch.setattr(hub, "distribution", missing)
    for kind, name in (("datasets", "hf:ylecun/mnist"), ("partitions", "hf:IidPartitioner")):
        with pytest.raises(UserError, match=r"pip install 'fedplat\[hf\]'"):
            find(kind, name).load()(Source(None, tmp_path, True, 1))


def test_another_module_called_datasets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("datasets")
    other.__file__ = "/home/me/datasets/__init__.py"
    monkeypatch.setitem(sys.modules, "datasets", other)
    with pytest.raises(UserError, match=r"/home/me/datasets/__init__\.py"):
        installed()


@pytest.mark.parametrize(
    ("error", "download", "words"),
    [
        (ConnectionError("Couldn't reach"), True, "cannot be reached .* HF_HUB_OFFLINE"),
        (ConnectionError("Couldn't reach"), False, r"not in the local cache, and data\.download is false"),
        (ValueError("Config name is missing. Pick one: ['a', 'b']"), True, r"set data\.subset .*'a', 'b'"),
        (OSError("disk full"), True, "cannot load it: disk full"),
    ],
)
def test_trouble_with_the_hub_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, download: bool, words: str
) -> None:
    hf = installed()

    def fails(*args: Any, **kwargs: Any) -> None:
        assert download != hf.config.HF_HUB_OFFLINE
        raise error

    monkeypatch.setattr(hf, "load_dataset", fails)
    monkeypatch.setattr(hf.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=words):
        loaded("hf:ylecun/mnist", tmp_path, download=download)
    assert hf.config.HF_HUB_OFFLINE is False


def test_without_download_nothing_asks_the_hub_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not in the local cache"):
        loaded("hf:nobody/has-this-one", tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        loaded(f"hf:{tmp_path}/nowhere", tmp_path)
    with pytest.raises(UserError, match="needs a repository or a folder"):
        find("datasets", "hf:").load()


def test_nothing_of_it_is_imported_before_such_a_name_is_used() -> None:
    code = (
        "import sys, fedplat.config; "
        "from fedplat.datasets import hugging_face, hugging_face_partitions; "
        "sys.exit(any(m in sys.modules for m in ('flwr_datasets', 'datasets', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", [hub, hub_images, hugging_face, hugging_face_partitions])
def test_the_examples_in_the_docstrings_are_right(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


# All of it together ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    from sklearn.datasets import load_digits

    hf = installed()
    bunch = load_digits()
    kinds = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(10), "writer": hf.Value("string")})
    values = {
        "image": images((bunch.images[:600] * 15).astype(np.uint8)),
        "label": bunch.target[:600].tolist(),
        "writer": [f"w{i % 6}" for i in range(600)],
    }
    part = hf.Dataset.from_dict(values, kinds)
    return saved(
        tmp_path_factory.mktemp("hf") / "digits",
        train=part.select(range(480)),
        test=part.select(range(480, 600)),
    )


@pytest.mark.parametrize(
    "scheme",
    [
        {"name": "hf:DirichletPartitioner", "clients": 5, "alpha": 0.5},
        {"name": "hf:NaturalIdPartitioner", "clients": 0, "partition_by": "writer"},
    ],
    ids=lambda scheme: scheme["name"],
)
def test_a_scenario_on_such_data_runs_from_one_end_to_the_other(
    digits: str, scheme: dict[str, Any], tmp_path: Path
) -> None:
    raw = {
        "name": "hf",
        "rounds": 8,
        "data": {"name": digits},
        "partition": scheme,
        "model": {"name": "softmax"},
        "training": {"lr": 0.1, "epochs": 2},
        "strategies": ["mean", "median"],
    }
    folder = RunFolder.open(tmp_path / "run", load(raw, "hf.toml"), resume=False)
    experiment.run(
        folder.config, folder, engine=LocalEngine(1), device="cpu", observer=Display(), group_size=1
    )
    figures = summarise(folder)["strategies"]
    assert figures["mean"]["accuracy"] > 0.7
    assert len(folder.environment["samples_per_client"]) == (5 if scheme["clients"] else 6)
    again = RunFolder.open(tmp_path / "run", load(raw, "hf.toml"), resume=True)
    assert again.config.digest() == folder.config.digest()
