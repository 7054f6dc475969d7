import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.arrays import FlatArrays, Layout, LayoutError, RowBlock
from fedplat.models.cutting import ArrayAxes, Axis, Cut, CutPlan, IndexMaps, plan_of
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.rng import generator

from .cutting_nets import ZOO, arrays_of, seeded, shape_of, small_conv_net, tiny_resnet, zoo_model


def numbered(layout: Layout) -> FlatArrays:
    """A model whose numbers are their own positions."""
    return FlatArrays(layout, np.arange(layout.dim, dtype=np.float32), np.zeros(layout.side_bytes, np.uint8))


def test_the_map_of_an_mlp_by_hand() -> None:
    module = mlp((1, 1, 2), 2, hidden=(3,))  # fc1.weight 3x2, fc1.bias 3, fc2.weight 2x3, fc2.bias 2
    layout = FlatModel(module).layout
    cut = plan_of(module, (1, 1, 2)).window(0.5, offset=2)
    assert cut.units == {"fc1": (0, 2)}
    part = plan_of(module, (1, 1, 2)).index_map(cut, layout)
    assert part.index.tolist() == [0, 1, 4, 5, 6, 8, 9, 11, 12, 14, 15, 16]
    assert [(e.name, e.shape) for e in part.layout.entries] == [
        ("fc1.weight", (2, 2)),
        ("fc1.bias", (2,)),
        ("fc2.weight", (2, 2)),
        ("fc2.bias", (2,)),
    ]
    assert part.coverage.nonzero().ravel().tolist() == part.index.tolist()


def test_the_map_of_a_conv_net_keeps_whole_kernels_pixels_and_statistics() -> None:
    flat = FlatModel(small_conv_net())
    plan = plan_of(flat.module, (1, 6, 6))
    cut = Cut((("conv1", (1, 3)), ("conv2", range(4, 6)), ("fc1", (0, 7))))
    sub = plan.index_map(cut, flat.layout).extract(numbered(flat.layout))
    whole = numbered(flat.layout)
    channels, filters, units = [1, 3], [4, 5], [0, 7]
    expected = {
        "conv1.weight": whole.view("conv1.weight")[channels],
        "depthwise.weight": whole.view("depthwise.weight")[channels],
        "conv2.weight": whole.view("conv2.weight")[np.ix_(filters, channels)],
        "norm2.weight": whole.view("norm2.weight")[filters],
        "norm2.running_var": whole.view("norm2.running_var")[filters],
        "fc1.weight": whole.view("fc1.weight").reshape(8, 6, 4)[np.ix_(units, filters)].reshape(2, 8),
        "fc2.weight": whole.view("fc2.weight")[:, units],
        "fc2.bias": whole.view("fc2.bias"),
    }
    for name, array in expected.items():
        assert np.array_equal(sub.view(name), array), name
    assert sub.layout.num_params == sub.layout.dim - 4


def test_the_map_of_an_lstm_takes_the_same_units_of_each_gate() -> None:
    flat = zoo_model([name for name, _ in ZOO].index("char-lstm"))
    plan = plan_of(flat.module, (6,))
    cut = plan.random(0.1, generator(1, "test"))
    whole = numbered(flat.layout)
    sub = plan.index_map(cut, flat.layout).extract(whole)
    units = list(cut.units["lstm"])
    gates = whole.view("lstm.weight_hh_l1").reshape(4, 256, 256)
    assert np.array_equal(sub.view("lstm.weight_hh_l1"), gates[:, units][:, :, units].reshape(-1, len(units)))


@pytest.mark.parametrize("number", [i for i, (name, _) in enumerate(ZOO) if name != "resnet34"])
@pytest.mark.parametrize("width", [1, 0.25, 0.0625])
def test_extract_then_restore_is_the_identity(number: int, width: float) -> None:
    flat = zoo_model(number)
    plan = plan_of(flat.module, shape_of(ZOO[number][0]))
    model = arrays_of(flat)
    before = model.vector.copy()
    for cut in (
        plan.prefix(width, {s.name: 1 for s in plan.stages}),
        plan.random(width, generator(1, "test")),
    ):
        part = plan.index_map(cut, flat.layout)
        full, coverage = part.restore(part.extract(model), model)
        assert full.vector.tobytes() == before.tobytes()
        assert full.side.tobytes() == model.side.tobytes()
        assert int(coverage.sum()) == part.layout.dim == len(part.index)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_what_is_not_covered_keeps_its_value_bit_for_bit(norm: str) -> None:
    flat = FlatModel(seeded(lambda: tiny_resnet(norm)))
    plan = plan_of(flat.module, (1, 8, 8))
    model = arrays_of(flat)
    model.vector[::7] = np.nan
    model.vector[3::7] = -0.0
    part = plan.index_map(plan.window(0.5, 3, {"stage1": 2}), flat.layout)
    sub = part.extract(model)
    sub.vector[:] = np.arange(len(sub.vector))
    for entry in sub.layout.entries:
        if not entry.in_vector:
            sub.view(entry.name)[...] = 99
    old_vector, old_side = model.vector.copy(), model.side.copy()
    full, coverage = part.restore(sub, model)
    covered = coverage.numpy()
    assert full.vector[~covered].tobytes() == old_vector[~covered].tobytes()
    assert np.array_equal(full.vector[part.index], sub.vector)
    assert model.vector.tobytes() == old_vector.tobytes()
    assert model.side.tobytes() == old_side.tobytes()
    for entry in flat.layout.entries:
        if not entry.in_vector:  # counters of a block that is left out stay
            assert full.view(entry.name) == (7 if entry.name.startswith("stage1.2.") else 99)


