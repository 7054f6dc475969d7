import io
import pickle
import shutil
import socket
import tarfile

import numpy as np
import pytest
import torchvision
from PIL import Image

from fedplat.datasets.cifar_jpeg import ARCHIVE
from fedplat.datasets.torchvision_sets import load_cifar10, load_fashion_mnist, load_mnist
from fedplat.errors import UserError
from tests.datasets import OBJECTS, real_data, source, write_idx, write_images


def write_mnist(root, folder="MNIST", train=30, test=20):
    rng = np.random.default_rng(0)
    for part, n in (("train", train), ("t10k", test)):
        write_idx(root / folder / "raw" / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28)))
        write_idx(root / folder / "raw" / f"{part}-labels-idx1-ubyte", np.arange(n) % 10)


def write_tree(root):
    for split, count in (("train", 3), ("test", 2)):
        for name in OBJECTS:
            write_images(root / "CIFAR10" / split / name, count)


def write_archive(tree_root, root):
    root.mkdir(exist_ok=True)
    files = sorted((p for p in tree_root.rglob("*.jpg")), key=lambda p: hash(p.name + p.parent.name[::-1]))
    with tarfile.open(root / ARCHIVE, "w:xz") as archive:
        for path in [tree_root / "CIFAR10", *files]:
            archive.add(path, path.relative_to(tree_root).as_posix(), recursive=False)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize(("load", "folder"), [(load_mnist, "MNIST"), (load_fashion_mnist, "FashionMNIST")])
def test_idx_files_in_the_torchvision_layout_are_read_and_cached(tmp_path, monkeypatch, load, folder):
    write_mnist(tmp_path / "root", folder)
    first = load(source(tmp_path, tmp_path / "root"))
    assert first.train.x.shape == (30, 28, 28)
    assert first.test.y.tolist() == [*range(10), *range(10)]
    assert first.train.y.dtype == np.int64
    assert tuple(first.prepare(first.train.x[:4]).shape) == (4, *first.sample_shape) == (4, 1, 28, 28)
    monkeypatch.delattr(torchvision.datasets, folder)
    again = load(source(tmp_path, tmp_path / "root"))
    np.testing.assert_array_equal(again.train.x, first.train.x)
    assert again.fingerprint == first.fingerprint


def test_the_root_is_never_written_to(tmp_path):
    write_mnist(tmp_path / "root")
    before = sorted(tmp_path.glob("root/**/*"))
    load_mnist(source(tmp_path, tmp_path / "root"), image_size=16)
    assert sorted(tmp_path.glob("root/**/*")) == before


def test_image_size_resizes_as_torchvision_does_on_pil_images(tmp_path):
    write_mnist(tmp_path / "root")
    here = source(tmp_path, tmp_path / "root")
    raw, big, small = load_mnist(here), load_mnist(here, image_size=32), load_mnist(here, image_size=14)
    assert big.sample_shape == (1, 32, 32)
    for size, data in ((32, big), (14, small)):
        resize = torchvision.transforms.Resize((size, size))
        expected = [np.asarray(resize(Image.fromarray(image))) for image in np.asarray(raw.train.x)]
        np.testing.assert_array_equal(data.train.x, expected)
    assert len({raw.fingerprint, big.fingerprint, small.fingerprint}) == 3


def test_the_default_normalisation_is_that_of_the_mud_hog_experiments(tmp_path):
    write_mnist(tmp_path / "root", "MNIST")
    write_mnist(tmp_path / "root", "FashionMNIST")
    here = source(tmp_path, tmp_path / "root")
    assert (load_mnist(here).mean, load_mnist(here).std) == ((0.1307,), (0.3081,))
    assert (load_fashion_mnist(here).mean, load_fashion_mnist(here).std) == ((0.5,), (0.5,))
    assert load_fashion_mnist(here, normalise="dataset").mean == (0.2860,)
    assert (load_mnist(here, normalise="none").mean, load_mnist(here, normalise="none").std) == (
        (0.0,),
        (1.0,),
    )


def test_an_explicit_root_without_the_set_is_said_and_nothing_is_downloaded(tmp_path, no_network):
    (tmp_path / "root").mkdir()
    write_mnist(tmp_path / "cache" / "downloads")
    with pytest.raises(UserError) as error:
        load_mnist(source(tmp_path, tmp_path / "root"))
    for word in (
        "MNIST is missing",
        "MNIST/raw/*-ubyte",
        str(tmp_path / "root"),
        "FEDPLAT_DATA",
        "data.root",
        "download",
    ):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_root_that_does_not_exist_is_said(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        load_mnist(source(tmp_path, tmp_path / "nowhere", download=True))


def test_an_earlier_download_is_found_without_the_network(tmp_path, no_network):
    write_mnist(tmp_path / "cache" / "downloads")
    assert len(load_mnist(source(tmp_path)).train) == 30
    (tmp_path / "empty").mkdir()
    assert len(load_mnist(source(tmp_path, tmp_path / "empty", download=True)).train) == 30


@pytest.mark.parametrize("load", [load_mnist, load_fashion_mnist, load_cifar10])
def test_a_download_without_network_fails_with_one_clear_line(tmp_path, capfd, no_network, load):
    with pytest.raises(UserError) as error:
        load(source(tmp_path, download=True))
    assert "downloading it failed: <urlopen error" in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []


def test_a_download_goes_to_the_cache_and_appears_whole(tmp_path, monkeypatch):
    real = torchvision.datasets.MNIST

    def fake(root, train, download):
        if download:
            write_mnist(tmp_path / "remote")
            shutil.copytree(tmp_path / "remote" / "MNIST", f"{root}/MNIST")
        return real(root, train=train)

    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    (tmp_path / "root").mkdir()
    assert len(load_mnist(source(tmp_path, tmp_path / "root", download=True)).train) == 30
    assert list((tmp_path / "root").iterdir()) == []
    assert [p.name for p in (tmp_path / "cache" / "downloads").iterdir()] == ["MNIST"]
    assert socket.getdefaulttimeout() is None


def test_damaged_idx_files_are_named(tmp_path):
    write_mnist(tmp_path / "root")
    path = tmp_path / "root" / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"^MNIST: the files in .* are damaged"):
        load_mnist(source(tmp_path, tmp_path / "root"))


