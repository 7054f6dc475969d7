"""The world of a hierarchical run: clients within reach of edge servers, their radio, who is there when.

Drawn once, before a run, and the same for every policy. ``[world]`` in a scenario names one of the functions
of :mod:`.world_settings`, all of which are called as::

    world = config.world.build(clients, rounds, seed, presence, hardware)

where ``presence(history)`` returns who is there, a table (clients, history + rounds), and ``hardware`` is a
:class:`Hardware` of so many nodes; :func:`.world_settings.world_of` does all that for a scenario. Then::

    work = world.work(flops, sample_bits, bytes_up, bytes_down)     # per client, of one edge round
    world.edge_world(work, counts, samples, edge_rounds)            # an EdgeWorld: what is known before
    world.state(g, work)                                            # the RoundState of round g, from 1
    world.budget(client, edge, g, device)                           # the Budget of a client at an edge
    world.cloud(nbytes)                                             # seconds and joules from edge to cloud

Seconds of an edge round are those that the emulated clock (:class:`.timeline.Timeline`) gives a client that
delivers: cycles / f, plus bits / rate. Rates are whole bit/s and never below 1, so no cost is infinite.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError
from ..strategies.association.base import Costs, EdgeWorld, RoundState
from .hardware import Hardware, shannon_rate
from .ranges import MOST
from .schedule import MB, MBIT, Budget, DeviceSchedule
from .wireless import Bools, Floats, Ints, fading, fading_of, mean_rate

WORLD, HARDWARE = "world.json", "hardware.csv"
FREE_BPS = int(MOST * MBIT)
"""The speed of a link whose time is not counted."""


@dataclass(frozen=True)
class Radio:
    """What all channels have in common: ``bandwidth_hz`` of each sub-channel, noise, and whether they fade.

    ``edge_transmit_w`` is the power of an edge that sends to a client; None: downloads take no time.
    """

    bandwidth_hz: float
    noise_w_per_hz: float
    fading: bool = True
    edge_transmit_w: float | None = None

    def __post_init__(self) -> None:
        watts = 1.0 if self.edge_transmit_w is None else self.edge_transmit_w
        numbers = np.array([self.bandwidth_hz, self.noise_w_per_hz, watts], np.float64)
        if not (np.isfinite(numbers) & (numbers > 0)).all() or not isinstance(self.fading, bool):
            raise UserError(
                "radio: bandwidth, noise and an edge's power have to be above 0, fading a boolean"
            )


@dataclass(frozen=True, eq=False)
class ClientWork:
    """What one edge round takes of each client (N,): seconds and joules of training, bytes up and down."""

    seconds: Floats
    joules: Floats
    bytes_up: Ints
    bytes_down: Ints


@dataclass(frozen=True, eq=False)
class World:
    """Clients, edge servers and the channels between them; arrays are read-only.

    ==================== ===================================================================================
    ``client_m``         (N, 2) where clients are, in metres
    ``edge_m``           (M, 2) where edges are
    ``range_m``          how far an edge reaches
    ``covered``          (N, M) which edges a client can report to; each has at least one
    ``gain``             (N, M) what part of the power arrives, without fading
    ``presence``         (N, history + G) who is there, the oldest round first, then rounds 1 to G
    ``history``          how many rounds before round 1
    ``cloud_seconds``    (M,) from an edge to the cloud and back, whatever the model's size
    ``cloud_joules``     (M,) likewise
    ``cloud_bps``        (M,) the speed of that link, which adds the model's bits over it
    ``hardware``         what clients compute and send with
    ``seed``             of fading
    ==================== ===================================================================================
    """

    client_m: Floats
    edge_m: Floats
    range_m: float
    covered: Bools
    gain: Floats
    presence: Bools
    history: int
    cloud_seconds: Floats
    cloud_joules: Floats
    cloud_bps: Floats
    radio: Radio
    hardware: Hardware = field(repr=False)
    seed: int = 0

    def __post_init__(self) -> None:
        clients, edges = np.shape(self.gain) if np.ndim(self.gain) == 2 else (0, 0)
        shapes: dict[str, tuple[int, ...]] = {
            "client_m": (clients, 2), "edge_m": (edges, 2), "covered": (clients, edges),
            "gain": (clients, edges), "cloud_seconds": (edges,), "cloud_joules": (edges,),
            "cloud_bps": (edges,),
        }  # fmt: skip
        for name in (*shapes, "presence"):
            array = np.array(getattr(self, name), np.bool_ if name in _FLAGS else np.float64)
            expected = shapes.get(name, (clients, *array.shape[1:2]))
            if array.shape != expected or not array.size or not np.isfinite(array).all():
                raise UserError(f"world: {name} is {array.shape}, expected finite numbers {expected}")
            if name not in ("client_m", "edge_m") and array.min() < 0:
                raise UserError(f"world: {name} has numbers below 0")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not (isinstance(self.range_m, int | float) and self.range_m > 0):
            raise UserError(f"world: range_m is {self.range_m}, expected a number above 0")
        if not (isinstance(self.seed, int) and self.seed >= 0 and isinstance(self.history, int)):
            raise UserError("world: the seed and the history have to be whole numbers, 0 or more")
        if not self.covered.any(axis=1).all():
            raise UserError("world: every client has to be covered by an edge")
        if not 0 <= self.history < self.presence.shape[1] or self.hardware.nodes != clients:
            raise UserError(
                f"world: {self.history} rounds of history of {self.presence.shape[1]} rounds, hardware of "
                f"{self.hardware.nodes} nodes for {clients} clients: expected at least one round after the "
                "history, and as many nodes as clients"
            )
        if not (self.cloud_bps > 0).all():
            raise UserError("world: cloud_bps has to be above 0")

    @property
    def clients(self) -> int:
        """N."""
        return len(self.gain)

    @property
    def edges(self) -> int:
        """M."""
        return int(self.gain.shape[1])

    @property
    def rounds(self) -> int:
        """G."""
        return int(self.presence.shape[1]) - self.history

    @property
    def before(self) -> Bools:
        """Who was there before the run (N, history)."""
        return self.presence[:, : self.history]

    @property
    def available(self) -> Bools:
        """Who is there in the run (N, G)."""
        return self.presence[:, self.history :]

    @property
    def best_edge(self) -> Ints:
        """The edge in reach of each client with the best channel without fading (N,)."""
        return np.where(self.covered, self.gain, -1.0).argmax(axis=1)

    def with_availability(self, available: Bools) -> World:
        """Return the same with the clients that are not ``available`` (N, G) away too."""
        if np.shape(available) != self.available.shape:
            raise UserError(
                f"availability of {np.shape(available)} for a world of {self.available.shape} (clients, "
                "rounds): they have to be of one shape"
            )
        return replace(self, presence=np.concatenate([self.before, self.available & available], axis=1))

    # Rates

    def up_bps(self, round_: int | None = None) -> Ints:
        """Return the whole bit/s (N, M) from clients to edges in a round; without one, the mean.

        See :func:`.wireless.mean_rate` for what the mean over fading is.
        """
        return self._rates(self.hardware.transmit_w[:, None], round_)

    def down_bps(self, round_: int | None = None) -> Ints:
        """Return the whole bit/s (N, M) from edges to clients, over the same channels."""
        if self.radio.edge_transmit_w is None:
            return np.full(self.gain.shape, FREE_BPS, np.int64)
        return self._rates(np.float64(self.radio.edge_transmit_w), round_)

    def _rates(self, watts: ArrayLike, round_: int | None) -> Ints:
        radio, gain = self.radio, self.gain
        if round_ is None and radio.fading:
            return _whole(mean_rate(radio.bandwidth_hz, watts, gain, radio.noise_w_per_hz))
        if round_ is not None:
            self._check_round(round_)
            if radio.fading:
                gain = gain * fading(self.clients, self.edges, round_, self.seed)
        return _whole(shannon_rate(radio.bandwidth_hz, watts, gain, radio.noise_w_per_hz))

    def budget(self, client: int, edge: int, round_: int, device: Budget | None = None) -> Budget:
        """Return what a client has at an edge in a round.

        Speeds are those of the channel; memory and dropping out are those of ``device``, which may also be
        away by itself. Without one there is memory for everything. Raises IndexError for what is not there,
        ValueError for an edge out of the client's reach.
        """
        self._check_round(round_)
        if not (0 <= client < self.clients and 0 <= edge < self.edges):
            raise IndexError(f"client {client}, edge {edge}: {self.clients} clients, {self.edges} edges")
        if not self.covered[client, edge]:
            raise ValueError(f"client {client} is out of reach of edge {edge}")
        radio, gain = self.radio, self.gain[client, edge]
        if radio.fading:
            gain = gain * fading_of(client, edge, round_, self.seed)
        up, down = (
            FREE_BPS
            if watts is None
            else int(_whole(shannon_rate(radio.bandwidth_hz, watts, gain, radio.noise_w_per_hz)))
            for watts in (self.hardware.transmit_w[client], radio.edge_transmit_w)
        )
        there = bool(self.available[client, round_ - 1])
        if device is None:
            return Budget(int(MOST * MB), down, up, there)
        there = there and device.available
        return Budget(device.memory_bytes, down, up, there, there and device.drops)

    def schedule(
        self, edge_of: Ints | None = None, devices: DeviceSchedule | None = None, slower: float = 1.0
    ) -> DeviceSchedule:
        """Return what each client has at one edge for ever, its best one unless ``edge_of`` (N,) says else.

        This is for runs in which nobody decides. Memory and dropping out are those of ``devices``; uploads
        are so many times ``slower`` than to the edge, as to a cloud that is farther away.
        """
        at = self.best_edge if edge_of is None else np.asarray(edge_of)
        nodes = np.arange(self.clients)
        if at.shape != nodes.shape or not self.covered[nodes, at].all():
            raise ValueError("edge_of: expected an edge in its reach for each client")
        numbers = range(1, self.rounds + 1)
        up = _whole(np.stack([self.up_bps(g)[nodes, at] for g in numbers], axis=1) / slower)
        down = np.stack([self.down_bps(g)[nodes, at] for g in numbers], axis=1)
        if devices is None:
            return DeviceSchedule(np.full_like(up, int(MOST * MB)), down, up, self.available)
        return replace(devices, down_bps=down, up_bps=up).with_availability(self.available)

    # Costs

    def work(
        self, flops: ArrayLike, sample_bits: ArrayLike, bytes_up: ArrayLike, bytes_down: ArrayLike = 0
    ) -> ClientWork:
        """Return what one edge round takes of clients, from one number for all or one for each (N,)."""
        everyone = slice(None)
        cycles = np.broadcast_to(self.hardware.cycles(everyone, flops, sample_bits), (self.clients,))
        return ClientWork(
            self.hardware.compute_seconds(everyone, cycles),
            self.hardware.compute_joules(everyone, cycles),
            *(np.broadcast_to(np.asarray(b, np.int64), (self.clients,)) for b in (bytes_up, bytes_down)),
        )

    def costs(self, work: ClientWork, round_: int | None = None) -> Costs:
        """Return seconds and joules (N, M) of an edge round; without a round, at the mean rates.

        Also for edges out of reach, to which no policy may send anybody.
        """
        up = 8 * work.bytes_up[:, None] / self.up_bps(round_)
        down = 8 * work.bytes_down[:, None] / self.down_bps(round_)
        radio = self.hardware.transmit_w[:, None] * up + self.hardware.receive_w[:, None] * down
        return Costs(seconds=down + work.seconds[:, None] + up, joules=work.joules[:, None] + radio)

    def cloud(self, nbytes: int = 0) -> tuple[Floats, Floats]:
        """Return seconds and joules (M,) for an edge's model of so many bytes to the cloud and back."""
        return self.cloud_seconds + 8 * nbytes / self.cloud_bps, self.cloud_joules

    def edge_world(
        self,
        work: ClientWork,
        counts: NDArray[Any] | None,
        samples: Ints | None = None,
        edge_rounds: int = 1,
        cloud_bytes: int | None = None,
    ) -> EdgeWorld:
        """Return what deciders know before the run.

        ``counts`` (N, K) are label histograms, None where samples have no classes; ``samples`` (N,) are
        their sums if not given. The model to the cloud has ``cloud_bytes``, by default as many as the
        largest upload of a client.
        """
        if counts is None and samples is None:
            raise ValueError("edge_world: expected counts or samples")
        table = np.zeros((self.clients, 0)) if counts is None else np.asarray(counts, np.float64)
        held = np.asarray(table.sum(axis=1).round() if samples is None else samples, np.int64)
        if table.shape[:1] != (self.clients,) or held.shape != (self.clients,):
            raise ValueError(f"edge_world: expected counts and samples of {self.clients} clients")
        nbytes = int(work.bytes_up.max()) if cloud_bytes is None else cloud_bytes
        seconds, joules = self.cloud(nbytes)
        return EdgeWorld(
            covered=self.covered, counts=table, samples=held, history=self.before, mean=self.costs(work),
            cloud_seconds=seconds, cloud_joules=joules, edge_rounds=edge_rounds,
        )  # fmt: skip

    def state(self, round_: int, work: ClientWork) -> RoundState:
        """Return what is so in a round: who is there, and what they would cost."""
        self._check_round(round_)
        return RoundState(round_, self.available[:, round_ - 1], self.costs(work, round_))

    def _check_round(self, round_: int) -> None:
        if not 1 <= round_ <= self.rounds:
            raise IndexError(f"round {round_}: rounds are 1 to {self.rounds}")

    # Files

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, World):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def save(self, folder: Path | str) -> Path:
        """Write ``world.json`` and ``hardware.csv``; :meth:`load` gives an equal world. Raises UserError."""
        path = self.hardware.save(Path(folder) / HARDWARE).with_name(WORLD)
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "hardware"}
        values["radio"] = asdict(self.radio)
        for name, value in values.items():
            if name in _FLAGS:
                values[name] = ["".join("01"[flag] for flag in row) for row in value.astype(int).tolist()]
            elif isinstance(value, np.ndarray):
                values[name] = value.tolist()
        # A line per field and one per row, which people can read and diff.
        lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in values.items()]
        try:
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot write the world: {error}") from error
        return path

    @classmethod
    def load(cls, folder: Path | str) -> World:
        """Read what :meth:`save` wrote; raises UserError for whatever is malformed."""
        path = Path(folder) / WORLD
        hardware = Hardware.load(path.with_name(HARDWARE))
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["radio"] = Radio(**values["radio"])
            for name in _FLAGS:
                values[name] = [[("0", "1").index(flag) for flag in row] for row in values[name]]
            return cls(**values, hardware=hardware)
        except (UserError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}: cannot read the world: {error}") from error

    def keep_in(self, folder: Path) -> None:
        """Write the world; if one is there, raise UserError unless it is the same.

        A run that goes on has to meet the world it began in.
        """
        if not (folder / WORLD).exists():
            self.save(folder)
        elif World.load(folder) != self:
            raise UserError(
                f"{folder / WORLD} holds another world than this run's settings give: go on with that of "
                "then, or give another folder with --out"
            )


_FLAGS = ("covered", "presence")


def _whole(rates: ArrayLike) -> Ints:
    return np.maximum(np.rint(rates), 1.0).astype(np.int64)


def _same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n]"
    return json.dumps(value)
