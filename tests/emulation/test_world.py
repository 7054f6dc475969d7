from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.emulation.availability import bernoulli, markov
from fedplat.emulation.hardware import NOISE_W_PER_HZ, Hardware, draw_hardware, hierfavg_hardware
from fedplat.emulation.hardware import shannon_rate as shannon
from fedplat.emulation.ranges import MOST
from fedplat.emulation.schedule import Budget, uniform_schedule
from fedplat.emulation.timeline import Policy, Timeline, Work
from fedplat.emulation.wireless import distances, fading
from fedplat.emulation.world import FREE_BPS, Radio, World
from fedplat.emulation.world_figure import draw_world
from fedplat.emulation.world_settings import hierfavg, wireless
from fedplat.errors import UserError
from fedplat.strategies.association.base import NOWHERE, Limits, round_joules, round_seconds


def made(clients: int = 6, rounds: int = 5, seed: int = 1, make: Any = wireless, **settings: Any) -> World:
    """Return a world whose clients come and go, with hardware that counts bits."""
    world: World = make(
        clients, rounds, seed, lambda history: bernoulli(clients, rounds, seed, None, history),
        draw_hardware(clients, seed, cycles_from="bits"), **settings,
    )  # fmt: skip
    return world


def by_hand(**changes: Any) -> World:
    """Return two clients and two edges; client 0 reaches both, client 1 only edge 1."""
    values: dict[str, Any] = {
        "client_m": [[0, 0], [100, 0]], "edge_m": [[0, 50], [100, 50]], "range_m": 120,
        "covered": [[True, True], [False, True]],
        # Signal-to-noise ratios of 1 and 3 at 1 W: 1 and 2 Mbit/s.
        "gain": [[1e-10, 3e-10], [1e-10, 3e-10]],
        "presence": [[1, 0, 1, 1], [1, 1, 1, 0]], "history": 2,
        "cloud_seconds": [1.0, 0.5], "cloud_joules": [0.25, 0.5], "cloud_bps": [8e6, FREE_BPS],
        "radio": Radio(1e6, 1e-16, fading=False),
        "hardware": Hardware([1e9, 2e9], [1, 1], [0, 10], [2e-28, 1e-28], [1, 1], [0, 0.5]),
    }  # fmt: skip
    return World(**(values | changes))


def test_costs_are_as_computed_by_hand() -> None:
    world = by_hand()
    # Client 0 counts FLOPs, 1e9 / 1 GHz; client 1 bits, 1e8 * 10 / 2 GHz.
    work = world.work(1e9, 1e8, bytes_up=[125_000, 250_000])
    assert work.seconds.tolist() == [1.0, 0.5]
    assert work.joules == pytest.approx([0.1, 0.2])
    costs = world.costs(work)
    assert costs.seconds == pytest.approx(np.array([[2.0, 1.5], [2.5, 1.5]]))
    assert costs.joules == pytest.approx(np.array([[1.1, 0.6], [2.2, 1.2]]))
    # Nothing fades, so every round costs what the mean does.
    assert np.array_equal(world.costs(work, 2).seconds, costs.seconds)
    seconds, joules = world.cloud(1_000_000)
    assert seconds == pytest.approx([2.0, 0.5])
    assert joules.tolist() == [0.25, 0.5]


def test_downloads_cost_only_if_they_are_counted() -> None:
    free, counted = by_hand(), by_hand(radio=Radio(1e6, 1e-16, False, edge_transmit_w=1.0))
    works = [world.work(1e9, 1e8, 125_000, bytes_down=125_000) for world in (free, counted)]
    assert free.costs(works[0]).seconds == pytest.approx(np.array([[2.0, 1.5], [1.5, 1.0]]), rel=1e-9)
    costs = counted.costs(works[1])
    assert costs.seconds == pytest.approx(np.array([[3.0, 2.0], [2.5, 1.5]]))
    # Only client 1 pays for receiving.
    assert costs.joules == pytest.approx(np.array([[1.1, 0.6], [0.2 + 1 + 0.5, 0.2 + 0.5 + 0.25]]))


