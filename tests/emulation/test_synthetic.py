from __future__ import annotations

import math
from importlib.resources import files

import numpy as np
import pytest

from fedplat.emulation.logs import DeviceLog, write_logs
from fedplat.emulation.synthetic import (
    KINDS,
    LINK_DWELL_S,
    SHIPPED,
    _link_states,
    autoregressive,
    generate,
    synthetic_logs,
)
from fedplat.errors import UserError

COLUMNS = ("time_s", "mem_free_mb", "down_mbps", "up_mbps", "battery", "available")


def same(one: DeviceLog, other: DeviceLog) -> bool:
    pairs = ((getattr(one, name), getattr(other, name)) for name in COLUMNS)
    return one.device == other.device and all(
        (a is b is None) or np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs
    )


def test_the_shipped_set_is_what_the_stated_command_makes(tmp_path) -> None:
    shipped = (files("fedplat.emulation") / "data" / "synthetic.csv").read_bytes()
    made = generate(**SHIPPED)
    assert write_logs(made, tmp_path / "again.csv").read_bytes() == shipped
    assert len(shipped) < 300_000
    assert write_logs(synthetic_logs(), tmp_path / "read.csv").read_bytes() == shipped


def test_a_device_depends_on_the_seed_and_its_place_alone() -> None:
    few, many, other = generate(3, 12, 4), generate(9, 12, 4), generate(3, 12, 5)
    assert all(same(a, b) for a, b in zip(few, list(many)[:3], strict=True))
    assert not any(same(a, b) for a, b in zip(few, other, strict=True))


def test_samples_come_every_step_and_at_the_end() -> None:
    (log,) = generate(1, 1.1, 0, step_s=1800)
    assert log.time_s.tolist() == [0, 1800, 3600, 3960]


def test_every_number_is_within_its_class() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    logs = generate(60, 24, 2)
    assert {log.device[4:] for log in logs} == set(kinds)
    for log in logs:
        kind = kinds[log.device[4:]]
        assert (log.mem_free_mb >= 0.05 * min(kind.memory_mb) - 1).all()
        assert (log.mem_free_mb <= 0.95 * max(kind.memory_mb) + 1).all()
        assert log.down_mbps.max() < kind.down_mbps.high * math.exp(0.15 * 6)
        assert np.median(log.up_mbps) < np.median(log.down_mbps)
        if kind.charges_inside is None:
            assert log.at(0).battery is None
        else:
            assert log.battery.min() >= 5
            assert log.battery.max() <= 100
            assert abs(np.diff(log.battery)).max() <= 25 * 900 / 3600 + 0.11


def test_classes_come_in_their_shares() -> None:
    assert sum(kind.share for kind in KINDS) == pytest.approx(1)
    names = [log.device.partition("-")[2] for log in generate(2000, 1, 0, step_s=3600)]
    for kind in KINDS:
        sigma = math.sqrt(kind.share * (1 - kind.share) / 2000)
        assert abs(names.count(kind.name) / 2000 - kind.share) < 4 * sigma


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.88])
def test_the_autoregressive_path_has_its_mean_variance_and_correlation(correlation: float) -> None:
    path = autoregressive(np.random.default_rng(1), 40_000, correlation)
    assert path.mean() == pytest.approx(0, abs=0.08)
    assert path.std() == pytest.approx(1, abs=0.05)
    assert np.corrcoef(path[:-1], path[1:])[0, 1] == pytest.approx(correlation, abs=0.02)
    assert np.corrcoef(path[:-3], path[3:])[0, 1] == pytest.approx(correlation**3, abs=0.04)


def test_memory_in_a_log_forgets_at_the_stated_pace() -> None:
    for log in generate(4, 24 * 60, 3):
        free = log.mem_free_mb
        assert np.corrcoef(free[:-1], free[1:])[0, 1] == pytest.approx(math.exp(-900 / 7200), abs=0.03)


def test_the_link_spends_its_time_as_the_dwell_times_say() -> None:
    states = _link_states(np.random.default_rng(2), 60_000, 60)
    shares = np.bincount(states, minlength=3) / len(states)
    assert shares == pytest.approx(np.array(LINK_DWELL_S) / sum(LINK_DWELL_S), abs=0.04)
    left = (states[1:] != states[:-1])[states[:-1] == 0].mean()
    assert left == pytest.approx(1 - math.exp(-60 / 3600), rel=0.2)


def test_availability_has_the_share_that_the_window_gives() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    shares: dict[str, list[float]] = {}
    for log in generate(40, 24 * 20, 6, step_s=1800):
        shares.setdefault(log.device[4:], []).append(log.available[:-1].mean())
    for name, found in shares.items():
        kind = kinds[name]
        inside = sum(kind.lasts) / 2 / 24
        expected = inside * kind.inside + (1 - inside) * kind.outside
        assert np.mean(found) == pytest.approx(expected, abs=0.06), name


def test_phones_are_available_by_night_and_laptops_by_day() -> None:
    for log in generate(30, 24 * 20, 8, step_s=1800):
        hour = np.mod(log.time_s / 3600, 24)
        night, noon = log.available[hour < 3].mean(), log.available[(hour >= 11) & (hour < 14)].mean()
        if "phone" in log.device:
            assert night > noon + 0.3
        if "laptop" in log.device:
            assert noon > night + 0.3


@pytest.mark.parametrize(
    "wrong",
    [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 0, 0), (1, 1, 0, 3601), (1, math.inf, 0), (10**6, 10**6, 0)],
)
def test_impossible_sets_are_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(UserError):
        generate(*wrong)  # type: ignore[arg-type]
