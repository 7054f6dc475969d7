"""The run folder: what a run leaves on disk, written so that it survives being killed at any moment."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from .. import __version__
from ..config import ExperimentConfig, load
from ..errors import UserError

if TYPE_CHECKING:
    import torch

_PACKAGES = ("flwr", "torch", "torchvision", "numpy", "scikit-learn")


def default_path(config: ExperimentConfig) -> Path:
    """Return ``runs/<scenario>-<config hash>``."""
    return Path("runs") / f"{config.name}-{config.digest()}"


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content in one step: a reader, or a kill, sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def without_nan(value: Any) -> Any:
    """Return plain values with None for numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    return [without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one step."""
    write_atomically(path, (json.dumps(without_nan(value), indent=2) + "\n").encode())


class StrategyLog:
    """One strategy's part of a run folder: rounds, clients, edges, checkpoint and final model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def finished(self) -> bool:
        """Whether the last round is done; the final model is written after everything else."""
        return (self.path / "model.pt").exists()

    @property
    def started(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return (self.path / "checkpoint.pt").exists()

    def append(
        self,
        record: Mapping[str, Any],
        clients: Sequence[Mapping[str, Any]],
        edges: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Add a round, its clients and, where there are any, its edge servers."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, rows in (("clients.jsonl", clients), ("edges.jsonl", edges), ("rounds.jsonl", [record])):
            if name == "edges.jsonl" and not rows:
                continue
            with (self.path / name).open("a") as file:
                file.write("".join(json.dumps(without_nan(row)) + "\n" for row in rows))

    def rewind(self, last_round: int) -> None:
        """Drop what was written after a round, such as the half-written round of a killed run."""
        for name in ("rounds.jsonl", "clients.jsonl", "edges.jsonl"):
            rows = [row for row in read_lines(self.path / name) if row["round"] <= last_round]
            if (self.path / name).exists():
                write_atomically(self.path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write the state after a round, tensors and plain values only."""
        self._save("checkpoint.pt", state)

    def load_checkpoint(self) -> dict[str, Any]:
        """Read the last checkpoint; raises UserError if it cannot be read."""
        import torch

        path = self.path / "checkpoint.pt"
        try:
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            raise UserError(
                f"{path}: not a readable checkpoint ({error}); delete the folder to start again"
            ) from error

    def save_model(self, state: Mapping[str, torch.Tensor]) -> None:
        """Write the final model as a state dict, which also marks the strategy as finished."""
        self._save("model.pt", dict(state))

    def _save(self, name: str, content: Any) -> None:
        import torch

        self.path.mkdir(parents=True, exist_ok=True)
        buffer = BytesIO()
        torch.save(content, buffer)
        write_atomically(self.path / name, buffer.getvalue())


class RunFolder:
    """A run folder that belongs to one configuration; see :meth:`open` and :meth:`existing`."""

    def __init__(self, path: Path, config: ExperimentConfig, environment: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.environment = environment
        self.finished = all(self.log(name).finished for name in config.strategies)

    @classmethod
    def open(cls, path: Path, config: ExperimentConfig, resume: bool) -> RunFolder:
        """Open the folder for a run, creating it if it is not there.

        Raises UserError if it holds another configuration, or an unfinished run and ``resume`` is not asked
        for. A folder that holds the finished run is opened as it is.
        """
        if (path / "config.toml").exists():
            folder = cls.existing(path)
            if folder.config.digest() != config.digest():
                difference = _first_difference(folder.config.to_dict(), config.to_dict())
                raise UserError(f"{path} holds another run: {difference}. Give another folder with --out")
            started = any(folder.log(name).started for name in config.strategies)
            if started and not folder.finished and not resume:
                raise UserError(
                    f"{path} holds an unfinished run of this configuration: add --resume to go on with it, "
                    f"or give another folder with --out"
                )
            # Where data lies may change between runs; what they compute may not.
            folder.config = config
            return folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            environment = describe_environment()
            write_json(path / "environment.json", environment)
            write_atomically(path / "config.toml", tomli_w.dumps(config.to_dict()).encode())
        except OSError as error:
            raise UserError(f"{path}: cannot write the run folder: {error}") from error
        return cls(path, config, environment)

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Open a run folder to read it; raises UserError if there is none."""
        source = path / "config.toml"
        if not source.exists():
            raise UserError(f"{path}: no run here (there is no config.toml)")
        config = load(tomllib.loads(source.read_text()), str(source))
        environment: dict[str, Any] = {}
        if (path / "environment.json").exists():
            environment = json.loads((path / "environment.json").read_text())
        return cls(path, config, environment)

    def log(self, strategy: str) -> StrategyLog:
        """Return one strategy's part of the folder."""
        return StrategyLog(self.path / strategy.replace(":", "_"))

    def rounds(self, strategy: str) -> list[dict[str, Any]]:
        """Return the rounds of a strategy."""
        return list(read_lines(self.log(strategy).path / "rounds.jsonl"))

    def clients(self, strategy: str) -> Iterator[dict[str, Any]]:
        """Yield the client rows of a strategy, round by round."""
        return read_lines(self.log(strategy).path / "clients.jsonl")

    def edges(self, strategy: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a strategy's edge servers, round by round; none where it has none."""
        return read_lines(self.log(strategy).path / "edges.jsonl")

    def describe(self, **facts: Any) -> None:
        """Add facts to environment.json."""
        self.environment |= facts
        write_json(self.path / "environment.json", self.environment)


def describe_environment() -> dict[str, Any]:
    """Return versions, machine and commit, for the record."""
    return {
        "fedplat": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSON-lines file; a last line cut off by a kill is left out."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _first_difference(old: Any, new: Any, key: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(n for n in new if n not in old)]:
            if old.get(name) != new.get(name):
                return _first_difference(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    return f"there {key} is {old!r}, here {new!r}"
