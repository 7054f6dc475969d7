"""Finding a published data set: the user's root, an earlier download, or the network if it is allowed."""

import http.client
import io
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from .base import Source

_TIMEOUT_SECONDS = 15.0


@dataclass(frozen=True)
class Wanted:
    """A published data set: its title, what a folder must hold, a test for that, and how to download it.

    ``fetch(folder)`` makes ``folder / subfolder``; ``layout`` is told to the user.
    """

    title: str
    layout: str
    subfolder: str
    is_in: Callable[[Path], bool]
    fetch: Callable[[Path], object]


def locate(source: Source, wanted: Wanted) -> Path:
    """Return a folder that holds the data set; raises UserError with where it looked and how to get it.

    An explicit root that lacks the set is only passed over if downloading is allowed. Downloads go to the
    cache, never to the root, and appear there whole or not at all.
    """
    downloads = source.cache / "downloads"
    looked = []
    if source.root is not None:
        root = source.root.expanduser()
        if not root.is_dir():
            raise UserError(f"data.root: there is no folder {root}")
        if wanted.is_in(root):
            return root
        looked.append(f"{root} (data.root)")
    if source.root is None or source.download:
        if wanted.is_in(downloads):
            return downloads
        looked.append(f"{downloads} (earlier downloads)")
    failure = _download(downloads, wanted) if source.download else None
    if source.download and failure is None:
        return downloads
    advice = "set FEDPLAT_DATA or data.root to a folder that has it"
    if not source.download:
        advice += ", or allow the download (download = true in [data])"
    tried = f"; downloading it failed: {failure}" if failure else ""
    raise UserError(
        f"{wanted.title} is missing: no {wanted.layout} in {' or '.join(looked)}{tried}. To get it, {advice}"
    )


def _download(downloads: Path, wanted: Wanted) -> str | None:
    part = downloads / f".part-{wanted.subfolder}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        with _short_timeout(), redirect_stdout(io.StringIO()):
            wanted.fetch(part)
        if not wanted.is_in(part):
            return "the files that came are not the ones expected"
        with suppress(OSError):  # another process was first; checked below
            os.rename(part / wanted.subfolder, downloads / wanted.subfolder)
        return None if wanted.is_in(downloads) else f"cannot put the files into {downloads}"
    except (OSError, RuntimeError, ValueError, EOFError, http.client.HTTPException) as error:
        reasons = [line for line in str(error).splitlines() if "rror" in line] or [type(error).__name__]
        return reasons[-1].strip()
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _short_timeout() -> Iterator[None]:
    # torchvision opens its connections without a timeout of its own: a silent network would hang for ever.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
