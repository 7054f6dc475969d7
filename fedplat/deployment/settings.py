"""The settings of one machine: a file of ``NAME=value`` lines that its start script and fedplat both read."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from ..errors import UserError
from .keys import read_file

FILE = "settings.env"


def settings_text(about: str, values: Mapping[str, object]) -> bytes:
    """Return the file for a shell to read: a comment, then one quoted value a line.

    >>> print(settings_text("Of one machine.", {"PORT": 9094, "NAME": "St. Mary's"}).decode())
    # Of one machine.
    PORT=9094
    NAME='St. Mary'"'"'s'
    <BLANKLINE>
    """
    lines = [f"# {about}", *(f"{name}={shlex.quote(str(value))}" for name, value in values.items())]
    return "\n".join([*lines, ""]).encode()


def read_settings(folder: Path, *required: str) -> dict[str, str]:
    """Return the settings of a machine's folder.

    Raises UserError if the file or a required name is missing, or a line is no assignment.
    """
    path = folder / FILE
    values: dict[str, str] = {}
    for number, line in enumerate(read_file(path).decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, _ = line.partition("=")
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = []
        if not equals or not name.isidentifier() or len(words) != 1:
            raise UserError(f"{path}, line {number}: expected NAME=value, quoted if it has spaces")
        values[name] = words[0].partition("=")[2]
    for name in required:
        if name not in values:
            raise UserError(f"{path}: {name}=... is missing")
    return values


def read_port(folder: Path, name: str = "PORT") -> int:
    """Return a port of a machine's settings; raises UserError if it is none."""
    return port_number(read_settings(folder, name)[name], f"{folder / FILE}: {name}")


def port_number(text: str, where: str) -> int:
    """Return a TCP port from 1 to 65535; raises UserError otherwise."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < number < 65536:
        raise UserError(f"{where}: expected a port from 1 to 65535, found '{text}'")
    return number


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets.

    >>> join_address("::1", 8000)
    '[::1]:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address; raises UserError if it is not ``host:port``.

    >>> split_address("[::1]:8000")
    ('::1', 8000)
    """
    host, _, port = address.rpartition(":")
    if not host:
        raise UserError(f"'{address}': expected host:port, for example superlink.example.org:8000")
    return host.removeprefix("[").removesuffix("]"), port_number(port, f"'{address}'")
