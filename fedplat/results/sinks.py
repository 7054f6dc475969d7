"""Where the rounds of a run go besides its folder: TensorBoard, MLflow.

A sink is told what is on disk already, so it changes nothing of a run, and what it misses can be made up for
from the folder at any time: a run that goes on, or :func:`export` of one that is over, adds no round twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UserError, unknown_name
from .folder import without_nan

if TYPE_CHECKING:
    from ..config import ExperimentConfig
    from ..experiment import Observer
    from .folder import RunFolder

Record = Mapping[str, Any]

SINKS = ("tensorboard", "mlflow")

_WHO = re.compile(r"//[^/@\s]+@")


class Sink(Protocol):
    """Takes the rounds of one strategy after the other, in the process that runs the server.

    Between :meth:`end` and the next :meth:`start` it has no threads: that is when workers are forked.
    """

    def check(self, config: ExperimentConfig) -> None:
        """Raise UserError if it cannot work for runs of this configuration, before the first round."""
        ...

    def start(self, folder: RunFolder, strategy: str, records: Sequence[Record]) -> None:
        """Begin, or go on with, a strategy; ``records`` are all its rounds so far, to be added if missing."""
        ...

    def round(self, record: Record) -> None:
        """Add a round of the strategy."""
        ...

    def end(self, complete: bool) -> None:
        """Leave the strategy, after its last round or before."""
        ...

    def finish(self, folder: RunFolder, strategy: str, summary: Record) -> None:
        """Add what a strategy came to, once the report of the whole run is written; may be called again."""
        ...


def sinks_of(names: Sequence[str], config: ExperimentConfig) -> dict[str, Sink]:
    """Return sinks by name, each checked; raises UserError for one that cannot work here."""
    made: dict[str, Sink] = {}
    for name in names:
        if name == "tensorboard":
            from .tensorboard_sink import TensorBoardSink

            made[name] = TensorBoardSink()
        elif name == "mlflow":
            from .mlflow_sink import MlflowSink

            made[name] = MlflowSink()
        else:
            raise unknown_name("sink", name, SINKS)
        made[name].check(config)
    return made


class Recorder:
    """An observer of a run that hands its rounds to sinks, and passes everything on to another observer.

    A sink that fails is told of once and left alone from then on; the run goes on.
    """

    def __init__(self, observer: Observer, folder: RunFolder, sinks: Mapping[str, Sink]) -> None:
        self._observer = observer
        self._folder = folder
        self._sinks = dict(sinks)
        self._open = False

    def note(self, text: str) -> None:
        """Pass a note on."""
        self._observer.note(text)

    def begin(self, strategy: str, done: int, total: int) -> None:
        """Start the sinks with the rounds that the folder has."""
        self._observer.begin(strategy, done, total)
        records = self._folder.rounds(strategy) if self._sinks else []
        self._open = True
        self._tell(lambda sink: sink.start(self._folder, strategy, records))

    def round(self, strategy: str, record: dict[str, Any]) -> None:
        """Pass a round on, and to the sinks as it is on disk."""
        self._observer.round(strategy, record)
        as_on_disk: Record = without_nan(record)
        self._tell(lambda sink: sink.round(as_on_disk))

    def end(self, strategy: str) -> None:
        """Leave a strategy."""
        self._open = False
        self._tell(lambda sink: sink.end(complete=True))
        self._observer.end(strategy)

    def finish(self, summary: Record) -> None:
        """Give the sinks the ``summary`` of the run, whose report is written."""
        for strategy, figures in summary["strategies"].items():
            self._tell(_finish(self._folder, strategy, figures))

    def close(self) -> None:
        """Leave a strategy whose run was stopped; nothing is left to do after :meth:`end`."""
        if self._open:
            self._open = False
            self._tell(lambda sink: sink.end(complete=False))

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                what(sink)
            except Exception as error:
                del self._sinks[name]
                logging.getLogger("fedplat").warning(
                    "%s failed and gets no more of this run, which goes on (%s). "
                    "Later: fedplat report %s --%s",
                    name,
                    error_line(error),
                    self._folder.path,
                    name,
                )


def export(folder: RunFolder, sinks: Mapping[str, Sink], summary: Record) -> None:
    """Add the rounds of a run that are not there yet to sinks, and what its finished strategies came to.

    Raises UserError if a sink fails.
    """
    for name, sink in sinks.items():
        try:
            for strategy, figures in summary["strategies"].items():
                if not (records := folder.rounds(strategy)):
                    continue
                complete = folder.log(strategy).finished
                sink.start(folder, strategy, records)
                sink.end(complete)
                if complete:
                    sink.finish(folder, strategy, figures)
        except OSError as error:
            raise UserError(f"{name}: {error_line(error)}") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != name:
                raise
            raise UserError(f"{name}: {error_line(error)}") from error


def export_folders(paths: Sequence[Path], names: Sequence[str]) -> None:
    """Export runs to the sinks with these names; a path is a run's folder or a table's.

    Raises UserError for a folder of neither kind, and if a sink cannot work or fails.
    """
    from .folder import RunFolder
    from .summary import summarise

    for path in paths:
        cells = sorted(config.parent for config in path.glob("cells/*/config.toml"))
        for each in cells if cells and not (path / "config.toml").exists() else [path]:
            folder = RunFolder.existing(each)
            export(folder, sinks_of(names, folder.config), summarise(folder))


def _finish(folder: RunFolder, strategy: str, figures: Record) -> Callable[[Sink], None]:
    return lambda sink: sink.finish(folder, strategy, figures)


def error_line(error: Exception) -> str:
    """Return what an error says in one line, without who logs in to an address in it.

    >>> error_line(ValueError("http://me:secret@example.org/x failed\\nand so on"))
    'ValueError: http://example.org/x failed'
    """
    lines = _WHO.sub("//", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
