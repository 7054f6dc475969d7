from __future__ import annotations

import os

# Before torch is imported: two threads per process on shared cores make small steps many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from pathlib import Path

import pytest

from fedplat.compat import set_task_identity


@pytest.fixture(autouse=True)
def _flower_identity() -> None:
    set_task_identity(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep decoded data of tests out of the user's cache, but share it between tests."""
    monkeypatch.setenv("FEDPLAT_CACHE", str(_cache(tmp_path_factory)))


def _cache(factory: pytest.TempPathFactory) -> Path:
    return factory.getbasetemp() / "cache"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pictures be composed but not painted: that takes most of a second, and has tests of its own."""
    from matplotlib.figure import Figure

    def save(figure: Figure, path: Path, **options: object) -> None:
        path.write_bytes(b"a picture")

    monkeypatch.setattr(Figure, "savefig", save)
