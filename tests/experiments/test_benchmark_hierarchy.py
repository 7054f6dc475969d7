"""The benchmark of association policies, on tiny sizes; nothing here depends on how long anything takes."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.errors import UserError
from fedplat.experiments.benchmarks import hierarchy
from fedplat.experiments.benchmarks.common import Report, Section, table_of
from fedplat.experiments.benchmarks.hierarchy_worlds import OURS, POLICIES, drawn
from fedplat.strategies.association.random_choice import RandomLeast
from fedplat.strategies.association.simulate import simulate

TINY = {"repeats": 1, "rounds": 2, "clients": (30,), "policies": (OURS, "random-least", "cloud", "hfel")}


def report_of(**options: object) -> Report:
    report = Report("hierarchy", {})
    chosen = hierarchy.Options(**{**TINY, **options})  # type: ignore[arg-type]
    hierarchy.check(chosen)
    hierarchy.measure(chosen, report)
    return report


def column(section: Section, name: str) -> dict[str, float]:
    return {row["policy"]: row[name] for row in section.rows}


def test_both_tables_have_a_row_per_policy_and_ratios_to_ours() -> None:
    rounds, decisions = report_of().sections
    for section in (rounds, decisions):
        assert set(column(section, "policy")) == set(TINY["policies"])  # type: ignore[arg-type]
        assert column(section, f"x {OURS}")[OURS] == pytest.approx(1.0)
        assert table_of(section).row_count == 4
    assert column(rounds, "U")["random-least"] == pytest.approx(1.0)
    assert column(decisions, "edges") == {OURS: 2, "random-least": 2, "hfel": 2, "cloud": 1}


def test_parts_are_measured_alone() -> None:
    assert [section.title for section in report_of(parts=("rounds",)).sections] == ["rounds"]
    (only,) = report_of(parts=("decisions",), policies=("random-least",)).sections
    assert np.isnan(column(only, f"x {OURS}")["random-least"])


def test_a_slow_policy_is_timed_no_longer_than_its_limit() -> None:
    (section,) = report_of(parts=("decisions",), limit=0.0).sections
    assert set(column(section, "rounds").values()) == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ("plan-c",)}, "unknown policy 'plan-c': did you mean"),
        ({"parts": ("round",)}, "did you mean 'rounds'"),
        ({"clients": (0,)}, "1 or more"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        report_of(**options)


def test_worlds_are_those_of_the_section_on_defaults() -> None:
    there = drawn(60, 5, 30, 3)
    world, (seconds, joules) = there.world, there.training
    assert 1.8 < world.covered.sum(axis=1).mean() < 3.2  # 2.4 edges in sight on average
    assert 0.15 < seconds.mean() < 0.35
    assert 0.05 < joules.mean() < 0.12
    assert ((world.counts > 0).sum(axis=1) == 2).all()
    assert 0.5 < np.mean([state.present for state in there.states]) < 0.75
    result = simulate(world, there.states, there.limits, there.prices, RandomLeast(), 3)
    assert result.cost.mean() == pytest.approx(1.0)
    for one, other in zip(there.states, drawn(60, 5, 30, 3).states, strict=True):
        np.testing.assert_array_equal(one.present, other.present)
        np.testing.assert_array_equal(one.costs.seconds, other.costs.seconds)


def test_the_cloud_is_reached_in_ten_times_the_upload() -> None:
    there = drawn(20, 3, 1, 1)
    cloud, training = there.for_cloud(), there.training[0]
    uploads = there.states[0].costs.seconds - training[:, None]
    np.testing.assert_allclose(
        cloud.states[0].costs.seconds[:, 0], training + 10 * uploads.min(axis=1), rtol=1e-9
    )


def test_every_policy_has_a_name() -> None:
    assert len(POLICIES) == 13
    assert all(make() is not make() for make in POLICIES.values())
