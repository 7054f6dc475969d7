"""How fast the devices compute and what that and the radio cost them: seconds and joules, by formula.

Nothing here is measured. With f the clock in Hz, kappa the effective capacitance and P the radio's power::

    cycles   = FLOPs / (FLOPs per cycle)      or      bits of the samples * (cycles per bit)
    seconds  = cycles / f
    joules   = kappa / 2 * cycles * f^2       +       P_send * seconds up + P_receive * seconds down

The two ways to tell cycles: FLOPs know the model, bits of data are what papers on wireless learning use.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from ..errors import UserError, unknown_name
from ..rng import generator
from .ranges import Amount, Amounts, Positives, check_range

Floats = NDArray[np.float64]
CyclesFrom = Literal["flops", "bits"]
Nodes = int | slice | NDArray[np.int64]

NOISE_W_PER_HZ = 10 ** (-174 / 10) / 1000
"""Thermal noise: -174 dBm per Hz, in W."""

CPU_GHZ = (1.0, 2.0)
FLOPS_PER_CYCLE = (2.0, 8.0)
"""Inferred: what a phone's core achieves in training, well below the 8 to 16 that it could do."""
CYCLES_PER_BIT = (15.0, 30.0)
CAPACITANCE = 2e-28
TRANSMIT_W = (0.1, 0.2)


@dataclass(frozen=True, eq=False)
class Hardware:
    """The hardware of all nodes, read-only float64 arrays (nodes,).

    ==================== ===================================================================================
    ``cpu_hz``           the clock
    ``flops_per_cycle``  additions and multiplications in one cycle
    ``cycles_per_bit``   0: cycles are told from FLOPs; above: from the bits of the samples, so many each
    ``capacitance``      effective capacitance of the chip: it takes half of it times f^2 joules per cycle
    ``transmit_w``       the radio's power while it sends
    ``receive_w``        and while it receives
    ==================== ===================================================================================

    ``nodes`` in the methods is a node's number, an array of numbers, or ``slice(None)`` for all.
    """

    cpu_hz: Floats
    flops_per_cycle: Floats
    cycles_per_bit: Floats
    capacitance: Floats
    transmit_w: Floats
    receive_w: Floats

    def __post_init__(self) -> None:
        shape = np.shape(self.cpu_hz)
        for field in fields(self):
            array = np.array(getattr(self, field.name), np.float64)
            if array.ndim != 1 or array.shape != shape or not array.size:
                raise UserError(f"{field.name}: expected one number per node")
            wrong = ~np.isfinite(array) | (array < 0) | ((array == 0) & (field.name in _ABOVE_ZERO))
            if wrong.any():
                node = int(wrong.argmax())
                raise UserError(f"node {node}: {field.name} is {array[node]:g}, {_allowed(field.name)}")
            array.flags.writeable = False
            object.__setattr__(self, field.name, array)

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return len(self.cpu_hz)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Hardware):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS[1:])

    __hash__ = None  # type: ignore[assignment]

    def cycles(self, nodes: Nodes, flops: ArrayLike, bits: ArrayLike) -> Any:
        """Return the cycles that a task takes, told from its FLOPs or its bits of data as the node has it."""
        per_bit = self.cycles_per_bit[nodes]
        from_flops = np.asarray(flops, np.float64) / self.flops_per_cycle[nodes]
        return np.where(per_bit > 0, np.asarray(bits, np.float64) * per_bit, from_flops)[()]

    def compute_seconds(self, nodes: Nodes, cycles: ArrayLike) -> Any:
        """Return the seconds for so many cycles."""
        return np.asarray(cycles, np.float64) / self.cpu_hz[nodes]

    def compute_joules(self, nodes: Nodes, cycles: ArrayLike) -> Any:
        """Return the joules for so many cycles: capacitance / 2 * cycles * f^2."""
        return self.capacitance[nodes] / 2 * np.asarray(cycles, np.float64) * self.cpu_hz[nodes] ** 2

    def transfer_joules(self, nodes: Nodes, seconds_down: ArrayLike, seconds_up: ArrayLike) -> Any:
        """Return the joules of a node's radio for receiving and sending so long."""
        down, up = np.asarray(seconds_down, np.float64), np.asarray(seconds_up, np.float64)
        return self.receive_w[nodes] * down + self.transmit_w[nodes] * up

    def save(self, path: Path | str) -> Path:
        """Write the table as CSV, a line per node; :meth:`load` gives equal hardware. Raises UserError."""
        path = Path(path)
        columns = [getattr(self, name).tolist() for name in COLUMNS[1:]]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(zip(range(self.nodes), *columns, strict=True))
        except OSError as error:
            raise UserError(f"{path}: cannot write the hardware: {error}") from error
        return path

    @classmethod
    def load(cls, path: Path | str) -> Hardware:
        """Read what :meth:`save` wrote; raises UserError with the line of whatever is malformed."""
        path = Path(path)
        rows: list[list[float]] = []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                lines = csv.reader(file, strict=True)
                if tuple(next(lines, ())) != COLUMNS:
                    raise UserError(f"{path}, line 1: expected {','.join(COLUMNS)}")
                for line in lines:
                    rows.append(_parsed(line, len(rows), f"{path}, line {lines.line_num}"))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}: cannot read the hardware: {error}") from error
        if not rows:
            raise UserError(f"{path}: no nodes after the line of column names")
        return cls(*np.array(rows).T)


COLUMNS = ("node", *(field.name for field in fields(Hardware)))
_ABOVE_ZERO = ("cpu_hz", "flops_per_cycle")


