"""Decoded arrays on disk, opened as memory maps so that all processes of a machine share one copy.

An entry is a folder ``<cache>/<name>-<key>`` of ``.npy`` files and a ``manifest.json``. It is written under
a temporary name and renamed, so it is either absent or whole; an entry whose sizes or headers do not
match its manifest is built anew. The key covers the loader, its version, the settings that matter and
the names, sizes and modification times of the raw files: a changed file makes a new entry.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
Facts = dict[str, Any]

_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, eq=False)
class Cached:
    """What a loader decoded: named arrays, small JSON facts beside them, and the hash of the arrays."""

    arrays: Arrays
    facts: Facts
    fingerprint: str


@dataclass(frozen=True, order=True)
class Stamp:
    """One raw file as the cache key sees it: path parts below the root, size in bytes, mtime in ns."""

    parts: tuple[str, ...]
    size: int
    mtime_ns: int


def default_cache() -> Path:
    """Return the cache folder: $FEDPLAT_CACHE, else $XDG_CACHE_HOME/fedplat, else ~/.cache/fedplat."""
    if chosen := os.environ.get("FEDPLAT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedplat"


def stamp(root: Path, paths: Iterable[Path]) -> list[Stamp]:
    """Return the stamps of some files below ``root``, sorted by path."""
    found = []
    for path in paths:
        status = path.stat()
        found.append(Stamp(path.relative_to(root).parts, status.st_size, status.st_mtime_ns))
    return sorted(found)


def fingerprint(arrays: Arrays) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes; the same on every machine.

    >>> fingerprint({"x": np.arange(3, dtype=np.int64)})[:12]
    'b68a3deba8f0'
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        portable = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name} {portable.dtype.str} {portable.shape}\n".encode())
        digest.update(portable.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def cached(
    cache: Path,
    name: str,
    version: int,
    settings: Mapping[str, object],
    files: Iterable[Stamp],
    build: Callable[[], tuple[Arrays, Facts]],
) -> Cached:
    """Return the decoded arrays of a data set, from the cache if it has them, else from ``build()``.

    ``version`` goes up when a loader decodes differently. Several processes may call this at once for the
    same entry: each gets a whole one. If the cache folder cannot be written the arrays stay in memory, with
    one warning. Array contents are not verified on a hit, only sizes and headers: reading every byte
    would cost what the map saves.
    """
    identity = [name, version, sorted(settings.items()), [[*s.parts, s.size, s.mtime_ns] for s in files]]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
    folder = cache / f"{name}-{key}"
    if (hit := _read(folder)) is not None:
        return hit
    arrays, facts = build()
    built = Cached(arrays, facts, fingerprint(arrays))
    try:
        _write(folder, built)
    except OSError as error:
        warnings.warn(
            f"the cache folder {cache} cannot be written ({error.strerror or error}): {name} stays in memory "
            f"and is decoded again by each process; set FEDPLAT_CACHE to a folder that can be written",
            stacklevel=3,
        )
        return built
    return _read(folder) or built


def _read(folder: Path) -> Cached | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        arrays = {}
        for name, (dtype, shape, size) in manifest["arrays"].items():
            path = folder / f"{name}.npy"
            if path.stat().st_size != size:
                return None
            # Copy-on-write: torch warns about arrays it may not write to; nothing reaches the file.
            array = np.load(path, mmap_mode=None if 0 in shape else "c", allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape:
                return None
            arrays[name] = array
        return Cached(arrays, manifest["facts"], manifest["fingerprint"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(folder: Path, built: Cached) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    part = folder.parent / f".part-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
    part.mkdir()
    try:
        sizes: dict[str, tuple[str, list[int], int]] = {}
        for name, array in built.arrays.items():
            with open(part / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                _flush(file.fileno())
                sizes[name] = (array.dtype.str, list(array.shape), file.tell())
        manifest = {"arrays": sizes, "facts": built.facts, "fingerprint": built.fingerprint}
        with open(part / "manifest.json", "w", encoding="utf-8") as text:
            json.dump(manifest, text)
            text.flush()
            _flush(text.fileno())
        _install(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _flush(descriptor: int) -> None:
    # After a power cut a renamed file may otherwise be there with its size but without its bytes.
    with suppress(OSError):
        os.fsync(descriptor)


def _install(part: Path, folder: Path) -> None:
    for _ in range(5):
        try:
            os.rename(part, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if _read(folder) is not None:
            return  # another process was first
        broken = part.with_name(f"{part.name}-broken")
        with suppress(OSError):  # another process may be replacing the same broken entry
            os.rename(folder, broken)
        shutil.rmtree(broken, ignore_errors=True)


def _sweep(cache: Path) -> None:
    for left in cache.glob(".part-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
