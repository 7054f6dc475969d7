from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedplat.emulation.compute import sample_bits, task_bits
from fedplat.emulation.hardware import (
    COLUMNS,
    HIERFAVG_CHANNEL,
    NOISE_W_PER_HZ,
    Hardware,
    draw_hardware,
    hierfavg_hardware,
    path_gain,
    shannon_rate,
)
from fedplat.errors import UserError
from fedplat.training_config import LocalTraining

ALL = slice(None)
BY_HAND = Hardware([1e9, 2e9], [4, 8], [0, 10], [2e-28, 1e-28], [0.1, 0.2], [0, 0.05])


def test_work_time_and_energy_are_as_computed_by_hand() -> None:
    # Node 0 counts FLOPs, 8e9 / 4; node 1 counts bits, 3e8 * 10.
    cycles = BY_HAND.cycles(ALL, 8e9, 3e8)
    assert cycles.tolist() == [2e9, 3e9]
    assert BY_HAND.compute_seconds(ALL, cycles).tolist() == [2.0, 1.5]
    # 1e-28 * 2e9 * 1e18 and 0.5e-28 * 3e9 * 4e18.
    assert BY_HAND.compute_joules(ALL, cycles) == pytest.approx([0.2, 0.6])
    assert BY_HAND.transfer_joules(ALL, [3, 4], [5, 6]) == pytest.approx([0.5, 0.2 + 1.2])


def test_one_node_or_some_give_what_all_give_at_their_places() -> None:
    for node in (0, 1):
        assert BY_HAND.cycles(node, 8e9, 3e8) == BY_HAND.cycles(ALL, 8e9, 3e8)[node]
        assert float(BY_HAND.compute_joules(node, 1e9)) == BY_HAND.compute_joules(ALL, 1e9)[node]
    places = np.array([1, 0, 1])
    assert BY_HAND.cycles(places, [1e9, 8e9, 1e9], [3e8, 1, 1]).tolist() == [3e9, 2e9, 10]
    assert BY_HAND.compute_seconds(places, [2e9, 1e9, 4e9]).tolist() == [1, 1, 2]


def test_the_hierfavg_preset_costs_what_its_paper_says() -> None:
    node = hierfavg_hardware(1)
    assert hierfavg_hardware(1, 5) == node
    rate = shannon_rate(**HIERFAVG_CHANNEL)
    assert rate == pytest.approx(5.672e6, rel=1e-4)
    for parameters, seconds, joules in ((21_840, "0.123", "0.0616"), (5_852_170, "33", "16.5")):
        upload = 32 * parameters / rate
        assert f"{upload:.3g}" == seconds
        assert f"{node.transfer_joules(0, 0, upload):.3g}" == joules
    for bits, seconds, joules in ((1.2e6, 0.024, 0.0024), (200e6, 4.0, 0.4)):
        cycles = node.cycles(0, 0, bits)
        assert node.compute_seconds(0, cycles) == pytest.approx(seconds)
        assert node.compute_joules(0, cycles) == pytest.approx(joules)


def test_the_usual_constants_give_the_usual_magnitudes() -> None:
    # Five epochs over 500 samples take about 0.24 s and 0.083 J on MNIST, 0.95 s and 0.32 J on CIFAR-10.
    hardware = draw_hardware(4000, 1, cycles_from="bits")
    for shape, seconds, joules in (((1, 28, 28), 0.24, 0.083), ((3, 32, 32), 0.95, 0.32)):
        bits = task_bits(sample_bits(shape), 500, LocalTraining(epochs=5))
        cycles = hardware.cycles(ALL, 0, bits)
        assert hardware.compute_seconds(ALL, cycles).mean() == pytest.approx(seconds, rel=0.1)
        assert hardware.compute_joules(ALL, cycles).mean() == pytest.approx(joules, rel=0.1)


def test_drawn_hardware_fills_its_ranges_and_more_nodes_only_append() -> None:
    few, many = draw_hardware(5, 3), draw_hardware(600, 3)
    for name in COLUMNS[1:]:
        assert np.array_equal(getattr(few, name), getattr(many, name)[:5])
    for name, low, high in (
        ("cpu_hz", 1e9, 2e9),
        ("flops_per_cycle", 2, 8),
        ("transmit_w", 0.1, 0.2),
    ):
        values = getattr(many, name)
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
    assert not many.cycles_per_bit.any()
    assert (many.capacitance == 2e-28).all()
    assert draw_hardware(5, 3) == few
    assert draw_hardware(5, 4) != few


