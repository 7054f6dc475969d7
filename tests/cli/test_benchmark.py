"""``fedplat benchmark``: what may be typed, what comes out, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli import benchmark, main
from fedplat.experiments.benchmarks import aggregators, engines, federation, scale, signing
from tests.cli.test_start import PROBE, SLOW


def test_help_imports_nothing_slow() -> None:
    command = [sys.executable, "-c", PROBE, "benchmark", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stdout)
    assert status == 0
    assert not set(SLOW) & set(modules)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["engine"], "unknown benchmark 'engine': did you mean 'engines'?"),
        (["engines", "--only", "trainin"], "unknown part of engines 'trainin': did you mean 'training'?"),
        (["--only", "krm"], "unknown part 'krm': did you mean 'krum'?"),
        (["engines", "--models", "cnn-hfx"], "unknown model 'cnn-hfx': did you mean 'cnn-hfl'?"),
        (["engines", "--against", "ry"], "unknown engine 'ry': did you mean 'ray'?"),
        (["aggregators", "--against", "byzlf"], "unknown library 'byzlf': did you mean 'byzfl'?"),
        (["scale", "--models", "softmix"], "unknown model 'softmix': did you mean 'softmax'?"),
        (["scale", "--batch", "10"], "--batch belongs to engines and enforcement and leakage, not to scale"),
        (["engines", "--clients", "ten"], "--clients: expected numbers from 1 on"),
        (["engines", "--clients", "0"], "--clients: expected numbers from 1 on"),
        (["engines", "--repeats", "0"], "--repeats"),
        (["federatio"], "unknown benchmark 'federatio': did you mean 'federation'?"),
        (["federation", "--only", "kill"], "unknown part of federation 'kill': did you mean 'kills'?"),
        (
            ["federation", "--repeats", "2"],
            "--repeats belongs to engines and aggregators and scale and signing",
        ),
        (["federation", "--clients", "1"], "one number of clients, from 2 to 20; found 1"),
        (["federation", "--keep", "."], ". exists already; give a folder that does not"),
        (
            ["signing", "--only", "mean"],
            "--only belongs to engines, aggregators, scale, federation, hierarchy, leakage",
        ),
        (["signing", "--megabytes", "small"], "--megabytes: expected numbers from 1 on"),
        (["scale", "--minutes", "2"], "--minutes belongs to federation, not to scale"),
        (["secure-aggregation", "--models", "mlb"], "unknown model 'mlb': did you mean 'mlp'?"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert "Traceback" not in captured.err


def test_the_parts_that_may_be_typed_are_those_there_are() -> None:
    assert benchmark.PARTS["engines"] == engines.PARTS
    assert benchmark.PARTS["aggregators"] == aggregators.RULES
    assert benchmark.PARTS["scale"] == tuple(scale.STRATEGIES)
    assert benchmark.PARTS["federation"] == federation.PARTS


def test_without_a_name_the_long_ones_are_left_to_those_who_name_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    for module in (engines, aggregators, scale, signing, federation):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "measure", lambda options, report, name=name: ran.append(name))
    assert main(["benchmark", "--quick"]) == 0
    assert ran == ["engines", "aggregators", "scale"]


def test_signing_is_measured_by_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["benchmark", "signing", "--megabytes", "1", "--repeats", "1", "--out", str(out)]) == 0
    assert "Flower: to bytes" in capsys.readouterr().out
    (found,) = json.loads(out.read_text())
    assert found["options"]["megabytes"] == [1]


def test_numbers_may_be_written_with_an_exponent() -> None:
    assert benchmark._numbers("--parameters", "1e5, 200") == (100_000, 200)


def test_a_quick_run_needs_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "installed", lambda name: False)
    monkeypatch.setenv("FEDPLAT_DATA", str(tmp_path))
    small = ["--models", "softmax", "--clients", "2", "--samples", "20", "--repeats", "1"]
    out = tmp_path / "out.json"
    only = ["--only", "training", "--seed", "77", "--out", str(out)]
    assert main(["benchmark", "engines", "--quick", *small, *only]) == 0
    shown = capsys.readouterr().out
    for text in (
        "fedplat engine",
        "best hand-written loop",
        "MNIST is not on this disk",
        "Ray simulation: not",
    ):
        assert text in shown
    (found,) = json.loads(out.read_text())
    assert found["options"]["models"] == ["softmax"]
    (section,) = found["sections"]
    ours = next(row for row in section["rows"] if row["engine"] == engines.OURS)
    assert ours["x ours"] == 1.0
    assert ours["of largest change"] < engines.TOLERANCE


def test_engines_that_disagree_end_with_status_1_and_the_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measure(options: Any, report: Any) -> None:
        report.add(engines.Section("a table", ("engine",), []))
        raise engines.DisagreementError("the model of x differs")

    monkeypatch.setattr(engines, "measure", measure)
    assert main(["benchmark", "engines", "--out", str(tmp_path / "out.json")]) == 1
    captured = capsys.readouterr()
    assert "error: the model of x differs" in captured.err
    assert "a table" in captured.out
    assert (tmp_path / "out.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_quick_benchmark_of_engines_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "fedplat", "benchmark", "engines", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(out.read_text())
    assert [section["title"].split(":")[0] for section in found["sections"]] == [
        "training",
        "no-op client",
        "training on a GPU",
    ]
