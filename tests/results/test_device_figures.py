from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from fedplat.results.device_figures import OUTCOMES, draw_outcomes, draw_simulated, outcome_table

from . import NAN, round_record
from .device_records import device_record, simulated

Runs = dict[str, list[dict[str, Any]]]


def records(accuracies: list[float | None], **changes: Any) -> list[dict[str, Any]]:
    return [
        round_record(n, accuracy, simulated=simulated(n, **(changes if n else {})))
        for n, accuracy in enumerate(accuracies)
    ]


DRAWN: dict[str, Runs] = {
    "ordinary": {"mean": records([0.1, 0.4, 0.6]), "median": records([0.1, 0.5, 0.55], seconds=7200.0)},
    "evaluated now and then": {"a": records([None if n % 3 else 0.5 for n in range(10)])},
    "one began only": {"mean": records([0.1, 0.4]), "median": []},
    "diverged": {"mean": records([0.1, NAN, NAN])},
    "a round that never ends": {"mean": records([0.1, 0.2, 0.3], seconds=None)},
    "no energy": {"mean": records([0.1, 0.2, 0.3], joules=0.0)},
    "ten strategies": {f"strategy-{i}": records([0.1, 0.9], seconds=i + 1.0) for i in range(10)},
}


@pytest.mark.parametrize("runs", DRAWN.values(), ids=DRAWN.keys())
@pytest.mark.filterwarnings("error")
def test_every_kind_of_run_on_devices_can_be_drawn(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "new" / "simulated.png"
    assert draw_simulated(runs, path, "title", dpi=60)
    height, width, _ = imread(path).shape
    assert width > height > 200


def test_a_cost_of_nought_has_no_panel(tmp_path: Path) -> None:
    for name in ("ordinary", "no energy"):
        draw_simulated(DRAWN[name], tmp_path / f"{name}.png", "title", dpi=60)
    assert imread(tmp_path / "no energy.png").shape[1] < imread(tmp_path / "ordinary.png").shape[1] - 100


@pytest.mark.parametrize("runs", [{"mean": []}, {"mean": [round_record(n, 0.5) for n in range(3)]}])
def test_a_run_without_devices_is_not_drawn(runs: Runs, tmp_path: Path) -> None:
    assert not draw_simulated(runs, tmp_path / "simulated.png", "title")
    assert not (tmp_path / "simulated.png").exists()


def test_the_table_has_what_became_of_every_client() -> None:
    names = [outcome.text for outcome in OUTCOMES]
    rows = [
        device_record(number, client, outcome)
        for client, outcome in enumerate(("delivered", "late", "out-of-memory", "dropped", "away", "failed"))
        for number in (1, 3)
    ]
    available = np.ones((7, 9), bool)
    available[6, 1:] = False
    table = outcome_table([*rows, device_record(99, 0), device_record(1, 99)], 7, 3, available)
    assert [[names[code] for code in row] for row in table.tolist()] == [
        ["delivered", "not asked", "delivered"],
        ["late", "not asked", "late"],
        ["out of memory", "not asked", "out of memory"],
        ["dropped out", "not asked", "dropped out"],
        ["away when asked", "not asked", "away when asked"],
        ["failed otherwise", "not asked", "failed otherwise"],
        ["not asked", "away, not asked", "away, not asked"],
    ]


def test_outcomes_differ_in_lightness_and_not_in_hue_alone() -> None:
    from matplotlib.colors import to_rgb

    lightness = sorted(np.dot(to_rgb(outcome.colour), (0.299, 0.587, 0.114)) for outcome in OUTCOMES)
    assert np.diff(lightness).min() > 0.02


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 1), (5, 8), (200, 300)])
@pytest.mark.filterwarnings("error")
def test_few_and_many_clients_can_be_drawn(nodes: int, rounds: int, tmp_path: Path) -> None:
    table = np.random.default_rng(1).integers(0, len(OUTCOMES), (nodes, rounds))
    draw_outcomes(table, tmp_path / "a" / "devices.png", "title", dpi=60)
    height, width, _ = imread(tmp_path / "a" / "devices.png").shape
    assert width == 480
    assert 140 < height < 700