def test_what_deciders_know_and_the_rounds_formulas_agree_with_the_world() -> None:
    world = by_hand()
    work = world.work(1e9, 1e8, 125_000)
    known = world.edge_world(work, np.array([[3, 0], [1, 4]]), edge_rounds=4)
    assert known.samples.tolist() == [3, 5]
    assert known.history.tolist() == [[True, False], [True, True]]
    assert known.counts.dtype == np.float64
    assert known.cloud_seconds == pytest.approx([1.125, 0.5])
    state = world.state(1, work)
    assert state.present.tolist() == [True, True]
    assert world.state(2, work).present.tolist() == [True, False]
    edge_of = np.array([0, 1])
    assert round_seconds(known, state.costs, edge_of) == pytest.approx(max(4 * 2 + 1.125, 4 * 1 + 0.5))
    assert round_joules(known, state.costs, edge_of) == pytest.approx(4 * (1.1 + 0.7) + 0.75)


def test_samples_without_classes_have_empty_histograms() -> None:
    world = by_hand()
    known = world.edge_world(world.work(1, 1, 1), None, np.array([2, 3]), cloud_bytes=0)
    assert known.counts.shape == (2, 0)
    assert known.cloud_seconds.tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="counts or samples"):
        world.edge_world(world.work(1, 1, 1), None)
    with pytest.raises(ValueError, match="of 2 clients"):
        world.edge_world(world.work(1, 1, 1), np.ones((3, 2)))


def test_a_client_spends_on_the_emulated_clock_what_deciders_were_told() -> None:
    world = made(count_download=True)
    flops, bits, up, down = 2e9, 3e8, 90_000, 80_000
    work = world.work(flops, bits, up, down)
    timeline = Timeline(world.hardware, Policy())
    for round_ in (1, 4):
        costs = world.costs(work, round_)
        for client, edge in zip(*np.nonzero(world.covered), strict=True):
            budget = replace(world.budget(client, edge, round_), available=True)
            spent = timeline.of(client, budget, Work(0, flops, bits), down, up)
            assert spent.outcome == "delivered"
            assert spent.seconds == pytest.approx(costs.seconds[client, edge], rel=1e-12)
            assert spent.joules == pytest.approx(costs.joules[client, edge], rel=1e-12)


def test_budgets_are_those_of_the_tables() -> None:
    world = made(count_download=True)
    for round_ in range(1, 6):
        for client, edge in zip(*np.nonzero(world.covered), strict=True):
            budget = world.budget(int(client), int(edge), round_)
            assert budget.up_bps == world.up_bps(round_)[client, edge]
            assert budget.down_bps == world.down_bps(round_)[client, edge]
            assert budget.available == world.available[client, round_ - 1]
            assert budget.memory_bytes == int(MOST * 1e6)
    assert (world.down_bps(1) > world.up_bps(1)).all()


def test_memory_and_dropping_out_come_from_the_device_and_speeds_from_the_world() -> None:
    world = by_hand()
    device = Budget(1000, 5, 6, available=True, drops=True)
    assert world.budget(0, 1, 1, device) == Budget(1000, FREE_BPS, 2_000_000, True, True)
    assert world.budget(1, 1, 2, device) == Budget(1000, FREE_BPS, 2_000_000, False, False)
    assert not world.budget(0, 1, 1, replace(device, available=False, drops=False)).available


def test_what_is_not_there_has_no_budget() -> None:
    world = by_hand()
    for client, edge, round_ in ((2, 0, 1), (0, 2, 1), (-1, 0, 1), (0, 0, 0), (0, 0, 3)):
        with pytest.raises(IndexError):
            world.budget(client, edge, round_)
    with pytest.raises(ValueError, match="client 1 is out of reach of edge 0"):
        world.budget(1, 0, 1)
    with pytest.raises(IndexError, match="round 3"):
        world.state(3, world.work(1, 1, 1))
    with pytest.raises(IndexError, match="round 0"):
        world.up_bps(0)


def test_a_schedule_has_each_client_at_its_best_edge_or_the_one_given() -> None:
    world = made()
    schedule = world.schedule()
    other = world.covered.argmax(axis=1)
    for client in range(6):
        for round_ in (1, 5):
            edge = int(world.best_edge[client])
            assert schedule[client, round_] == world.budget(client, edge, round_)
            assert world.schedule(other)[client, round_] == world.budget(client, int(other[client]), round_)
    devices = uniform_schedule(6, 5, 1, (10, 20), (1, 1), (1, 1), 0.7)
    both = world.schedule(devices=devices)
    assert np.array_equal(both.available, devices.available & world.available)
    assert np.array_equal(both.memory_bytes, devices.memory_bytes)
    assert np.array_equal(both.up_bps, schedule.up_bps)
    slow = world.schedule(slower=10.0)
    assert slow.up_bps == pytest.approx(schedule.up_bps / 10, abs=0.5)
    assert np.array_equal(slow.down_bps, schedule.down_bps)
    with pytest.raises(ValueError, match="in its reach"):
        by_hand().schedule(np.array([0, 0]))