def write_batches(root):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = {"data": rng.integers(0, 256, (4, 3072), np.uint8), "labels": [0, 3, 9, 1]}
        (folder / name).write_bytes(pickle.dumps(data))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(OBJECTS)}))


def test_the_python_batches_of_cifar10_are_preferred_and_carry_no_note(tmp_path, monkeypatch):
    write_batches(tmp_path / "root")
    write_tree(tmp_path / "root")
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda *_: True)
    data = load_cifar10(source(tmp_path, tmp_path / "root"))
    assert (data.train.x.shape, len(data.test)) == ((20, 32, 32, 3), 4)
    assert data.note == ""
    assert data.classes == OBJECTS
    assert data.sample_shape == (3, 32, 32)


def test_cifar10_batches_that_fail_their_checksum_are_refused(tmp_path):
    write_batches(tmp_path / "root")
    with pytest.raises(UserError, match=r"^CIFAR-10: the files in .* are damaged"):
        load_cifar10(source(tmp_path, tmp_path / "root"))


def test_the_jpeg_tree_and_its_archive_give_identical_data_with_a_note(tmp_path):
    write_tree(tmp_path / "tree")
    write_archive(tmp_path / "tree", tmp_path / "packed")
    tree = load_cifar10(source(tmp_path / "1", tmp_path / "tree"))
    packed = load_cifar10(source(tmp_path / "2", tmp_path / "packed"))
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(tree, split).x, getattr(packed, split).x)
        np.testing.assert_array_equal(getattr(tree, split).y, getattr(packed, split).y)
    assert tree.fingerprint == packed.fingerprint
    assert tree.train.y.tolist() == np.repeat(np.arange(10), 3).tolist()
    assert tree.classes == OBJECTS
    assert "JPEG" in tree.note
    assert "JPEG" in packed.note
    assert [p.name for p in (tmp_path / "packed").iterdir()] == [ARCHIVE]
    last = Image.open(tmp_path / "tree" / "CIFAR10" / "test" / "truck" / "0001.jpg")
    np.testing.assert_array_equal(tree.test.x[-1], np.asarray(last))


def test_the_second_start_does_not_open_the_archive(tmp_path, monkeypatch):
    write_tree(tmp_path / "tree")
    write_archive(tmp_path / "tree", tmp_path / "packed")
    first = load_cifar10(source(tmp_path, tmp_path / "packed"), image_size=16)
    monkeypatch.setattr(tarfile, "open", None)
    again = load_cifar10(source(tmp_path, tmp_path / "packed"), image_size=16)
    assert again.sample_shape == (3, 16, 16)
    np.testing.assert_array_equal(first.train.x, again.train.x)


@pytest.mark.parametrize("kind", ["truncated", "not xz", "another tree"])
def test_a_damaged_archive_is_named(tmp_path, kind):
    write_tree(tmp_path / "tree")
    write_archive(tmp_path / "tree", tmp_path / "packed")
    path = tmp_path / "packed" / ARCHIVE
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "not xz":
        path.write_bytes(b"hello")
    else:
        with tarfile.open(path, "w:xz") as archive:
            archive.addfile(tarfile.TarInfo("OTHER/readme.txt"), io.BytesIO())
    with pytest.raises(UserError, match=r"cifar10-jpeg\.tar\.xz" if kind != "another tree" else "packed"):
        load_cifar10(source(tmp_path, tmp_path / "packed"))


def test_an_unreadable_jpeg_of_the_tree_is_named(tmp_path):
    write_tree(tmp_path / "tree")
    (tmp_path / "tree" / "CIFAR10" / "train" / "cat" / "0001.jpg").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"train/cat/0001\.jpg"):
        load_cifar10(source(tmp_path, tmp_path / "tree"))


@pytest.mark.parametrize(("load", "folder"), [(load_mnist, "MNIST"), (load_fashion_mnist, "FashionMNIST")])
def test_the_published_files_are_read_whole(tmp_path, load, folder):
    data = load(source(tmp_path, real_data(f"{folder}/raw")), normalise="dataset")
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    shares = np.bincount(np.ravel(data.train.x), minlength=256) / data.train.x.size
    level = np.arange(256) / 255
    mean = (shares * level).sum()
    assert mean == pytest.approx(data.mean[0], abs=1e-4)
    assert (shares * (level - mean) ** 2).sum() ** 0.5 == pytest.approx(data.std[0], abs=1e-4)
    assert np.bincount(data.test.y).sum() == 10_000


@pytest.mark.slow
def test_the_jpeg_archive_of_cifar10_is_read_whole(tmp_path):
    data = load_cifar10(source(tmp_path, real_data(ARCHIVE)))
    assert (data.train.x.shape, data.test.x.shape) == ((50_000, 32, 32, 3), (10_000, 32, 32, 3))
    assert np.bincount(data.train.y).tolist() == [5000] * 10
    assert data.classes == OBJECTS
    pixels = np.asarray(data.train.x[::5]) / 255
    np.testing.assert_allclose(pixels.mean(axis=(0, 1, 2)), data.mean, atol=0.01)
    np.testing.assert_allclose(pixels.std(axis=(0, 1, 2)), data.std, atol=0.01)
