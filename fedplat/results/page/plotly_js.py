"""Plotly's JavaScript as a page embeds it: compressed once per version and kept in the cache."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...datasets.cache import default_cache
from ..folder import write_atomically

_LEVEL = 6
_GZIP = 31


@dataclass(frozen=True)
class Library:
    """The library: gzip in base64, and the hash that a content security policy allows it by."""

    packed: str
    sha256: str


@cache
def library() -> Library:
    """Return Plotly's JavaScript, from the cache where it has been compressed before."""
    source = _source()
    stat = source.stat()
    kept = default_cache() / "page" / f"plotly-{stat.st_size}-{stat.st_mtime_ns}.json"
    try:
        found = json.loads(kept.read_bytes())
        return Library(str(found["packed"]), str(found["sha256"]))
    except (OSError, ValueError, KeyError):
        pass
    made = pack(source.read_bytes())
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps({"packed": made.packed, "sha256": made.sha256}).encode())
    except OSError:
        pass  # a cache that cannot be written costs a second each time
    return made


def pack(script: bytes) -> Library:
    """Compress a script, the same bytes always to the same text.

    >>> packed = pack(b"let a = 1")
    >>> zlib.decompress(base64.b64decode(packed.packed), 31)
    b'let a = 1'
    """
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    packed = compressor.compress(script) + compressor.flush()
    return Library(
        base64.b64encode(packed).decode(), base64.b64encode(hashlib.sha256(script).digest()).decode()
    )


def _source() -> Path:
    # Found without importing plotly, which takes longer than everything else here.
    found = find_spec("plotly")
    if found is not None and found.origin:
        path = Path(found.origin).parent / "package_data" / "plotly.min.js"
        if path.exists():
            return path
    import plotly.offline  # type: ignore[import-untyped]

    return Path(plotly.offline.__file__).parents[1] / "package_data" / "plotly.min.js"
