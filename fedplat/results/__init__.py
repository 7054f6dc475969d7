"""The run folder, tables, pictures and progress."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .frames import Results


def load(*folders: str | os.PathLike[str]) -> Results:
    """Return the records of run folders, or of a table's, as pandas DataFrames.

    See :func:`fedplat.results.frames.load`, which is imported when it is called.
    """
    from .frames import load as load_frames

    return load_frames(*folders)