def test_the_best_edge_is_the_one_in_reach_with_the_best_channel() -> None:
    gain = np.array([[1.0, 2, 3], [3, 2, 1], [0, 0, 0]]) * 1e-10
    world = by_hand(
        client_m=np.zeros((3, 2)), edge_m=np.zeros((3, 2)), gain=gain, presence=np.ones((3, 3)),
        covered=[[1, 1, 0], [1, 1, 1], [0, 0, 1]], cloud_seconds=[1] * 3, cloud_joules=[1] * 3,
        cloud_bps=[1] * 3, hardware=hierfavg_hardware(3),
    )  # fmt: skip
    assert world.best_edge.tolist() == [1, 0, 2]
    # A channel through which nothing gets still has a rate, so that no cost is infinite.
    assert world.up_bps(1)[2].tolist() == [1, 1, 1]
    assert np.isfinite(world.costs(world.work(1, 1, 10**9)).seconds).all()


def test_rates_of_a_round_are_those_of_the_faded_channels() -> None:
    world = made()
    gains = world.gain * fading(6, 5, 3, 1)
    expected = shannon(1e6, world.hardware.transmit_w[:, None], gains, NOISE_W_PER_HZ)
    assert world.up_bps(3) == pytest.approx(expected, abs=0.5)
    assert not np.array_equal(world.up_bps(2), world.up_bps(3))
    steady = made(fading=False)
    assert np.array_equal(steady.up_bps(2), steady.up_bps())
    # The mean over many rounds tends to the mean that deciders are told.
    many = made(4, 1500, history=0)
    over = np.mean([many.up_bps(g) for g in range(1, 1501)], axis=0)
    assert over == pytest.approx(many.up_bps(), rel=0.05)


def test_more_rounds_and_more_clients_only_append() -> None:
    short, long = made(rounds=5), made(rounds=9)
    assert np.array_equal(short.available, long.available[:, :5])
    for name in ("client_m", "edge_m", "gain", "covered", "cloud_seconds", "cloud_joules", "before"):
        assert np.array_equal(getattr(short, name), getattr(long, name)), name
    assert np.array_equal(short.up_bps(4), long.up_bps(4))
    assert np.array_equal(made(9).gain[:6], short.gain)
    assert np.array_equal(made(9).up_bps(2)[:6], short.up_bps(2))
    assert np.array_equal(made(history=20).before, short.before[:, -20:])


def test_the_seed_decides_everything_that_is_drawn() -> None:
    assert made() == made()
    one, two = made(shadowing_db=8.0), made(seed=2, shadowing_db=8.0)
    for name in ("client_m", "gain", "presence", "cloud_seconds", "cloud_joules"):
        assert not np.array_equal(getattr(one, name), getattr(two, name)), name


def test_presence_is_that_of_the_availability_process() -> None:
    world = wireless(4, 8, 3, lambda history: markov(4, 8, 3, None, history), draw_hardware(4, 3), history=7)
    assert np.array_equal(world.available, markov(4, 8, 3))
    assert np.array_equal(world.presence, markov(4, 8, 3, None, 7))
    assert (world.history, world.rounds, world.before.shape) == (7, 8, (4, 7))


def test_clients_that_are_away_by_another_table_are_away() -> None:
    world = by_hand().with_availability(np.array([[False, True], [True, True]]))
    assert world.available.tolist() == [[False, True], [True, False]]
    assert np.array_equal(world.before, by_hand().before)
    with pytest.raises(UserError, match="one shape"):
        by_hand().with_availability(np.ones((2, 4), np.bool_))


