"""From axes and options to configurations."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from fedplat import __version__
from fedplat.cli.common import load_config
from fedplat.errors import UserError
from fedplat.tables.cells import Options, cell_path, plan

from . import planned, tiny


def test_a_cell_is_the_scenario_with_what_its_values_change() -> None:
    cells = {(cell.position, cell.seed): cell for cell in planned().cells}
    cell = cells[("0.5", "mean", "flip"), 2]
    assert cell.config.strategies == ("mean",)
    assert (cell.config.seed, cell.config.rounds, cell.config.partition.clients) == (2, 2, 2)
    assert [(a.name, a.fraction) for a in cell.config.attacks] == [("sign-flip", 0.5)]
    assert cells[("0.5", "mean", "none"), 1].config.attacks == ()
    assert cells[("0.5", "krum", "none"), 1].config.strategy_part("krum").settings()["f"] == 0


def test_blocks_rows_and_columns_are_multiplied_by_seeds_and_skipped_cells_have_no_run() -> None:
    made = planned()
    assert len(made.positions()) == 6
    assert len(made.cells) == len(made.runs) == 5 * 2
    assert made.skipped == {("0.5", "krum", "flip"): "two clients are too few"}


def test_the_identity_is_the_configurations_hash_and_the_version() -> None:
    first, other = planned().cells[:2]
    assert first.identity == f"{first.config.digest()}-{__version__}"
    assert first.identity != other.identity
    assert planned().cells[0].identity == first.identity
    changed = planned(overrides=("training.lr=0.3",)).cells[0]
    assert changed.identity != first.identity
    assert cell_path(Path("a"), first.identity) == Path("a/cells") / first.identity


def test_cells_that_come_to_the_same_run_share_it() -> None:
    table = tiny(**{"values = [0.5]": "values = [0.25, 0.5]"})
    made = plan("tiny", table, Options(seeds=1))
    alike = [cell.identity for cell in made.cells if cell.position[1:] == ("mean", "none")]
    assert len(alike) == 2
    assert len(set(alike)) == 1
    assert len(made.runs) == len(made.cells) - 3


def test_the_command_of_a_cell_runs_exactly_that_configuration() -> None:
    for cell in planned(overrides=("model.hidden=[8, 8]", "strategy.krum.f=0")).cells:
        words = shlex.split(cell.command)
        options: dict[str, list[str]] = {}
        for option, value in zip(words[3::2], words[4::2], strict=True):
            options.setdefault(option, []).append(value)
        seed = int(options["--seed"][0])
        config = load_config(words[2], options.get("--set"), seed, options["--strategy"])
        assert config.digest() == cell.config.digest()


def test_quick_changes_what_the_file_says_and_the_caps_are_told() -> None:
    made = planned(quick=True)
    assert {cell.config.rounds for cell in made.cells} == {1}
    assert {cell.config.training.lr for cell in made.cells} == {0.2}
    assert {cell.seed for cell in made.cells} == {1}
    assert made.caps == (
        "1 round instead of 2",
        "training.lr = 0.2",
        "2 of 3 values of method (mean, Me_dian)",
        "very quick",
    )


def test_what_is_chosen_by_hand_stands_above_quick() -> None:
    made = planned(quick=True, keep={"method": ["krum"]}, rounds=7, seeds=3)
    assert {cell.position[1] for cell in made.cells} == {"krum"}
    assert {(cell.config.rounds, cell.seed) for cell in made.cells} == {(7, 1), (7, 2), (7, 3)}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": {"method": ["meen"]}}, "unknown method 'meen': did you mean 'mean'?"),
        ({"overrides": ("strategy.kurm.f=1",)}, "did you mean 'krum'?"),
        ({"overrides": ("strategies=['mean']",)}, "use --rows"),
        ({"overrides": ("training.lrr=1",)}, "training.lrr: unknown key; did you mean 'lr'?"),
    ],
)
def test_mistakes_in_options_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        planned(**options)


def test_an_unknown_placeholder_is_told() -> None:
    with pytest.raises(UserError, match="unknown placeholder 'shar': did you mean 'share'"):
        plan("tiny", tiny(**{'"{share}"': '"{shar}"'}), Options())


def test_a_strategy_may_be_named_as_scenarios_do_but_several_are_refused() -> None:
    rows = '{ value = "krum", set = { strategies = ["bulyan"], "strategy.bulyan.f" = 0 } }'
    without_key = {'key = "strategy"\n': "", '"krum"]\n\n[columns]': f"{rows}]\n\n[columns]"}
    made = plan("tiny", tiny(**without_key), Options(seeds=1, keep={"method": ["krum"]}))
    assert [cell.config.strategies for cell in made.cells] == [("bulyan",)]
    two = {**without_key, '"krum"]\n\n[columns]': rows.replace('["bulyan"]', '["mean", "median"]')}
    two['"krum"]\n\n[columns]'] += "]\n\n[columns]"
    with pytest.raises(UserError, match="a cell runs one strategy"):
        plan("tiny", tiny(**two), Options(keep={"method": ["krum"]}))


def test_quick_of_a_table_that_says_nothing_of_it_is_refused() -> None:
    table = tiny().model_copy(update={"quick": None})
    with pytest.raises(UserError, match=r"has no \[quick\]"):
        plan("tiny", table, Options(quick=True))
