import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedplat.cli import main
from fedplat.cli.setting_table import describe
from fedplat.config import load
from fedplat.registry import KINDS, entries
from fedplat.scenarios import read_scenario, scenario_names


@pytest.mark.parametrize("name", scenario_names())
def test_a_shown_scenario_is_a_whole_configuration(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the data nothing large is decoded, only to tell the memory, which is tested below.
    monkeypatch.delenv("FEDPLAT_DATA", raising=False)
    assert main(["show", name]) == 0
    shown = tomllib.loads(capsys.readouterr().out.split("With all defaults:\n")[1])
    assert load(shown, "shown").digest() == load(*read_scenario(name)).digest()
    assert shown["training"]["nesterov"] is False


def test_a_scenario_file_of_ones_own_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'rounds = 2\ndata.name = "digits"\nmodel.name = "mlp"\npartition = {name = "iid", clients = 2}\n'
    )
    assert main(["show", str(path)]) == 0
    assert "scenario mine" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_can_be_shown_with_its_source(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, entry in entries(kind).items():
        assert main(["show", name]) == 0
        output = capsys.readouterr().out
        assert entry.summary in output
        assert entry.source in output


def test_settings_come_with_type_range_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "trimmed-mean"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("beta"))
    assert row.split("  ")[0].strip() == "beta"
    for part in ("number", ">= 0, < 0.5", "0.2"):
        assert part in row


def test_settings_that_every_part_of_a_kind_has_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", "iid"])
    output = capsys.readouterr().out
    assert "clients" in output
    assert "must be given" in output


@pytest.mark.parametrize(
    ("annotation", "kind", "allowed"),
    [
        (int, "integer", ""),
        (Annotated[int, Field(ge=1, le=9)] | None, "integer or nothing", ">= 1, <= 9"),
        (tuple[Annotated[int, Field(ge=1)], ...], "list of integer", "each >= 1"),
        (Annotated[list[float], Field(min_length=2)], "list of number", "at least 2 long"),
        (Literal["a", 1], "choice", '"a", 1'),
        (bool, "true/false", ""),
        (Path | None, "path or nothing", ""),
        (dict[str, float], "table", ""),
        (int | str, "integer or text", ""),
    ],
)
def test_annotations_are_told_in_words(annotation: object, kind: str, allowed: str) -> None:
    description = describe(annotation)
    assert (description.type, description.allowed) == (kind, allowed)


def test_the_meaning_of_a_setting_is_its_description() -> None:
    assert describe(Annotated[int, Field(ge=1, description="samples per step")]).meaning == "samples per step"


def test_a_scenario_is_shown_with_the_memory_that_its_strategies_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'rounds = 2\nstrategies = ["mean", "foolsgold"]\ndata.name = "digits"\nmodel.name = "softmax"\n'
        'partition = {name = "iid", clients = 100}\n'
    )
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    # 100 clients x (64 x 10 + 10) parameters x 4 bytes, for the round and again for the sums of updates.
    assert "0.3 MB for the updates of 100 clients with 650 parameters; foolsgold keeps 0.3 MB\n" in shown


def shown(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert main(["show", str(path)]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("server memory"))


LARGE = """
rounds = 1
strategies = {strategies}
data.name = "digits"
partition = {{name = "iid", clients = 500, min_samples = 1}}
[model]
name = "mlp"
hidden = [20000]
"""


def test_strategies_that_combine_updates_as_they_come_need_less_and_say_what_goes_to_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    # 500 clients x (64 x 20,000 + 20,000 + 20,000 x 10 + 10) parameters x 4 bytes.
    line = shown(LARGE.format(strategies=["mean", "median", "fed-credit"]), tmp_path, capsys)
    assert line.startswith("server memory: 3,000.0 MB or about ")
    assert "at a time (mean, fed-credit) for the updates of 500 clients with 1,500,010 parameters" in line
    assert line.endswith(f"fed-credit needs 3,000.0 MB in {tmp_path} for a temporary file")
    alone = shown(LARGE.format(strategies=["mean"]), tmp_path, capsys)
    assert alone.startswith("server memory: about ")
    assert "3,000.0 MB" not in alone


def test_colluders_and_pre_aggregators_need_all_updates_at_once_and_a_selection_only_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = LARGE.format(strategies=["mean"])
    for addition in (
        '[[attacks]]\nname = "alie"\nfraction = 0.1\n',
        '[[strategy.mean.before]]\nname = "clipping"\n',
    ):
        assert shown(plain + addition, tmp_path, capsys).startswith("server memory: 3,000.0 MB for the upd")
    few = shown(plain + '[selection]\nname = "fraction"\nfraction = 0.02\n', tmp_path, capsys)
    assert few.startswith("server memory: 60.0 MB for the updates of 10 clients")


def test_without_the_data_a_scenario_is_shown_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDPLAT_DATA", raising=False)
    monkeypatch.setenv("FEDPLAT_CACHE", str(tmp_path))
    assert main(["show", "mnist-clean"]) == 0
    assert "server memory: not known, since the data is not here" in capsys.readouterr().out
