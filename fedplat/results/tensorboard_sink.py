"""A run as event files of TensorBoard: ``tensorboard --logdir RUN/tensorboard`` shows its strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .flatten import numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from ..config import ExperimentConfig
    from .folder import RunFolder


class TensorBoardSink:
    """Writes ``RUN/tensorboard/<strategy>/``: each number of a round as a scalar at its step."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def check(self, config: ExperimentConfig) -> None:
        """Raise UserError without the package tensorboard."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError("--tensorboard needs TensorBoard: pip install 'fedplat[tensorboard]'") from error

    def start(self, folder: RunFolder, strategy: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Open a new event file and add the rounds that the ones before it lack."""
        from torch.utils.tensorboard import SummaryWriter

        path = events_path(folder, strategy)
        last = _last_step(path)
        rounds = [record["round"] for record in records]
        if rounds and last == rounds[-1] and folder.log(strategy).finished:
            return
        # The last round may have been cut off by a kill; it is written again, in place of what is there.
        self._writer = SummaryWriter(str(path), purge_step=None if last is None else last)
        for record in records:
            if last is None or record["round"] >= last:
                self._add(record)
        self._writer.flush()

    def round(self, record: Mapping[str, Any]) -> None:
        """Write a round, at once."""
        assert self._writer is not None
        self._add(record)
        self._writer.flush()

    def end(self, complete: bool) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self, folder: RunFolder, strategy: str, summary: Mapping[str, Any]) -> None:
        """Nothing more is written."""

    def _add(self, record: Mapping[str, Any]) -> None:
        assert self._writer is not None
        for name, value in numbers(record).items():
            if name != "round":
                self._writer.add_scalar(name, value, record["round"])


def events_path(folder: RunFolder, strategy: str) -> Path:
    """Return the folder of a strategy's event files."""
    return folder.path / "tensorboard" / folder.log(strategy).path.name


def _last_step(path: Path) -> int | None:
    """Return the last step that event files hold, None without any; a cut-off end is left out."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    steps = [
        event.step
        for file in sorted(path.glob("events.out.tfevents.*"))
        for event in LegacyEventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]
    return max(steps, default=None)