def test_one_range_changes_one_number() -> None:
    plain, slow = draw_hardware(8, 1), draw_hardware(8, 1, cpu_ghz=(0.1, 0.2), cycles_from="bits")
    assert np.array_equal(plain.transmit_w, slow.transmit_w)
    assert np.array_equal(plain.flops_per_cycle, slow.flops_per_cycle)
    assert slow.cpu_hz.max() <= 0.2e9
    assert slow.cycles_per_bit.min() >= 15


def test_faster_clocks_save_time_and_cost_energy() -> None:
    clocks = Hardware([1e9, 2e9, 3e9], [1] * 3, [0] * 3, [2e-28] * 3, [0] * 3, [0] * 3)
    assert clocks.compute_seconds(ALL, 1e9) == pytest.approx([1, 1 / 2, 1 / 3])
    assert clocks.compute_joules(ALL, 1e9) == pytest.approx([0.1, 0.4, 0.9])


def test_saved_hardware_loads_the_same_to_the_bit(tmp_path: Path) -> None:
    hardware = draw_hardware(7, 5, cycles_from="bits", receive_w=1 / 3)
    path = hardware.save(tmp_path / "run" / "hardware.csv")
    again = Hardware.load(path)
    assert again == hardware
    assert again.save(tmp_path / "again.csv").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        again.cpu_hz[0] = 1


HEAD = ",".join(COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1"),
        ("node,cpu_hz\n", "line 1"),
        (HEAD, "no nodes"),
        (HEAD + "0,1,1,1,1,1\n", "line 2: 6 fields, expected 7"),
        (HEAD + "0,1,1,1,1,1,1\n2,1,1,1,1,1,1\n", "line 3: node 2, expected 1"),
        (HEAD + "0,0,1,1,1,1,1\n", "line 2: cpu_hz is '0', expected a finite number above 0"),
        (HEAD + "0,1,1,1,-1,1,1\n", "line 2: capacitance is '-1'"),
        (HEAD + "0,1,1,1,1,fast,1\n", "line 2: transmit_w is 'fast'"),
        (HEAD + "0,1,1,1,1,1,inf\n", "line 2: receive_w is 'inf'"),
        (HEAD + '0,1,1,1,1,1,"1\n', "cannot read"),
    ],
)
def test_a_malformed_table_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "h.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        Hardware.load(path)


def test_a_table_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        Hardware.load(tmp_path / "none.csv")


def test_a_hundred_metres_of_path_lose_ninety_decibels() -> None:
    assert -10 * np.log10(path_gain(0.1)) == pytest.approx(128.1 - 37.6)
    assert path_gain(0.1, shadowing_db=10) == pytest.approx(path_gain(0.1) / 10)
    assert path_gain(0) == path_gain(0.001)
    assert -10 * np.log10(path_gain([1, 10])) == pytest.approx([128.1, 165.7])


def test_rates_are_shannon_s_and_grow_with_the_band_but_less_than_it() -> None:
    assert pytest.approx(3.981e-21, rel=1e-3) == NOISE_W_PER_HZ
    assert shannon_rate(1e6, 1, 3, 1e-6) == pytest.approx(2e6)  # a signal three times the noise: two bits
    narrow, wide = shannon_rate([1e6, 2e6], 0.1, path_gain(0.4))
    assert narrow < wide < 2 * narrow
    # About 10 Mbit/s at the distances of a cell, as the literature has it.
    assert 5e6 < narrow < 20e6
    assert shannon_rate(1e6, 0, 1) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: draw_hardware(0, 1), "0 nodes"),
        (lambda: draw_hardware(1, -1), "seed -1"),
        (lambda: draw_hardware(1, 1, cpu_ghz=(2, 1)), "cpu_ghz is .*from low to high"),
        (lambda: draw_hardware(1, 1, cpu_ghz=(0, 1)), "above 0"),
        (lambda: draw_hardware(1, 1, cycles_from="flop"), "did you mean 'flops'"),
        (lambda: draw_hardware(1, 1, receive_w=-1), "receive_w"),
        (lambda: Hardware([1], [1, 2], [0], [0], [0], [0]), "flops_per_cycle: expected one number per node"),
        (lambda: Hardware([], [], [], [], [], []), "one number per node"),
        (lambda: Hardware([float("nan")], [1], [0], [0], [0], [0]), "node 0: cpu_hz"),
        (lambda: shannon_rate(0, 1, 1), "above 0"),
    ],
)
def test_impossible_hardware_is_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrong()
