from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedplat.emulation import Level, class_schedule, generate, trace_schedule, uniform_schedule, write_logs
from fedplat.emulation.availability import bernoulli, daily, label_dependent, log_normal, markov
from fedplat.emulation.hardware import draw_hardware
from fedplat.emulation.modes import (
    CLASSES,
    DeviceClass,
    DeviceState,
    class_names,
    classes,
    trace,
    uniform,
    unlimited,
)
from fedplat.emulation.modes import markov as markov_devices
from fedplat.emulation.synthetic import synthetic_logs
from fedplat.errors import UserError
from fedplat.registry import settings

MODES = {
    "unlimited": unlimited,
    "trace": trace,
    "uniform": uniform,
    "classes": classes,
    "markov": markov_devices,
}
PROCESSES = {
    "bernoulli": bernoulli,
    "markov chain": markov,
    "log-normal": log_normal,
    "daily": daily,
    "label-dependent": label_dependent,
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
BUILDERS = {**MODES, **PROCESSES, "hardware": draw_hardware}
every_builder = pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)


def schema_of(builder: Any) -> type[BaseModel]:
    """Return a schema of a builder's settings, as a scenario's is made."""
    fields = {s.name: (s.annotation, ... if s.required else s.default) for s in settings(builder)}
    config = ConfigDict(extra="forbid", frozen=True)
    return create_model("Table", __config__=config, **fields)  # type: ignore[call-overload]


def values_of(table: BaseModel) -> dict[str, Any]:
    return {name: getattr(table, name) for name in type(table).model_fields}


@every_mode
def test_every_mode_works_as_it_is_and_depends_on_the_seed_alone(mode) -> None:
    schedule = mode(6, 20, 3)
    assert (schedule.nodes, schedule.rounds) == (6, 20)
    assert mode(6, 20, 3) == schedule
    assert not schedule.drops.any()
    assert mode is unlimited or mode(6, 20, 4) != schedule


@every_builder
def test_settings_survive_being_written_to_a_scenario_and_read_again(builder, tmp_path: Path) -> None:
    schema = schema_of(builder)
    table = schema()
    text = tomli_w.dumps({"devices": table.model_dump(mode="json", exclude_none=True)})
    again = schema.model_validate(tomllib.loads(text).get("devices", {}))
    assert again == table
    # What pydantic made of them is what the function itself has for defaults.
    assert values_of(again) == {s.name: s.default for s in settings(builder)}


@every_builder
def test_the_first_parameters_are_given_by_position_and_the_settings_are_described(builder) -> None:
    given = ["nodes", "seed"] if builder is draw_hardware else ["nodes", "rounds", "seed"]
    assert list(inspect.signature(builder).parameters)[: len(given)] == given
    for setting in settings(builder):
        assert any(getattr(note, "description", None) for note in setting.annotation.__metadata__), setting


def test_a_trace_may_be_a_file_and_begins_where_it_is_told(tmp_path: Path) -> None:
    logs = generate(3, 10, 1)
    path = write_logs(logs, tmp_path / "mine.csv")
    found = trace(4, 5, 7, logs=str(path), interval_s=600, offset_s=1200, beyond="clamp", window_s=60)
    assert found == trace_schedule(logs, 4, 5, 7, 600, 1200, "clamp", 60)
    with pytest.raises(UserError, match="cannot read"):
        trace(4, 5, 7, logs=str(tmp_path / "none.csv"))


def test_without_settings_a_trace_is_of_the_shipped_logs_and_each_node_has_its_own_time() -> None:
    assert trace(30, 6, 2) == trace_schedule(synthetic_logs(), 30, 6, 2, 900, None)


def test_nothing_is_too_large_for_an_unlimited_device() -> None:
    budget = unlimited(2, 3, 0)[1, 3]
    assert budget.available
    assert min(budget.memory_bytes, budget.down_bps, budget.up_bps) == 10**18


