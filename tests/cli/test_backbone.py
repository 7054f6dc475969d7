from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedplat.cli.backbone import backbone
from fedplat.errors import UserError
from fedplat.models.backbones import BackboneRecipe
from fedplat.models.pretraining import check_split

SUBSET = "fedplat.datasets.subset:load"
TOML = """
rounds = 1
partition = {{name = "iid", clients = 4}}

[data]
name = "{subset}"
of = "digits"
classes = [5, 6, 7, 8, 9]

[model]
name = "fedplat.models.pool:{model}"
backbone = {{width = 4, data = "digits", classes = [0, 1, 2, 3, 4], epochs = 3, augment="none", gate={gate}}}
"""


def call(path: Path, *arguments: str) -> None:
    app = typer.Typer()
    app.command()(backbone)
    command: click.Command = typer.main.get_command(app)
    command.main([str(path), *arguments], standalone_mode=False)


def scenario(folder: Path, model: str = "federated_ssf", gate: float = 0) -> Path:
    path = folder / "mine.toml"
    path.write_text(TOML.format(subset=SUBSET, model=model, gate=gate))
    return path


def test_it_is_made_once_and_told_with_its_probe_its_hash_and_what_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(scenario(tmp_path))
    first = capsys.readouterr().out.splitlines()
    call(scenario(tmp_path))
    again = capsys.readouterr().out.splitlines()
    assert first[0] == "conv: 4,972 weights, 16 features, 10 sites"
    assert [line for line in first if not line.startswith("epoch")] == again
    assert sum(line.startswith("epoch") for line in first) == 3
    assert "linear probe on other classes" in first[-2]
    assert first[-1] == "pool of 1: 285 floats each way per client and round, 5.6 % of 5,057"


def test_a_backbone_below_its_gate_and_a_model_without_one_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gate asks for"):
        call(scenario(tmp_path, gate=80))
    with pytest.raises(UserError, match="has no backbone"):
        call(scenario(tmp_path), "--set", "model.name=mlp", "--set", "model.hidden=[8]")


@pytest.mark.parametrize(
    ("recipe", "data", "settings", "words"),
    [
        ({"classes": (0, 1)}, "digits", {}, "clients hold classes of digits"),
        (
            {"classes": (0, 1)},
            SUBSET,
            {"of": "digits", "classes": (), "held_back": 0},
            "clients hold classes",
        ),
        ({"classes": (0, 1)}, SUBSET, {"of": "digits", "classes": (1, 2), "held_back": 0}, r"\[1\]"),
        ({"held_back": 50}, "digits", {}, "held_back = 50"),
        ({"held_back": 50}, SUBSET, {"of": "digits", "classes": (), "held_back": 49}, "held_back = 50"),
        ({"classes": (0, 1)}, SUBSET, {"of": "digits", "classes": (2, 3), "held_back": 0}, ""),
        ({"held_back": 50}, SUBSET, {"of": "digits", "classes": (), "held_back": 50}, ""),
        ({"classes": (0, 1)}, "mnist", {}, ""),
        (None, "digits", {}, ""),
    ],
)
def test_what_a_backbone_has_seen_is_kept_from_clients(
    recipe: dict[str, Any] | None, data: str, settings: dict[str, Any], words: str
) -> None:
    model = {"backbone": BackboneRecipe(data="digits", **recipe)} if recipe is not None else {"hidden": (3,)}
    if words:
        with pytest.raises(UserError, match=words):
            check_split(model, data, settings)
    else:
        check_split(model, data, settings)
