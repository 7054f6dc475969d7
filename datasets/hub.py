"""The way to the package ``datasets`` of Hugging Face: importing it, reading a folder, asking the Hub."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError
from .base import Source

MISSING = "names that start with 'hf:' need flwr-datasets: pip install 'fedplat[hf]'"


def installed(name: str = "datasets") -> Any:
    """Return an installed module of Hugging Face or flwr-datasets, imported when it is first needed.

    A folder called ``datasets`` in the working directory or beside a script would come first in Python's
    search, and flwr-datasets itself imports that name: here the installed package comes first. Raises
    UserError if it is not installed, or if another module of that name is in use.
    """
    try:
        place = str(distribution("datasets").locate_file(""))
        distribution("flwr-datasets")
    except PackageNotFoundError:
        raise UserError(MISSING) from None
    loaded = sys.modules.get("datasets")
    if loaded is not None and not _is_hugging_face(loaded):
        origin = getattr(loaded, "__file__", None) or "a folder without __init__.py"
        raise UserError(
            f"'hf:' names need Hugging Face's package 'datasets', and another one of that name is in use "
            f"({origin}): rename it, or start from another folder"
        )
    if name in sys.modules:
        return sys.modules[name]
    sys.path.insert(0, place)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{MISSING} (importing {name}: {error})") from error
    finally:
        sys.path.remove(place)


def _is_hugging_face(module: ModuleType) -> bool:
    return hasattr(module, "load_dataset") and hasattr(module, "ClassLabel")


@dataclass(frozen=True)
class Opened:
    """The splits of a repository, by name, and the local folder that they were read from, if any."""

    splits: Mapping[str, Any]
    folder: Path | None


def open_repository(source: Source, repository: str, subset: str | None, revision: str | None) -> Opened:
    """Open a repository of the Hub, its copy ``<root>/<repository>``, or a folder given as a path.

    Raises UserError if it cannot be read, does not exist, or is out of reach.
    """
    hf = installed()
    folder = _folder(source, repository)
    try:
        if folder is not None and any((folder / f).exists() for f in ("dataset_dict.json", "state.json")):
            found = hf.load_from_disk(str(folder))
        elif folder is not None:
            found = hf.load_dataset(str(folder), name=subset, cache_dir=str(source.cache / "hf-files"))
        else:
            with _only_cached(hf, offline=not source.download):
                found = hf.load_dataset(repository, name=subset, revision=revision)
    except UserError:
        raise
    # The packages raise whatever their parts do; each failure is one of the user's data or network.
    except Exception as error:
        raise UserError(_explained(error, repository, folder, source.download)) from error
    return Opened(found if isinstance(found, Mapping) else {"train": found}, folder)


def split_fingerprint(split: Any) -> str:
    """Return the hash by which the package tells one state of a split from another."""
    return str(split._fingerprint)


def _folder(source: Source, repository: str) -> Path | None:
    """Return the local folder that is meant, None for a repository of the Hub."""
    if repository.startswith(("/", "./", "../", "~")) or repository in (".", ".."):
        folder = Path(repository).expanduser()
        if not folder.is_dir():
            raise UserError(f"hf:{repository}: there is no such folder")
        return folder
    copy = None if source.root is None else source.root.expanduser() / repository
    return copy if copy is not None and copy.is_dir() else None


@contextmanager
def _only_cached(hf: Any, *, offline: bool) -> Iterator[None]:
    """Keep the package from asking the Hub, if ``offline``; it reads these switches at every call."""
    switches = [hf.config, importlib.import_module("huggingface_hub").constants] if offline else []
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _explained(error: Exception, repository: str, folder: Path | None, download: bool) -> str:
    where, text = f"hf:{repository}", " ".join(str(error).split()) or type(error).__name__
    if folder is not None:
        return f"{where}: cannot read {folder}: {text}"
    if isinstance(error, ConnectionError) or type(error).__module__.split(".")[0] in ("httpx", "requests"):
        if not download:
            return f"{where} is not in the local cache, and data.download is false: {text}"
        return (
            f"{where}: the Hugging Face Hub cannot be reached ({text}). Try again with a network, unset "
            f"HF_HUB_OFFLINE if it is set, or give a local copy: data.root with {repository}/ in it as "
            f"save_to_disk writes it, or data.name = 'hf:/path/to/it'"
        )
    if type(error).__name__ == "DatasetNotFoundError":
        return f"{where}: the Hub has no such repository, or it is private: {text}"
    if "config" in text.lower():
        return f"{where}: set data.subset to one of the repository's configurations: {text}"
    return f"{where}: cannot load it: {text}"