def test_uniform_and_classes_are_those_of_the_schedule() -> None:
    ranges = ((10.0, 20.0), (1.0, 2.0), (0.5, 1.0))
    found = uniform(3, 4, 5, memory_mb=ranges[0], down_mbps=ranges[1], up_mbps=ranges[2], availability=0.5)
    assert found == uniform_schedule(3, 4, 5, *ranges, 0.5)
    levels = (
        DeviceClass(name="a", memory_mb=1, down_mbps=2, up_mbps=3, share=3),
        DeviceClass(name="b", memory_mb=4, down_mbps=5, up_mbps=6, availability=0.5),
    )
    expected = class_schedule(8, 9, 1, [Level(1, 2, 3, share=3), Level(4, 5, 6, 0.5)])
    assert classes(8, 9, 1, levels=levels) == expected
    names = class_names(8, 1, levels)
    assert sorted(names) == ["a"] * 6 + ["b"] * 2
    assert [name == "b" for name in names] == (expected.memory_bytes[:, 0] == 4_000_000).tolist()
    assert set(class_names(10, 1)) == {level.name for level in CLASSES}


def test_the_states_of_a_chain_are_what_is_given() -> None:
    good, bad = (DeviceState(memory_mb=m, down_mbps=1, up_mbps=1) for m in (9, 5))
    memory = markov_devices(40, 50, 1, good=good, bad=bad, stay_good=0.5, stay_bad=0.5).memory_bytes
    assert set(np.unique(memory)) == {5_000_000, 9_000_000}
    assert (memory == 5_000_000).mean() == pytest.approx(0.5, abs=0.05)


LEVEL = {"name": "a", "memory_mb": 1, "down_mbps": 1, "up_mbps": 1}


@pytest.mark.parametrize(
    ("builder", "table", "said"),
    [
        (trace, {"interval_s": 0}, "greater than 0"),
        (trace, {"offset_s": "anywhere"}, "or 'random'"),
        (trace, {"offset_s": True}, "or 'random'"),
        (trace, {"offset_s": float("nan")}, "or 'random'"),
        (trace, {"offset_s": -1}, "0 or more"),
        (trace, {"beyond": "stop"}, "wrap"),
        (trace, {"window_s": -1}, "greater than or equal to 0"),
        (trace, {"interval_s": float("nan")}, "finite"),
        (uniform, {"memory_mb": [5, 1]}, "low to high"),
        (uniform, {"memory_mb": [5]}, "missing|required"),
        (uniform, {"up_mbps": [-1, 1]}, "greater than or equal to 0"),
        (uniform, {"availability": 1.5}, "less than or equal to 1"),
        (classes, {"levels": []}, "at least one"),
        (classes, {"levels": [LEVEL, LEVEL]}, "a name of its own"),
        (classes, {"levels": [{**LEVEL, "share": 0}]}, "greater than 0"),
        (classes, {"levels": [{**LEVEL, "memory": 3}]}, "memory"),
        (markov_devices, {"good": {"memory_mb": 1}}, "down_mbps"),
        (markov_devices, {"stay_bad": -0.1}, "greater than or equal to 0"),
        (bernoulli, {"p": [0.9, 0.1]}, "low to high"),
        (bernoulli, {"p": [0.1, 1.1]}, "less than or equal to 1"),
        (markov, {"stay_on": [0.1, float("nan")]}, "finite|less than"),
        (log_normal, {"beta": 1.0}, "less than 1"),
        (daily, {"rounds_per_day": 0}, "greater than or equal to 1"),
        (label_dependent, {"beta": 2}, "less than or equal to 1"),
        (draw_hardware, {"cpu_ghz": [0, 1]}, "greater than 0"),
        (draw_hardware, {"transmit_w": [0.2, 0.1]}, "low to high"),
        (draw_hardware, {"cycles_from": "data"}, "flops"),
        (draw_hardware, {"receive_w": float("inf")}, "finite"),
    ],
)
def test_impossible_settings_are_found_before_anything_is_drawn(builder, table, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        schema_of(builder).model_validate(table)