def draw_hardware(
    nodes: int, seed: int, *,
    cpu_ghz: Annotated[Positives, Field(description="clock of the processor, from and to")] = CPU_GHZ,
    flops_per_cycle: Annotated[Positives, Field(description="operations a cycle")] = FLOPS_PER_CYCLE,
    cycles_from: Annotated[CyclesFrom, Field(description="what counts as work")] = "flops",
    cycles_per_bit: Annotated[Positives, Field(description="of the samples, if from bits")] = CYCLES_PER_BIT,
    capacitance: Annotated[Amount, Field(description="effective, of the chip")] = CAPACITANCE,
    transmit_w: Annotated[Amounts, Field(description="power of the radio that sends")] = TRANSMIT_W,
    receive_w: Annotated[Amount, Field(description="power of the radio that receives")] = 0.0,
) -> Hardware:  # fmt: skip
    """Draw each node's hardware, uniform in the ranges (from, to); ``cycles_from`` says what counts as work.

    A node's row depends on the seed and the node alone: more nodes only append, and another range of one
    number leaves the others as they were. Clock, cycles per bit, capacitance and sending power are the usual
    ones of the literature on hierarchical learning; FLOPs per cycle are inferred, and receiving is free.
    Raises UserError for ranges that are not from low to high.

    >>> draw_hardware(2, seed=1, cpu_ghz=(1.5, 1.5)).cpu_hz.tolist()
    [1500000000.0, 1500000000.0]
    """
    if nodes < 1 or seed < 0:
        raise UserError(f"{nodes} nodes, seed {seed}: expected 1 or more nodes and a seed of 0 or more")
    if cycles_from not in ("flops", "bits"):
        raise unknown_name("value of cycles_from", str(cycles_from), ("flops", "bits"))
    spans = {
        "cpu_ghz": cpu_ghz, "flops_per_cycle": flops_per_cycle, "cycles_per_bit": cycles_per_bit,
        "transmit_w": transmit_w,
    }  # fmt: skip
    for name, span in spans.items():
        check_range(name, span, above_zero=name != "transmit_w")
    draws = np.stack([generator(seed, "hardware", node).random(len(spans)) for node in range(nodes)])
    low, high = np.array(list(spans.values()), np.float64).T
    ghz, per_cycle, per_bit, send = (low + draws * (high - low)).T
    return Hardware(
        cpu_hz=ghz * 1e9,
        flops_per_cycle=per_cycle,
        cycles_per_bit=per_bit if cycles_from == "bits" else np.zeros(nodes),
        capacitance=np.full(nodes, capacitance),
        transmit_w=send,
        receive_w=np.full(nodes, receive_w),
    )


HIERFAVG_CHANNEL = {"bandwidth_hz": 1e6, "transmit_w": 0.5, "gain": 1e-8, "noise_w_per_hz": 1e-10 / 1e6}
"""Arguments of :func:`shannon_rate`: 1 MHz, 0.5 W, and noise of 1e-10 W in the whole band."""


def hierfavg_hardware(nodes: int, seed: int = 0) -> Hardware:
    """Return equal nodes of 1 GHz and 20 cycles per bit that send with 0.5 W, whatever the seed.

    Source: Liu et al., ICC 2020 (HierFAVG); constants as recalled, their arithmetic agrees with its table.
    """
    return draw_hardware(
        nodes, seed, cpu_ghz=(1, 1), flops_per_cycle=(4, 4), cycles_from="bits",
        cycles_per_bit=(20, 20), capacitance=2e-28, transmit_w=(0.5, 0.5),
    )  # fmt: skip


def shannon_rate(
    bandwidth_hz: ArrayLike,
    transmit_w: ArrayLike,
    gain: ArrayLike,
    noise_w_per_hz: ArrayLike = NOISE_W_PER_HZ,
) -> Any:
    """Return the bit/s of a sub-channel without interference: B log2(1 + p g / (N0 B)).

    >>> round(float(shannon_rate(1e6, 0.5, 1e-8, 1e-16)) / 1e6, 3)
    5.672
    """
    band, noise = np.asarray(bandwidth_hz, np.float64), np.asarray(noise_w_per_hz, np.float64)
    if not (band > 0).all() or not (noise > 0).all():
        raise UserError("bandwidth and noise have to be above 0")
    signal = np.asarray(transmit_w, np.float64) * np.asarray(gain, np.float64)
    return band * np.log2(1 + signal / (noise * band))


def path_gain(distance_km: ArrayLike, shadowing_db: ArrayLike = 0.0) -> Any:
    """Return what part of the power arrives: a loss of 128.1 + 37.6 log10(d / km) dB (3GPP), plus shadowing.

    A device nearer than 1 m counts as 1 m away.

    >>> round(-10 * math.log10(path_gain(0.1)), 1)
    90.5
    """
    distance = np.maximum(np.asarray(distance_km, np.float64), 1e-3)
    loss_db = 128.1 + 37.6 * np.log10(distance) + np.asarray(shadowing_db, np.float64)
    return 10 ** (-loss_db / 10)


def _allowed(name: str) -> str:
    return f"expected a finite number {'above 0' if name in _ABOVE_ZERO else 'of 0 or more'}"


def _parsed(line: list[str], node: int, where: str) -> list[float]:
    if len(line) != len(COLUMNS):
        raise UserError(f"{where}: {len(line)} fields, expected {len(COLUMNS)}: {','.join(COLUMNS)}")
    if line[0] != str(node):
        raise UserError(f"{where}: node {line[0]}, expected {node}: every node once, in order")
    values = []
    for name, text in zip(COLUMNS[1:], line[1:], strict=True):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and name in _ABOVE_ZERO):
            raise UserError(f"{where}: {name} is '{text}', {_allowed(name)}")
        values.append(value)
    return values
