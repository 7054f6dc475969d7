from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedplat.emulation.hardware import Hardware
from fedplat.emulation.schedule import Budget
from fedplat.emulation.timeline import DeviceRound, Policy, Timeline, Work, record_of_round

# 1 MHz at 2 FLOPs per cycle: 4 million FLOPs take 2 s, and capacitance / 2 * 2e6 * 1e12 = 3 J.
HARDWARE = Hardware(*np.array([[1e6], [2.0], [0.0], [3e-18], [0.5], [0.25]]))
BUDGET = Budget(memory_bytes=1000, down_bps=8_000_000, up_bps=4_000_000, available=True)
WORK = Work(memory_bytes=400, flops=4e6, sample_bits=0.0)
MEGABYTE = 1_000_000
OPEN = Policy()


def of(
    policy: Policy = OPEN,
    work: Work = WORK,
    failed: str | None = None,
    **budget: Any,
) -> DeviceRound:
    changed = dataclasses.replace(BUDGET, **budget)
    return Timeline(HARDWARE, policy).of(0, changed, work, MEGABYTE, MEGABYTE, failed)


def test_a_round_is_a_download_training_and_an_upload() -> None:
    device = of()
    assert device.outcome == "delivered"
    assert device.reason == ""
    assert (device.seconds_down, device.seconds_compute, device.seconds_up) == (1.0, 2.0, 2.0)
    assert device.seconds == 5.0
    assert device.joules_compute == pytest.approx(3.0)
    assert device.joules_transfer == pytest.approx(0.25 * 1.0 + 0.5 * 2.0)
    assert (device.bytes_down, device.bytes_up) == (MEGABYTE, MEGABYTE)


def test_a_device_with_too_little_memory_downloads_and_fails() -> None:
    device = of(memory_bytes=399)
    assert device.outcome == "out-of-memory"
    assert device.reason == "out of memory: 0.0004 of 0.000399 MB"
    assert device.seconds == 1.0
    assert device.joules_compute == 0.0
    assert device.bytes_up == 0
    assert of(memory_bytes=400).outcome == "delivered"


def test_where_memory_is_enforced_only_the_client_itself_runs_out_of_it() -> None:
    enforced = Policy(enforce=True)
    assert of(enforced, memory_bytes=1).outcome == "delivered"
    ended = of(enforced, failed="out of memory: 1 MB")
    assert ended.outcome == "out-of-memory"
    assert ended.bytes_up == 0


def test_a_late_device_works_until_the_deadline_and_what_it_sent_by_then_went_over_its_link() -> None:
    device = of(Policy(deadline_s=4.0))
    assert (device.outcome, device.reason) == ("late", "late: 5 s of 4 s")
    assert (device.seconds_down, device.seconds_compute, device.seconds_up) == (1.0, 2.0, 1.0)
    assert device.bytes_up == MEGABYTE // 2
    assert device.joules_transfer == pytest.approx(0.25 + 0.5)
    computing = of(Policy(deadline_s=2.0))
    assert computing.joules_compute == pytest.approx(1.5)
    assert computing.bytes_up == 0
    loading = of(Policy(deadline_s=0.25))
    assert loading.bytes_down == MEGABYTE // 4
    assert loading.joules_compute == 0.0
    assert of(Policy(deadline_s=5.0)).outcome == "delivered"


def test_a_server_that_waits_gets_the_late_reply_and_counts_the_violation() -> None:
    device = of(Policy(deadline_s=4.0, late="wait"))
    assert device.outcome == "delivered"
    assert device.late
    assert device.seconds == 5.0
    assert not of(Policy(deadline_s=5.0, late="wait")).late


def test_a_device_that_drops_out_has_trained_and_spent_but_sends_nothing() -> None:
    device = of(drops=True)
    assert device.outcome == "dropped"
    assert device.seconds == 3.0
    assert device.bytes_up == 0
    assert device.joules_compute == pytest.approx(3.0)
    # It never comes to the point of dropping out if the deadline is before.
    assert of(Policy(deadline_s=2.0), drops=True).outcome == "late"


def test_a_device_that_is_away_or_without_a_link_spends_nothing() -> None:
    for change in ({"available": False}, {"down_bps": 0}, {"up_bps": 0}):
        device = of(**change)
        assert device.outcome == "away"
        assert device.seconds == device.joules == 0.0
        assert device.bytes_down == device.bytes_up == 0


def test_a_client_that_fails_by_itself_has_computed_and_sent_nothing() -> None:
    device = of(failed="ValueError: no data")
    assert (device.outcome, device.reason) == ("failed", "ValueError: no data")
    assert device.seconds == 3.0
    assert device.bytes_up == 0


def test_a_round_lasts_as_long_as_its_slowest_participant_or_until_its_deadline() -> None:
    fast, slow = of(up_bps=8_000_000), of()
    assert Timeline(HARDWARE, Policy()).closed_at([fast, slow]) == 5.0
    assert Timeline(HARDWARE, Policy()).closed_at([]) == 0.0
    assert Timeline(HARDWARE, Policy()).closed_at([fast, of(available=False)]) == 4.0
    closing = Policy(deadline_s=4.5)
    late = of(closing)
    assert Timeline(HARDWARE, closing).closed_at([fast]) == 4.0
    for other in (late, of(closing, available=False), of(closing, drops=True)):
        assert Timeline(HARDWARE, closing).closed_at([fast, other]) == 4.5
    assert Timeline(HARDWARE, closing).closed_at([]) == 4.5
    waiting = Policy(deadline_s=4.5, late="wait")
    assert Timeline(HARDWARE, waiting).closed_at([fast, of(waiting)]) == 5.0


def test_the_record_of_a_round_counts_outcomes_and_how_far_devices_were_used() -> None:
    policy = Policy(deadline_s=4.0)
    devices = [
        of(policy, up_bps=8_000_000),
        of(policy),
        of(policy, available=False),
        of(policy, memory_bytes=200),
    ]
    record = record_of_round(devices, 3, 4.0)
    counts = {
        key: record[key] for key in ("available", "asked", "delivered", "late", "out_of_memory", "away")
    }
    assert counts == {"available": 3, "asked": 4, "delivered": 1, "late": 1, "out_of_memory": 1, "away": 1}
    assert record["violations"] == 2
    assert record["memory_used"] == pytest.approx((0.4 + 0.4 + 2.0) / 3)
    # 1 MB at 1 MB/s in 4 s is a quarter, for each of the three.
    assert record["down_used"] == pytest.approx(0.25)
    assert record["up_used"] == pytest.approx((0.25 + 0.25 + 0.0) / 3)
    assert record["joules"] == pytest.approx(record["joules_compute"] + record["joules_transfer"])
    assert all(math.isfinite(value) for value in record.values())


def test_a_round_without_devices_has_a_record_without_rates() -> None:
    record = record_of_round([], 0, 0.0)
    assert record["seconds"] == record["joules"] == record["asked"] == 0
    assert record["memory_used"] is None
    assert record["down_used"] is None
