"""``fedplat run``: one situation, one or more strategies, a table and a picture."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, unknown_name
from .common import INTERRUPTED, TERMINATED, Overrides, Scenario, Seed, console, load_config
from .report import print_results

if TYPE_CHECKING:
    from ..config import ExperimentConfig

DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("local", "flower-simulation")


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run in the same way as Ctrl-C."""


def run(
    scenario: Scenario,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="A,B,C",
            help="Strategies to compare, instead of the scenario's.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="The run folder.", show_default="runs/<scenario>-<config hash>"
        ),
    ] = None,
    seed: Seed = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Worker processes; the results do not depend on it.",
            show_default="one per core",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="|".join(DEVICES), help="Where to compute.")
    ] = "auto",
    engine: Annotated[
        str, typer.Option("--engine", metavar="|".join(ENGINES), help="What runs the clients.")
    ] = "local",
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size",
            min=1,
            help="Clients that a worker trains at once.",
            show_default="by a short trial",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard for TensorBoard.")
    ] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Also log to MLflow, where MLFLOW_TRACKING_URI says.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but where the results are.")] = False,
) -> None:
    """Run a scenario with one or more strategies and compare them.

    SCENARIO is a name that "fedplat list scenarios" shows, or a TOML file;
    SCENARIO:VARIANT is one of its variants.
    """
    for option, value, allowed in (("--device", device, DEVICES), ("--engine", engine, ENGINES)):
        if value not in allowed:
            raise unknown_name(option, value, allowed)
    config = load_config(scenario, overrides, seed, strategy or ())
    check_engine(engine, config, workers, group_size, device)

    from .. import engines, experiment
    from ..results.folder import RunFolder, default_path
    from ..results.progress import display
    from ..results.report import write_report
    from ..results.sinks import Recorder, export, sinks_of

    experiment.resolve_device(device)  # before a folder is made for a run that cannot start
    sinks = sinks_of(wanted := chosen_sinks(tensorboard, mlflow), config)
    path = out or default_path(config)
    folder = RunFolder.open(path, config, resume)
    if folder.finished:
        if not quiet:
            typer.echo(f"{path} already holds this run; it is not run again (--out DIR makes another copy).")
        summary = write_report(folder)
        export(folder, sinks, summary)
        print_results(folder, summary, quiet)
        return
    terminal = console()
    if not quiet:
        terminal.print(_headline(config, path), soft_wrap=True)
    try:
        known = {name: folder.rounds(name) for name in config.strategies}
        with sigterm_as_interrupt(), display(config.rounds, known, terminal, quiet) as shown:
            observer = Recorder(shown, folder, sinks)
            with closing(observer):
                experiment.run(
                    config,
                    folder,
                    engine=engines.of(engine, workers=workers, device=device),
                    device=device,
                    observer=observer,
                    group_size=group_size,
                )
    except KeyboardInterrupt as stop:
        command = resume_command(
            scenario, strategy, overrides, path, seed, workers, device, engine, group_size, quiet, wanted
        )
        print(f"stopped; every full round is saved in {path}. To go on:\n  {command}", file=sys.stderr)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
    finished = RunFolder.existing(path)
    summary = write_report(finished)
    observer.finish(summary)
    print_results(finished, summary, quiet)


def chosen_sinks(tensorboard: bool, mlflow: bool) -> list[str]:
    """Return the names of the sinks that are asked for."""
    return [name for name, wanted in (("tensorboard", tensorboard), ("mlflow", mlflow)) if wanted]


def check_engine(
    engine: str, config: ExperimentConfig, workers: int | None, group_size: int | None, device: str
) -> None:
    """Raise UserError for options that an engine does not have, or that leave its clients without a GPU."""
    if engine == "local":
        return
    for option, value in (("--workers", workers), ("--group-size", group_size)):
        if value is not None:
            raise UserError(
                f"{option} belongs to the local engine; Flower's simulation runs as many clients at once as "
                f"--set flower.num_cpus and flower.num_gpus allow"
            )
    if device == "cuda" and not config.flower.num_gpus:
        raise UserError(
            "--device cuda: Ray shows clients a GPU only if each gets a share, --set flower.num_gpus=0.1"
        )


def resume_command(
    scenario: str,
    strategy: list[str] | None,
    overrides: list[str] | None,
    path: Path,
    seed: int | None,
    workers: int | None,
    device: str,
    engine: str,
    group_size: int | None,
    quiet: bool,
    sinks: Sequence[str] = (),
) -> str:
    """Return the command line that goes on with a stopped run, quoted for a shell.

    >>> resume_command("mine", ["mean"], ["model.hidden=[8]"], Path("a"), 3, 2, "auto", "local", None, False)
    "fedplat run mine --strategy mean --set 'model.hidden=[8]' --seed 3 --workers 2 --out a --resume"
    """
    words = ["fedplat", "run", scenario]
    words += [word for value in strategy or () for word in ("--strategy", value)]
    words += [word for value in overrides or () for word in ("--set", value)]
    words += [] if seed is None else ["--seed", str(seed)]
    words += [] if workers is None else ["--workers", str(workers)]
    words += [] if device == "auto" else ["--device", device]
    words += [] if engine == "local" else ["--engine", engine]
    words += [] if group_size is None else ["--group-size", str(group_size)]
    words += [f"--{name}" for name in sinks]
    words += ["--quiet"] if quiet else []
    return shlex.join([*words, "--out", str(path), "--resume"])


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated` inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _headline(config: ExperimentConfig, path: Path) -> str:
    attacks = ", ".join(attack.name for attack in config.attacks) or "no attack"
    clients = f"{config.partition.clients or 'all'} clients ({config.partition.name})"
    return (
        f"{config.name}: {config.data.name}, {clients}, {config.model.name}, {attacks}, "
        f"{config.rounds} rounds, seed {config.seed}\nrun folder: {path}"
    )
