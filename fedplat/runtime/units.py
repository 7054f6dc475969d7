"""What a worker gets in one message: a group of clients, a run of very short ones, or a single client."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.clientapp import ClientApp

from ..compat import MessageType
from ..grouped import GroupApp
from .batch import Batch, Job

_LEAST_GROUPS = 8  # in a round where the groups must not depend on the number of workers
_LEAST_SHARED = 8  # clients: smaller groups lose more than a fair division gains
_SHORT = 0.004  # seconds: shorter clients travel together, as a message costs about 0.2 ms


@dataclass(eq=False)
class Unit:
    """Jobs of one batch that a worker gets in one message; ``home`` is the worker whose turn they are.

    The same clients have the same home in every round, so that their data stays in its caches.
    """

    jobs: list[Job]
    home: int = 0

    @property
    def batch(self) -> Batch:
        """The batch all jobs belong to."""
        return self.jobs[0].batch

    @property
    def message_ids(self) -> set[str]:
        """The ids of the messages."""
        return {job.message.metadata.message_id for job in self.jobs}


class Planner:
    """Divides the jobs of a batch into units, going by how long each client took the last time.

    ``homes`` is the number of workers.
    """

    def __init__(self, app: ClientApp, homes: int) -> None:
        self._homes = homes
        self._limit, self._exact = 1, True
        if isinstance(app, GroupApp):
            self._limit, self._exact = app.group_limit, app.group_exact
        self._seconds: dict[tuple[int, str], float] = {}

    def units(self, jobs: list[Job]) -> list[Unit]:
        """Return the units of a batch, in the order of the jobs."""
        units: list[list[Job]] = []
        for (_, length), run in itertools.groupby(jobs, self._run_length(len(jobs))):
            chunk = list(run)
            # As many units as it takes, but none of them much smaller than the others.
            count = -(-len(chunk) // length)
            if length > 1 and self._exact:
                count = min(-(-count // self._homes) * self._homes, len(chunk))
            cuts = [len(chunk) * i // count for i in range(count + 1)]
            units += [chunk[start:stop] for start, stop in itertools.pairwise(cuts)]
        return [Unit(unit, i * self._homes // len(units)) for i, unit in enumerate(units)]

    def took(self, job: Job, seconds: float) -> None:
        """Remember how long a client took."""
        self._seconds[_kind(job)] = seconds

    def expected_seconds(self, unit: Unit, unknown: float = 0.0) -> float:
        """Return how long a unit will take, with ``unknown`` for a client that has not run yet."""
        return sum(self._seconds.get(_kind(job), unknown) for job in unit.jobs)

    def _run_length(self, jobs: int) -> Callable[[Job], tuple[tuple[int, str], int]]:
        """Return the function of a job that says with whom it may share a unit, and how many they may be."""
        share = -(-jobs // self._homes)
        # A worker that is held up should leave something for the others to take.
        group = min(self._limit, share, max(_LEAST_SHARED, -(-share // 3)))
        if not self._exact:
            # Groups that decide on bits must not depend on the number of workers.
            group = max(1, min(self._limit, jobs // _LEAST_GROUPS))

        def of(job: Job) -> tuple[tuple[int, str], int]:
            kind = job.task.content, job.message.metadata.message_type
            if self._limit > 1 and kind[1].split(".")[0] == MessageType.TRAIN:
                return kind, group
            seconds = self._seconds.get(_kind(job), math.inf)
            return kind, max(1, min(int(_SHORT / seconds), share // 4)) if seconds > 0 else 1

        return of


def without(units: Iterable[Unit], message_ids: set[str]) -> list[Unit]:
    """Return the units with the jobs that are not given up."""
    left = [
        Unit([job for job in unit.jobs if job.message.metadata.message_id not in message_ids], unit.home)
        for unit in units
    ]
    return [unit for unit in left if unit.jobs]


def _kind(job: Job) -> tuple[int, str]:
    return job.task.node_id, job.message.metadata.message_type
