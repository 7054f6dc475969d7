"""Keeps ``table.json`` up to date while a table runs, so that ``fedplat watch`` has something to show."""

from __future__ import annotations

import time
from pathlib import Path

from .cells import Plan
from .on_disk import entries_of
from .render import write_json_values
from .runner import Watcher

_SECONDS = 10.0
_REST = 20.0
"""How many times as long as writing takes it rests afterwards, at least."""


class Followed:
    """A watcher that passes everything on, and writes ``table.json`` at first and when runs end."""

    def __init__(self, inner: Watcher, plan: Plan, out: Path, command: str) -> None:
        self._inner = inner
        self._what = plan, out, command
        self._next = 0.0
        self._changed = True
        self._write()

    def start(self, identity: str) -> None:
        """Pass it on."""
        self._inner.start(identity)

    def round(self, identity: str, number: int, accuracy: float | None) -> None:
        """Pass it on."""
        self._inner.round(identity, number, accuracy)

    def end(self, identity: str, state: str, reason: str) -> None:
        """Pass it on, and write what is new, now or a little later."""
        self._inner.end(identity, state, reason)
        self._changed = True
        self._write()

    def note(self, text: str) -> None:
        """Pass it on."""
        self._inner.note(text)

    def tick(self) -> None:
        """Pass it on."""
        self._inner.tick()
        self._write()

    def _write(self) -> None:
        began = time.monotonic()
        if not self._changed or began < self._next:
            return
        plan, out, command = self._what
        write_json_values(plan, entries_of(plan, out), out, command)
        now = time.monotonic()
        self._next = now + max(_SECONDS, _REST * (now - began))
        self._changed = False