TASKS = {
    # Parameters, bits of a sample; then what is expected: seconds of training, its most, seconds of the
    # upload, its most, joules of both.
    "MNIST": (21_840, 6_272, 0.24, 0.54, 0.07, 0.11, 0.083, 0.011),
    "CIFAR-10": (62_006, 24_576, 0.95, 2.1, 0.21, 0.30, 0.32, 0.032),
    "CIFAR-10, large": (5_852_170, 24_576, 0.95, 2.1, 19.8, 28.5, 0.32, 3.0),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_magnitudes_are_those_of_the_defaults_elsewhere(task: str) -> None:
    parameters, bits, *expected = TASKS[task]
    found = []
    for seed in range(10):
        world = made(60, 1, seed, fading=False, history=0)
        samples = np.random.default_rng(seed).integers(200, 801, 60)
        work = world.work(0, 5 * samples * bits, 4 * parameters)
        up = (32 * parameters / world.up_bps())[world.covered]
        radio = (world.costs(work).joules - work.joules[:, None])[world.covered]
        seconds = (work.seconds.mean(), work.seconds.max(), up.mean(), up.max())
        found.append([*seconds, work.joules.mean(), radio.mean()])
    assert np.mean(found, axis=0) == pytest.approx(expected, rel=0.12)


def test_a_client_sees_two_or_three_of_five_edges_at_about_ten_mbit_per_second() -> None:
    worlds = [made(60, 1, seed, history=0) for seed in range(10)]
    assert np.mean([world.covered.sum(axis=1).mean() for world in worlds]) == pytest.approx(2.4, abs=0.15)
    rates = np.concatenate([world.up_bps()[world.covered] for world in worlds])
    assert rates.mean() == pytest.approx(1e7, rel=0.15)
    cloud = np.concatenate([world.cloud_seconds for world in worlds])
    assert cloud.min() >= 0.5
    assert cloud.max() <= 1.0


def test_the_hierfavg_world_costs_what_its_paper_says() -> None:
    world = hierfavg(3, 2, 1, lambda history: np.ones((3, history + 2), np.bool_), hierfavg_hardware(3))
    assert world.covered.all()
    for parameters, bits, seconds, joules, compute_s, compute_j in (
        (21_840, 1.2e6, "0.123", "0.0616", 0.024, 0.0024),
        (5_852_170, 200e6, "33", "16.5", 4.0, 0.4),
    ):
        work = world.work(0, bits, 4 * parameters)
        assert work.seconds == pytest.approx([compute_s] * 3)
        assert work.joules == pytest.approx([compute_j] * 3)
        costs = world.costs(work)
        assert {f"{value:.3g}" for value in (costs.seconds - compute_s).ravel()} == {seconds}
        assert {f"{value:.3g}" for value in (costs.joules - compute_j).ravel()} == {joules}
        assert np.array_equal(world.costs(work, 2).seconds, costs.seconds)
        # Ten times as long from an edge to the cloud.
        assert world.cloud(4 * parameters)[0] == pytest.approx(10 * (costs.seconds[0] - compute_s), rel=1e-6)


def test_settings_do_what_they_say() -> None:
    base, count = made(), made(edges=8, side_m=300.0, range_m=50.0)
    assert count.edges == 8
    assert count.client_m.max() < 300
    metres = distances(count.client_m, count.edge_m)
    inside = metres <= 50
    assert np.array_equal(count.covered[inside.any(axis=1)], inside[inside.any(axis=1)])
    assert (count.covered[~inside.any(axis=1)].sum(axis=1) == 1).all()
    assert made(layout="drawn").edge_m.tolist() != base.edge_m.tolist()
    assert (made(bandwidth_mhz=10.0).up_bps() > base.up_bps()).all()
    assert (made(noise_dbm_per_hz=-164.0).up_bps() < base.up_bps()).all()
    assert made(noise_dbm_per_hz=-174.0) == base
    slow = made(cloud_mbps=8.0, cloud_seconds=(0.25, 0.25), cloud_joules=(0.5, 0.5))
    assert slow.cloud(1_000_000)[0] == pytest.approx([1.25] * 5)
    assert slow.cloud(1_000_000)[1].tolist() == [0.5] * 5
    assert base.cloud(1_000_000)[0] == pytest.approx(base.cloud_seconds)


def test_mistakes_in_settings_are_told() -> None:
    with pytest.raises(UserError, match="0 clients"):
        wireless(0, 5, 1, lambda h: np.ones((0, 5), np.bool_), hierfavg_hardware(1))
    with pytest.raises(UserError, match="cloud_seconds"):
        made(cloud_seconds=(2.0, 1.0))
    with pytest.raises(UserError, match="who is there"):
        wireless(3, 5, 1, lambda _: np.ones((3, 4), np.bool_), hierfavg_hardware(3))
    with pytest.raises(UserError, match="hardware of 2 nodes"):
        wireless(3, 5, 1, lambda h: np.ones((3, 5 + h), np.bool_), hierfavg_hardware(2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"covered": [[True, True], [False, False]]}, "covered by an edge"),
        ({"gain": [[1, 2]]}, "client_m"),
        ({"gain": [1, 2]}, "world"),
        ({"gain": [[1, 2], [3, float("nan")]]}, "gain"),
        ({"gain": [[1, 2], [3, -1]]}, "below 0"),
        ({"cloud_seconds": [1.0]}, "cloud_seconds"),
        ({"cloud_bps": [0.0, 1.0]}, "cloud_bps"),
        ({"history": 4}, "history"),
        ({"history": -1}, "history"),
        ({"presence": [[1, 0]]}, "presence"),
        ({"range_m": 0}, "range_m"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_world_that_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        by_hand(**changes)


def test_a_radio_that_cannot_be_is_refused() -> None:
    for bad in ((0.0, 1e-16), (1e6, -1.0), (float("inf"), 1e-16), (1e6, 1e-16, True, 0.0), (1e6, 1e-16, 1)):
        with pytest.raises(UserError, match="radio"):
            Radio(*bad)  # type: ignore[arg-type]


def test_arrays_are_read_only_and_not_those_given() -> None:
    gain = np.full((2, 2), 1e-10)
    world = by_hand(gain=gain)
    gain[0, 0] = 5
    assert world.gain[0, 0] == 1e-10
    with pytest.raises(ValueError, match="read-only"):
        world.presence[0, 0] = False


@pytest.mark.parametrize(
    "world", [by_hand(), made(shadowing_db=8.0, count_download=True), made(make=hierfavg)]
)
def test_a_saved_world_is_loaded_as_it_was(world: World, tmp_path: Path) -> None:
    path = world.save(tmp_path / "new")
    loaded = World.load(tmp_path / "new")
    assert loaded == world
    assert np.array_equal(loaded.up_bps(2), world.up_bps(2))
    first = path.read_bytes()
    assert loaded.save(tmp_path / "new").read_bytes() == first


def test_a_run_that_goes_on_has_to_meet_the_same_world(tmp_path: Path) -> None:
    made().keep_in(tmp_path)
    made().keep_in(tmp_path)
    for other in (made(seed=2), made(rounds=6), made(fading=False), made(cloud_mbps=5.0)):
        with pytest.raises(UserError, match="another world"):
            other.keep_in(tmp_path)
    (tmp_path / "hardware.csv").unlink()
    with pytest.raises(UserError, match=r"hardware\.csv"):
        made().keep_in(tmp_path)


def test_malformed_files_are_told(tmp_path: Path) -> None:
    path = made().save(tmp_path)
    good = json.loads(path.read_text())
    wrong: list[Any] = [
        [], {}, good | {"gain": "x"}, good | {"presence": ["012"] * 6}, good | {"more": 1},
        good | {"radio": {}},
        good | {"range_m": None}, good | {"seed": "1"}, good | {"radio": good["radio"] | {"fading": None}},
    ]  # fmt: skip
    for bad in wrong:
        path.write_text(json.dumps(bad))
        with pytest.raises(UserError, match=r"world\.json: cannot read the world"):
            World.load(tmp_path)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot read the world"):
        World.load(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="cannot read the world"):
        World.load(tmp_path)


def test_a_world_can_be_decided_about() -> None:
    world = made(20, 4)
    work = world.work(0, 1e8, 87_360)
    known = world.edge_world(work, np.ones((20, 10)))
    limits = Limits(np.full(5, 1), np.full(5, 10), 0.3, np.full(10, 0.1))
    state = world.state(2, work)
    edge_of = np.where(state.present, world.best_edge, NOWHERE)
    assert limits.target.sum() == pytest.approx(1)
    assert 0 < round_seconds(known, state.costs, edge_of) < 60
    assert round_joules(known, state.costs, np.full(20, NOWHERE)) == 0


@pytest.mark.parametrize(
    "world",
    [
        made(),
        by_hand(),
        made(1, 1, history=0, edges=1),
        made(130, 3, edges=30),
        made(4, 900, make=hierfavg, edges=9),
        by_hand(client_m=np.zeros((2, 2)), edge_m=np.zeros((2, 2))),
    ],
    ids=["few", "by hand", "one", "many", "long", "all at one place"],
)
@pytest.mark.filterwarnings("error")
def test_every_kind_of_world_can_be_drawn(world: World, tmp_path: Path) -> None:
    edge_of = world.best_edge
    edge_of[0] = NOWHERE
    draw_world(world, 1, edge_of, tmp_path / "new" / "1.png", "title")
    assert (tmp_path / "new" / "1.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_round_makes_the_same_picture_and_another_one_another(tmp_path: Path) -> None:
    world = made()
    for name, round_ in (("1.png", 1), ("2.png", 1), ("3.png", 2)):
        draw_world(world, round_, world.best_edge, tmp_path / name, "title")
    one, two, three = ((tmp_path / name).read_bytes() for name in ("1.png", "2.png", "3.png"))
    assert one == two != three
