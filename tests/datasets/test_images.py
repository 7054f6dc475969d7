import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedplat.datasets.images import decode, list_images, reader, resize, stratified
from fedplat.errors import UserError
from tests.datasets import write_images


@pytest.mark.parametrize("shape", [(3, 28, 28), (3, 32, 32, 3)])
@pytest.mark.parametrize("size", [8, 14, 32, 64])
def test_resizing_many_at_once_equals_pillow_one_by_one(shape, size):
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    one_by_one = [Image.fromarray(x).resize((size, size), Image.Resampling.BILINEAR) for x in images]
    np.testing.assert_array_equal(resize(images, size), np.stack([np.asarray(x) for x in one_by_one]))


def test_files_are_listed_by_path_component_whatever_the_folder_order(tmp_path):
    for name in ("cat-2", "cat", "cat 3"):
        write_images(tmp_path / name, 2)
    parts = [file.parts for file in list_images(tmp_path)]
    assert parts == sorted(parts)
    assert [p[0] for p in parts[::2]] == ["cat", "cat 3", "cat-2"]


def test_decoding_in_threads_keeps_the_order(tmp_path):
    write_images(tmp_path / "a", 60, suffix="bmp", size=(80, 80))
    files = list_images(tmp_path)
    expected = [np.asarray(Image.open(tmp_path.joinpath(*file.parts))) for file in files]
    np.testing.assert_array_equal(decode(files, reader(tmp_path)), expected)


def test_an_image_of_another_size_is_named_if_no_size_is_asked_for(tmp_path):
    write_images(tmp_path / "a", 3)
    Image.new("RGB", (20, 32)).save(tmp_path / "a" / "0001.jpg")
    with pytest.raises(UserError, match=r"a/0001\.jpg is 20x32 pixels, the first image 32x32"):
        decode(list_images(tmp_path), reader(tmp_path))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0.05, 0.95), st.integers(0, 9))
@settings(max_examples=50, deadline=None, database=None)
def test_a_stratified_split_is_complete_disjoint_and_leaves_a_sample_on_both_sides(labels, fraction, seed):
    labels = np.array(labels)
    train, test = stratified(labels, fraction, np.random.default_rng(seed))
    assert sorted([*train, *test]) == list(range(len(labels)))
    for label in np.unique(labels):
        count = int((labels == label).sum())
        held_out = int((labels[test] == label).sum())
        assert abs(held_out - fraction * count) <= 1
        assert count == 1 or 0 < held_out < count
