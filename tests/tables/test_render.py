"""Markdown, CSV, LaTeX, JSON and the picture, compared with what was worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from matplotlib import image

from fedplat.tables.cells import Options, Plan, cell_path, plan
from fedplat.tables.on_disk import FAILED, REFUSED, entries_of, outcome_of, reference_position, write_failure
from fedplat.tables.render import csv_text, json_values, latex, markdown, write_table
from fedplat.tables.sheet import row_differences

from . import fake_cell, planned, tiny

COMMAND = "fedplat table tiny.toml"


@pytest.fixture
def half_done(tmp_path: Path) -> tuple[Plan, Path]:
    """A table of which some cells are done, one seed of one is missing, one failed, one was refused."""
    made = planned()
    fake_cell(made, tmp_path, ("0.5", "mean", "none"), {1: 0.90, 2: 0.94})
    fake_cell(made, tmp_path, ("0.5", "mean", "flip"), {1: 0.50, 2: 0.60})
    fake_cell(made, tmp_path, ("0.5", "median", "none"), {1: 0.88})
    fake_cell(made, tmp_path, ("0.5", "median", "flip"), {1: 0.70, 2: 0.72}, finished=False)
    for cell in made.cells:
        if cell.position == ("0.5", "krum", "none"):
            state = FAILED if cell.seed == 1 else REFUSED
            write_failure(cell_path(tmp_path, cell.identity), state, "no room | at all")
    return made, tmp_path


def test_markdown_has_means_deviations_and_what_was_published(half_done: tuple[Plan, Path]) -> None:
    made, out = half_done
    text = markdown(made, entries_of(made, out), COMMAND)
    # (90 + 94) / 2 = 92, with a deviation of sqrt(2 * 2^2 / 1) = 2.83; 92 - 90.5 = 1.5.
    assert "| mean | **92.00 ± 2.83**<br>published 90.50, +1.50 | 55.00 ± 7.07 |" in text
    assert "| Me_dian | 88.00 (1 of 2 seeds) | unfinished |" in text
    assert "| krum | failed | – |" in text
    # Lost to the attack: 90 - 50 = 40 and 94 - 60 = 34, so 37 ± 4.24; nothing in the reference itself.
    assert "| mean | – | 37.00 ± 4.24 |" in text
    assert "- claimed, without a public table: Somebody, 2021: all is well" in text
    assert "- published: Nobody, 2020, Table 1 (other data)" in text
    assert "- failed: 0.5, krum, none, seed 1: no room | at all" in text
    assert "- cannot work: 0.5, krum, none, seed 2: no room | at all" in text
    assert "- left out: 0.5, krum, flip: two clients are too few" in text
    assert f"made by `{COMMAND}`" in text
    assert "Smaller than" not in text


def test_a_table_without_a_single_cell_says_missing(tmp_path: Path) -> None:
    made = planned(quick=True)
    text = markdown(made, entries_of(made, tmp_path), COMMAND)
    assert "| mean | missing<br>published 90.50 | missing |" in text
    assert "**Smaller than the table as described:** 1 round instead of 2; training.lr = 0.2; " in text


def test_csv_is_unrounded_with_a_line_per_cell_and_metric(half_done: tuple[Plan, Path]) -> None:
    made, out = half_done
    rows = list(csv.DictReader(io.StringIO(csv_text(made, entries_of(made, out)))))
    # Nothing is known of attack success, so there is nothing to tell.
    assert [row["metric"] for row in rows] == ["accuracy"] * 6 + ["drop"] * 6
    first = next(row for row in rows if (row["method"], row["attack"]) == ("mean", "none"))
    assert float(first["mean"]) == pytest.approx(92.0)
    assert float(first["std"]) == pytest.approx(8**0.5)
    assert (first["seeds_done"], first["seeds_wanted"], first["best"]) == ("2", "2", "true")
    assert float(first["deviation"]) == pytest.approx(1.5)
    assert {row["state"] for row in rows} == {"done", "missing", "started", "failed", "skipped"}


def test_latex_is_booktabs_with_the_best_in_bold_and_letters_escaped(half_done: tuple[Plan, Path]) -> None:
    made, out = half_done
    text = latex(made, entries_of(made, out), COMMAND)
    assert r"mean & \textbf{92.00 $\pm$ 2.83} & 55.00 $\pm$ 7.07 \\" in text
    assert r" & \textit{published 90.50, +1.50} &  \\" in text
    assert r"Me\_dian & 88.00 (1 of 2 seeds) & unfinished \\" in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == text.count(r"\midrule") == 1
    assert r"\begin{tabular}{lrr}" in text


def test_json_has_every_raw_number_with_hash_seed_and_versions(half_done: tuple[Plan, Path]) -> None:
    made, out = half_done
    values = json.loads(json.dumps(json_values(made, entries_of(made, out), COMMAND), allow_nan=False))
    cell = values["cells"][0]
    assert cell["position"] == {"share": "0.5", "method": "mean", "attack": "none"}
    assert cell["mean"]["accuracy"] == pytest.approx(0.92)
    assert cell["published"][0]["value"] == 90.5
    run = cell["runs"][0]
    assert (run["seed"], run["state"], run["rounds"]) == (1, "done", 2)
    assert run["values"] == {"accuracy": 0.9, "drop": None, "attack-success": None}
    assert run["config_hash"] == made.cells[0].config.digest()
    assert run["made_with"]["torch"]
    assert run["made_with"]["data_fingerprint"] == "abc"
    assert run["command"].startswith("fedplat run quickstart --strategy mean")
    assert (out / run["folder"] / "config.toml").exists()


def test_all_files_are_written_whatever_is_there(half_done: tuple[Plan, Path]) -> None:
    made, out = half_done
    paths = write_table(made, entries_of(made, out), out, COMMAND)
    names = ["table.md", "table.csv", "table.tex", "table.json", "heatmap.png", "report.html"]
    assert [path.name for path in paths] == names
    picture = image.imread(out / "heatmap.png")
    assert picture.shape[0] > 200
    # Cells with figures are coloured, those without are grey: both are there.
    colours = {tuple((255 * pixel[:3]).round()) for pixel in picture.reshape(-1, picture.shape[2])[::7]}
    assert any(max(colour) - min(colour) > 100 for colour in colours)
    assert (221.0, 221.0, 221.0) in colours


def test_a_model_that_diverged_has_no_figure_but_is_done(tmp_path: Path) -> None:
    made = planned(seeds=1)
    fake_cell(made, tmp_path, ("0.5", "mean", "flip"), {1: float("nan")})
    cell = next(cell for cell in made.cells if cell.position == ("0.5", "mean", "flip"))
    outcome = outcome_of(cell_path(tmp_path, cell.identity), cell, ("accuracy",))
    assert (outcome.state, outcome.values) == ("done", {"accuracy": 0.2})


def test_the_reference_is_the_cell_of_the_same_row_block_and_seed() -> None:
    assert reference_position(planned(), ("0.5", "median", "flip")) == ("0.5", "median", "none")


def test_rows_that_face_another_situation_are_told(tmp_path: Path) -> None:
    assert row_differences(planned()) == []
    krum = '{ value = "krum", set = { "training.lr" = 0.5 } }'
    made = plan("tiny", tiny(**{'"krum"]\n\n[columns]': f"{krum}]\n\n[columns]"}), Options())
    assert row_differences(made) == ["training"]
    text = markdown(made, entries_of(made, tmp_path), COMMAND)
    assert "- rows differ, besides in their strategy, in: training" in text
