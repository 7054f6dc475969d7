import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from fedplat.results.figures import draw_curves, spread, style

from . import NAN, round_record

Runs = dict[str, list[dict[str, Any]]]

RUNS: dict[str, Runs] = {
    "ordinary": {"mean": [round_record(n, 0.1 * n, 2.0 / (n + 1)) for n in range(6)]},
    "evaluated now and then": {"a": [round_record(n, None if n % 3 else 0.5) for n in range(10)]},
    "no rounds at all": {"mean": [], "median": []},
    "only the initial model": {"mean": [round_record(0, 0.1)]},
    "loss that is never finite": {"mean": [round_record(n, 0.1, NAN) for n in range(3)]},
    "loss that explodes": {"mean": [round_record(n, 0.1, 10.0**n) for n in range(30)]},
    "loss that breaks off": {"mean": [round_record(n, 0.1, 1.0 if n < 3 else None) for n in range(6)]},
    "loss of zero": {"mean": [round_record(n, 1.0, 0.0) for n in range(3)]},
    "loss over many decades, with a zero": {"a": [round_record(n, 1.0, 0.1**n * (n < 4)) for n in range(5)]},
    "ten strategies": {f"strategy-{i}": [round_record(n, 0.9, 0.3) for n in range(3)] for i in range(10)},
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
@pytest.mark.filterwarnings("error")
def test_every_kind_of_run_can_be_drawn(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "new" / "accuracy.png"
    draw_curves(runs, path, "title", 8, dpi=60)
    height, width, _ = imread(path).shape
    assert width > height > 300


def test_drawing_does_not_touch_pyplot(tmp_path: Path) -> None:
    before = "matplotlib.pyplot" in sys.modules
    draw_curves(RUNS["ordinary"], tmp_path / "a.png", "title", dpi=60)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_ten_lines_look_different() -> None:
    assert len({style(index) for index in range(10)}) == 10


@pytest.mark.parametrize("wanted", [[0.0] * 10, [1.0] * 10, [0.1, 0.11, 0.5, 0.5, 0.52, 0.99], [0.5], []])
def test_labels_keep_their_distance_and_their_order(wanted: list[float]) -> None:
    places = spread(wanted, 0.05, 1.0)
    assert len(places) == len(wanted)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(places))
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
