"""Public traces as device logs. Nothing is downloaded and no trace is shipped: each has its own licence.

What a format does not say (free memory, and for some the link speeds) is given by the user as one constant
for all devices, and asked for if missing. The formats, with what is known of them and what is inferred:

* ``fedscale-capacity``: a pickle, id -> {``computation`` ms per sample, ``communication`` kbit/s}. The one
  speed is both down and up, as in FedScale's own transfer time. Computation has no column here: left out.
* ``fedscale-behaviour``: a pickle, id -> {``active`` [s], ``inactive`` [s], ``finish_time`` s, ...}; it
  repeats after ``finish_time``. The device is available from each active to the inactive of the same place
  (the end excluded: inferred); what lies beyond ``finish_time`` is never reached and left out.
* ``mahimahi``: one line per chance to deliver a packet of 1500 bytes, in whole ms, repeating after the last.
* ``pairs``: [seconds, Mbit/s] pairs, as JSON or one pair per line (comma, tab or spaces; ``#`` comments).
* ``flash``: JSON, id -> {``messages``: lines "YYYY-mm-dd HH:MM:SS<tab>event", ...}. Available is: idle,
  charging, on Wi-Fi; idle is a locked or dark screen. That anything not yet told counts as "no", that events
  of other names say nothing, and that clock times have no jumps, is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import unknown_name
from .device_traces import fedscale_behaviour, fedscale_capacity, flash
from .given import Given
from .logs import DeviceLog, DeviceLogs
from .network_traces import mahimahi, pairs

FORMATS: Mapping[str, Callable[[Path, Given], list[DeviceLog]]] = {
    "fedscale-capacity": fedscale_capacity,
    "fedscale-behaviour": fedscale_behaviour,
    "mahimahi": mahimahi,
    "pairs": pairs,
    "flash": flash,
}
"""The formats that :func:`import_logs` reads."""


def import_logs(kind: str, source: Path | str, given: Given | None = None) -> DeviceLogs:
    """Return the logs in a public trace; ``kind`` is one of :data:`FORMATS`.

    For ``mahimahi`` and ``pairs`` the source may be a folder, one device per file. Raises UserError for an
    unknown kind, a source that is not of this kind, and a column that neither it nor the user gives.
    """
    if kind not in FORMATS:
        raise unknown_name("format", kind, FORMATS)
    return DeviceLogs(tuple(FORMATS[kind](Path(source), given or Given())))
