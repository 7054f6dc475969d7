import numpy as np
import pytest
from matplotlib import pyplot
from PIL import Image

from fedplat.datasets.figures import draw_partition


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (120, 10), (30, 62)])
def test_the_picture_is_a_png_of_readable_size_and_the_same_each_time(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    names = [f"class {i}" for i in range(classes)]
    for name in ("a/one.png", "two.png"):
        draw_partition(counts, names, tmp_path / name, "dirichlet, alpha 0.5")
    with Image.open(tmp_path / "two.png") as image:
        assert image.format == "PNG"
        assert 200 < image.height < 2200
        assert 900 < image.width < 1300
    assert (tmp_path / "a/one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert pyplot.get_fignums() == []


def test_clients_without_samples_are_drawn_as_empty_rows(tmp_path):
    draw_partition(np.zeros((3, 2), np.int64), ["a", "b"], tmp_path / "empty.png", "nothing")
    assert (tmp_path / "empty.png").stat().st_size > 1000
