import numpy as np
import pytest
from PIL import Image

from fedplat.datasets import image_folder
from fedplat.errors import UserError
from tests.datasets import source, write_images


def write_split(root):
    for split, count in (("train", 6), ("test", 3)):
        for name in ("dog", "cat"):
            write_images(root / split / name, count, suffix="png", size=(40, 30))


def test_a_given_split_is_kept_and_images_are_brought_to_one_size(tmp_path):
    write_split(tmp_path / "mine")
    data = image_folder.load(source(tmp_path, tmp_path / "mine"), image_size=24)
    assert data.classes == ("cat", "dog")
    assert data.train.x.shape == (12, 24, 24, 3)
    assert data.test.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.sample_shape == (3, 24, 24)
    assert data.note == ""
    assert tuple(data.prepare(data.test.x).shape) == (6, 3, 24, 24)


def test_an_image_is_cut_to_its_central_square(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / "mine" / name
        folder.mkdir(parents=True)
        for i in range(2):
            pixels = np.zeros((10, 30, 3), np.uint8)
            pixels[:, 10:20] = 200
            Image.fromarray(pixels).save(folder / f"{i}.png")
    data = image_folder.load(source(tmp_path, tmp_path / "mine"), image_size=10, test_fraction=0.5)
    assert np.unique(data.train.x).tolist() == [200]


def test_grayscale_gives_one_channel(tmp_path):
    write_split(tmp_path / "mine")
    data = image_folder.load(source(tmp_path, tmp_path / "mine"), grayscale=True, mean=0.4, std=0.2)
    assert data.train.x.shape == (12, 32, 32)
    assert data.sample_shape == (1, 32, 32)
    assert (data.mean, data.std) == ((0.4,), (0.2,))


def test_a_folder_without_split_is_split_by_class_with_the_seed(tmp_path):
    for name, count in (("a", 10), ("b", 20)):
        write_images(tmp_path / "mine" / name, count, suffix="png", size=(8, 8))
    load = lambda seed: image_folder.load(source(tmp_path, tmp_path / "mine", seed=seed), image_size=8)  # noqa: E731
    first, same, other = load(0), load(0), load(1)
    assert np.bincount(first.train.y).tolist() == [8, 16]
    assert np.bincount(first.test.y).tolist() == [2, 4]
    assert first.fingerprint == same.fingerprint != other.fingerprint
    together = {bytes(x) for x in np.concatenate([first.train.x, first.test.x])}
    assert len(together) == 30
    assert "seed 0" in first.note


def test_hidden_and_other_files_are_passed_over(tmp_path):
    write_split(tmp_path / "mine")
    for name in (".hidden.png", "notes.txt"):
        (tmp_path / "mine" / "train" / "cat" / name).write_text("no image")
    (tmp_path / "mine" / ".git" / "train").mkdir(parents=True)
    assert len(image_folder.load(source(tmp_path, tmp_path / "mine")).train) == 12


def test_a_changed_image_is_decoded_again(tmp_path):
    write_split(tmp_path / "mine")
    before = image_folder.load(source(tmp_path, tmp_path / "mine"))
    Image.new("RGB", (40, 30), "red").save(tmp_path / "mine" / "train" / "cat" / "0000.png")
    after = image_folder.load(source(tmp_path, tmp_path / "mine"))
    assert before.fingerprint != after.fingerprint
    assert after.train.x[0, 0, 0].tolist() == [255, 0, 0]


def test_nested_folders_belong_to_their_class(tmp_path):
    write_split(tmp_path / "mine")
    write_images(tmp_path / "mine" / "train" / "cat" / "more", 2)
    data = image_folder.load(source(tmp_path, tmp_path / "mine"))
    assert np.bincount(data.train.y).tolist() == [8, 6]


def fails(tmp_path, root, *words):
    with pytest.raises(UserError) as error:
        image_folder.load(source(tmp_path, root))
    for word in words:
        assert word in str(error.value)


def test_no_root_and_no_such_folder_are_said(tmp_path):
    fails(tmp_path, None, "data.root", "<class>")
    fails(tmp_path, tmp_path / "nowhere", "there is no folder", str(tmp_path / "nowhere"))


def test_a_folder_without_classes_is_said(tmp_path):
    (tmp_path / "mine").mkdir()
    fails(tmp_path, tmp_path / "mine", "no class folder")
    write_images(tmp_path / "mine" / "only", 3)
    fails(tmp_path, tmp_path / "mine", "only the class 'only'")


def test_a_split_with_one_side_missing_is_said(tmp_path):
    write_images(tmp_path / "mine" / "train" / "a", 3)
    fails(tmp_path, tmp_path / "mine", "has train/ but no test/")


def test_classes_that_differ_between_train_and_test_are_named(tmp_path):
    write_split(tmp_path / "mine")
    write_images(tmp_path / "mine" / "train" / "bird", 2)
    write_images(tmp_path / "mine" / "test" / "fish", 2)
    fails(tmp_path, tmp_path / "mine", "'bird' only in train", "'fish' only in test")


@pytest.mark.parametrize("content", [b"no image at all", None])
def test_an_unreadable_image_is_named(tmp_path, content):
    write_split(tmp_path / "mine")
    path = tmp_path / "mine" / "train" / "dog" / "0003.png"
    path.write_bytes(path.read_bytes()[:500] if content is None else content)
    fails(tmp_path, tmp_path / "mine", "train/dog/0003.png")


def test_sixteen_bit_images_are_refused_rather_than_clipped(tmp_path):
    write_split(tmp_path / "mine")
    deep = Image.fromarray(np.full((30, 40), 40_000, np.uint16))
    deep.save(tmp_path / "mine" / "train" / "dog" / "0003.png")
    fails(tmp_path, tmp_path / "mine", "train/dog/0003.png", "8 bits")


def test_photos_are_turned_upright(tmp_path):
    write_split(tmp_path / "mine")
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    Image.fromarray(pixels).save(tmp_path / "mine" / "test" / "cat" / "0000.png", exif=exif)
    shown = image_folder.load(source(tmp_path, tmp_path / "mine")).test.x[0]
    assert shown[2].max() == 0
    assert shown[-3].min() == 255
