"""Device logs and the budgets made of them: what each device has free, how fast it is linked, and when.

``logs`` reads and looks up, ``importers`` reads public formats, ``synthetic`` makes logs from a seed, and
``schedule`` turns them into one budget per node and round.
"""

from .logs import DeviceLog, DeviceLogs, Sample, read_logs, write_logs
from .schedule import (
    Budget,
    DeviceSchedule,
    Level,
    class_schedule,
    markov_schedule,
    trace_schedule,
    uniform_schedule,
)
from .synthetic import generate, synthetic_logs

__all__ = [
    "Budget", "DeviceLog", "DeviceLogs", "DeviceSchedule", "Level", "Sample", "class_schedule", "generate",
    "markov_schedule", "read_logs", "synthetic_logs", "trace_schedule", "uniform_schedule", "write_logs",
]  # fmt: skip