def test_two_overlapping_clients_give_the_mean_where_they_overlap() -> None:
    module = mlp((1, 1, 1), 1, hidden=(4,))
    plan, layout = plan_of(module, (1, 1, 1)), FlatModel(module).layout
    model, sums, counts = layout.new(), np.zeros(layout.dim), np.zeros(layout.dim)
    model.vector[:] = -1
    for width, value in ((0.5, 2), (1, 4)):
        part = plan.index_map(plan.prefix(width), layout)
        sub = part.layout.new()
        sub.vector[:] = value
        full, coverage = part.restore(sub, model)
        sums += np.where(coverage, full.vector, 0)
        counts += coverage.numpy()
    assert (sums / counts).tolist() == [3, 3, 4, 4, 3, 3, 4, 4, 3, 3, 4, 4, 3]


@given(
    hidden=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    width=st.floats(0.01, 1),
    offset=st.integers(0, 20),
)
@settings(max_examples=40, deadline=None)
def test_the_coverage_is_what_the_index_names_and_ascending(
    hidden: list[int], width: float, offset: int
) -> None:
    module = mlp((1, 2, 2), 3, hidden=tuple(hidden))
    plan, layout = plan_of(module, (1, 2, 2)), FlatModel(module).layout
    part = plan.index_map(plan.window(width, offset), layout)
    assert (np.diff(part.index) > 0).all()
    sub = part.extract(numbered(layout))
    assert np.array_equal(sub.vector, part.index.astype(np.float32))
    full, coverage = part.restore(sub, layout.new())
    assert np.array_equal(np.flatnonzero(coverage), part.index)
    assert np.array_equal(full.vector, np.where(coverage, np.arange(layout.dim), 0))


def test_integer_and_promoted_arrays_are_cut_too() -> None:
    named = {
        "w": ((4, 3), "float16"),
        "count": ((4,), "int32"),
        "flag": ((), "int64"),
        "b": ((3,), "float32"),
    }
    layout = Layout.of(named, promote=True)
    unit = Axis("u")
    arrays = [
        ArrayAxes("w", (4, 3), (unit, None)),
        ArrayAxes("count", (4,), (unit,)),
        ArrayAxes("flag", (), ()),
        ArrayAxes("b", (3,), (None,)),
    ]
    model = layout.new()
    model.vector[:] = np.arange(15)
    model.view("count")[:] = [5, 6, 7, 8]
    model.view("flag")[...] = 3
    part = CutPlan.of(arrays).index_map(Cut((("u", (1, 3)),)), layout)
    sub = part.extract(model)
    assert sub.view("w").tolist() == [[3, 4, 5], [9, 10, 11]]
    assert (sub.view("count").tolist(), int(sub.view("flag"))) == ([6, 8], 3)
    sub.view("count")[:] = [60, 80]
    full, _ = part.restore(sub, model)
    assert full.view("count").tolist() == [5, 60, 7, 80]
    assert int(full.view("flag")) == 3


def test_other_layouts_are_refused() -> None:
    small, large = (mlp((1, 2, 2), 3, hidden=(n,)) for n in (4, 5))
    plan, layout, other = plan_of(small, (1, 2, 2)), FlatModel(small).layout, FlatModel(large).layout
    with pytest.raises(LayoutError, match=r"not that of the planned model: fc1\.bias"):
        plan.index_map(plan.full, other)
    part = plan.index_map(plan.prefix(0.5), layout)
    with pytest.raises(LayoutError, match=r"do not fit the cut: fc1\.bias"):
        part.extract(other.new())
    with pytest.raises(LayoutError, match=r"do not fit the cut: fc1\.bias"):
        part.restore(layout.new(), layout.new())


def test_maps_used_last_are_kept_within_the_memory_given() -> None:
    module = mlp((1, 2, 2), 3, hidden=(8,))
    plan, layout = plan_of(module, (1, 2, 2)), FlatModel(module).layout
    cuts = [plan.prefix(width) for width in (0.5, 0.25, 0.125)]
    maps = IndexMaps(plan, layout, max_bytes=sum(plan.index_map(cut, layout).nbytes for cut in cuts[:2]))
    first, second = maps(cuts[0]), maps(cuts[1])
    assert maps(plan.prefix(0.5)) is first
    maps(cuts[2])  # pushes out the one not used for longest
    assert maps(cuts[0]) is first
    assert maps(cuts[1]) is not second
    assert IndexMaps(plan, layout, max_bytes=0)(cuts[0]).index.tolist() == first.index.tolist()


def test_a_part_is_put_back_into_a_row_of_a_matrix() -> None:
    module = mlp((1, 2, 2), 3, hidden=(8,))
    plan, layout = plan_of(module, (1, 2, 2)), FlatModel(module).layout
    part = plan.index_map(plan.prefix(0.5), layout)
    block = RowBlock(layout, np.full((2, layout.dim), np.nan, np.float32), np.zeros((2, 0), np.uint8))
    sub, model = part.layout.new(), numbered(layout)
    full, coverage = part.restore(sub, model, into=block.row(1))
    assert np.isnan(block.matrix[0]).all()
    assert np.array_equal(block.matrix[1], np.where(coverage, 0, np.arange(layout.dim)))
    assert full.vector.base is block.matrix
    with pytest.raises(LayoutError, match="do not fit the cut"):
        part.restore(sub, model, into=sub)
