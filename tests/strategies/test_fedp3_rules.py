"""FedP3's three rules, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies.aggregators import mean
from fedplat.strategies.fedp3 import LayerwiseRule
from fedplat.strategies.fedp3.aggregation import layers_trained
from fedplat.updates import ClientUpdates

LAYOUT = Layout.of(
    {"a.weight": ((1, 2), "float32"), "b.weight": ((2, 1), "float32"), "out.weight": ((1, 1), "float32")}
)
A, B, OUT = slice(0, 2), slice(2, 4), slice(4, 5)
RULES = ("simple", "weighted", "attention")


def updates(rows: Any, covers: Any = None, counts: Any = None, reference: float = 0.0) -> ClientUpdates:
    models = [FlatArrays(LAYOUT, np.float32(row), np.zeros(0, np.uint8)) for row in rows]
    start = FlatArrays(LAYOUT, np.full(5, reference, np.float32), np.zeros(0, np.uint8))
    coverage = None
    if covers is not None:
        coverage = torch.zeros(len(rows), 5, dtype=torch.bool)
        for row, parts in enumerate(covers):
            for part in parts:
                coverage[row, part] = True
    return ClientUpdates.stack(models, start, list(range(len(rows))), counts or [1] * len(rows), coverage)


THREE = [[1, 1, 0, 0, 1], [4, 4, 2, 2, 4], [0, 0, 8, 8, 7]]
COVERS = [[A, OUT], [A, B, OUT], [B, OUT]]


def test_simple_takes_each_layer_over_those_who_trained_it() -> None:
    done = LayerwiseRule("simple")(updates(THREE, COVERS))
    assert done.vector.tolist() == [2.5, 2.5, 5, 5, 4]
    assert done.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_weighted_is_by_the_number_of_layers_over_those_who_trained_it() -> None:
    given = updates(THREE, COVERS)
    assert layers_trained(given).tolist() == [1, 2, 1]
    done = LayerwiseRule("weighted")(given)
    # (1·1 + 2·4) / 3, (2·2 + 1·8) / 3, (1 + 2·4 + 7) / 4
    assert done.vector.tolist() == [3, 3, 4, 4, 4]
    by_samples = LayerwiseRule("weighted", by_samples=True)(updates(THREE, COVERS, [2, 1, 4]))
    assert by_samples.vector.tolist() == pytest.approx([2.5, 2.5, 6, 6, (2 + 8 + 28) / 8])


def test_attention_is_a_softmax_of_the_distances_layer_by_layer() -> None:
    done = LayerwiseRule("attention")(updates(THREE, COVERS))

    def by_hand(values: list[float], scale: float) -> float:
        distances = np.abs(values) * scale
        shares = np.exp(-distances / distances.mean())
        return float(shares @ np.array(values) / shares.sum())

    wanted = [by_hand([1, 4], 2**0.5)] * 2 + [by_hand([2, 8], 2**0.5)] * 2 + [by_hand([1, 4, 7], 1)]
    assert done.vector.tolist() == pytest.approx(wanted, rel=1e-6)
    assert float(done.weights.sum()) == pytest.approx(1)
    half = LayerwiseRule("attention", step=0.5)(updates(THREE, COVERS))
    assert half.vector.tolist() == pytest.approx([w / 2 for w in wanted], rel=1e-6)
    # Where nobody moved, everybody counts alike.
    still = LayerwiseRule("attention", by_samples=True)(updates([[3] * 5] * 2, reference=3, counts=[1, 3]))
    assert still.vector.tolist() == [3] * 5
    assert still.weights.tolist() == pytest.approx([0.25, 0.75])
    sharp = LayerwiseRule("attention", temperature=1e-3)(updates([[1] * 5, [2] * 5]))
    assert sharp.vector.tolist() == pytest.approx([1] * 5)


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_are_kept_shares_sum_to_1_and_the_order_does_not_matter(rule: Any) -> None:
    row = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    done = LayerwiseRule(rule)(updates([row] * 3, COVERS))
    assert done.vector.numpy().tobytes() == row.tobytes()
    assert float(done.weights.sum()) == pytest.approx(1)
    one = LayerwiseRule(rule)(updates(THREE, COVERS)).vector
    other = LayerwiseRule(rule)(updates(THREE[::-1], COVERS[::-1])).vector
    assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_what_nobody_trained_stays_and_inputs_are_left_alone(rule: Any) -> None:
    given = updates([[5, 5, 0, 0, 5], [7, 7, 0, 0, 7]], [[A, OUT], [A, OUT]], reference=-0.0)
    before = given.params.clone()
    done = LayerwiseRule(rule)(given)
    assert done.vector[B].numpy().tobytes() == np.float32([-0.0, -0.0]).tobytes()
    assert torch.equal(given.params, before)
    assert torch.equal(LayerwiseRule(rule)(given).vector, done.vector)


@pytest.mark.parametrize("rule", ["simple", "weighted"])
@pytest.mark.parametrize("by_samples", [False, True])
def test_with_all_layers_it_is_federated_averaging_bit_for_bit(rule: Any, by_samples: bool) -> None:
    rows = np.random.default_rng(1).standard_normal((4, 5))
    given = updates(rows, counts=[1, 5, 2, 9])
    weights = torch.from_numpy(given.num_examples) if by_samples else None
    assert torch.equal(LayerwiseRule(rule, by_samples)(given).vector, mean(given.params, weights).vector)
