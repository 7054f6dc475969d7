"""What must work before anything slow is imported, and how mistakes and faults end."""

import json
import subprocess
import sys

import pytest

import fedplat
from fedplat import cli
from fedplat.cli import main
from fedplat.errors import UserError
from fedplat.registry import KINDS, entries
from fedplat.scenarios import scenario_names

SLOW = ("torch", "numpy", "flwr", "matplotlib", "sklearn")

PROBE = """
import json, os, sys
from fedplat.cli import main
out, sys.stdout = sys.stdout, open(os.devnull, "w")
status = main(sys.argv[1:])
print(json.dumps([status, sorted({name.split(".")[0] for name in sys.modules})]), file=out)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["list"], ["run", "--help"], []])
def test_help_and_lists_import_nothing_slow(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True
    )
    status, modules = json.loads(done.stdout)
    assert status == 0
    assert not set(SLOW) & set(modules)


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedplat {fedplat.__version__}\n"


@pytest.mark.parametrize("command", ["run", "list", "show", "report", "partition"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, option]) == 0
    assert f"Usage: fedplat {command}" in capsys.readouterr().out


def test_list_without_a_kind_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    words = set(capsys.readouterr().out.split())
    assert {name for kind in KINDS for name in entries(kind)} | set(scenario_names()) | set(KINDS) <= words


def test_list_of_a_kind_lists_only_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "attacks"]) == 0
    output = capsys.readouterr().out
    assert "sign-flip" in output
    assert "Li et al., AAAI 2019" in output
    assert "multi-krum" not in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["list", "attack"],
            "unknown kind 'attack': did you mean 'attacks'? Allowed: associations, attacks, availability, ",
        ),
        (["lst"], "No such command 'lst'. Did you mean 'list'?\n"),
        (["run"], "Missing argument 'SCENARIO'.\nTry 'fedplat run --help'"),
        (["run", "quickstart", "--wrokers", "2"], "--wrokers"),
        (["show", "medain"], "nothing is called 'medain': did you mean 'median'?"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_message(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert told in captured.err
    assert captured.err.count("Did you mean") <= 1
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("fault", [ZeroDivisionError("fault"), EOFError("cut off"), KeyError("fault")])
def test_a_fault_of_the_program_keeps_its_traceback(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise fault

    app = cli.typer.Typer(pretty_exceptions_enable=False)
    app.command()(broken)
    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(type(fault)):
        main([])


@pytest.mark.parametrize(("error", "status"), [(UserError("no"), 2), (KeyboardInterrupt(), 130)])
def test_status_tells_a_mistake_from_an_interruption(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> None:
        raise error

    app = cli.typer.Typer()
    app.command()(stopped)
    monkeypatch.setattr(cli, "app", app)
    assert main([]) == status
