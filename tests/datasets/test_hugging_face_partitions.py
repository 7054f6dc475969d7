from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.config import load
from fedplat.datasets.hub import installed
from fedplat.datasets.labels import Labels
from fedplat.datasets.partition import partition
from fedplat.errors import UserError
from fedplat.registry import find, settings

if importlib.util.find_spec("flwr_datasets") is None:
    pytest.skip("needs flwr-datasets", allow_module_level=True)


def toy(samples: int = 300, classes: int = 5) -> Labels:
    return Labels(np.random.default_rng(1).integers(0, classes, samples), classes, name="toy")


SCHEMES: dict[str, dict[str, Any]] = {
    "IidPartitioner": {},
    "LinearPartitioner": {},
    "SquarePartitioner": {},
    "ExponentialPartitioner": {},
    "SizePartitioner": {"partition_sizes": [100, 60, 90, 50]},
    "DirichletPartitioner": {"alpha": 0.5},
    "InnerDirichletPartitioner": {"partition_sizes": [100, 60, 90, 50], "alpha": 0.5},
    "PathologicalPartitioner": {"num_classes_per_partition": 2, "class_assignment_mode": "deterministic"},
    "ShardPartitioner": {"num_shards_per_partition": 2},
    "DistributionPartitioner": {
        "distribution_array": [[30.0, 20.0]] * 5,
        "num_unique_labels_per_partition": 2,
        "preassigned_num_samples_per_label": 1,
    },
    "ContinuousPartitioner": {"strictness": 0.5},
}


def test_all_partitioners_that_deal_samples_are_tested() -> None:
    module = installed("flwr_datasets.partitioner")
    natural = {"NaturalIdPartitioner", "GroupedNaturalIdPartitioner"}
    others = {"Partitioner", "IdToSizeFncPartitioner", "VerticalEvenPartitioner", "VerticalSizePartitioner"}
    assert set(module.__all__) == SCHEMES.keys() | natural | others


@pytest.mark.parametrize("name", SCHEMES)
def test_every_partitioner_deals_our_data_the_same_for_the_same_seed(name: str) -> None:
    view = Labels(np.random.default_rng(1).permutation(np.arange(300) % 5), 5, name="toy")
    # DistributionPartitioner wants a multiple of the number of classes.
    given, clients = SCHEMES[name], 5 if name == "DistributionPartitioner" else 4
    parts, same, other = (partition(f"hf:{name}", view, clients, seed, **given) for seed in (1, 1, 2))
    assert len(parts) == clients
    assert [p.tolist() for p in parts] == [p.tolist() for p in same]
    assert [p.tolist() for p in parts] != [p.tolist() for p in other]
    everyone = np.concatenate(parts)
    assert len(np.unique(everyone)) == len(everyone)
    assert all((np.diff(part) > 0).all() for part in parts)


def test_sizes_follow_the_partitioners_laws() -> None:
    def sizes(name: str, **given: Any) -> list[int]:
        return [len(part) for part in partition(f"hf:{name}", toy(), 4, 1, **given)]

    assert sizes("IidPartitioner") == [75] * 4
    assert sizes("LinearPartitioner") == [30, 60, 90, 120]
    assert sizes("SquarePartitioner") == [10, 40, 90, 160]
    assert sizes("SizePartitioner", partition_sizes=[100, 60, 90, 50]) == [100, 60, 90, 50]


def test_iid_is_shuffled_as_the_bare_partitioner_is_not() -> None:
    # Trap: IidPartitioner cuts the data as it lies; of sorted labels each client gets one class.
    view = Labels(np.repeat(np.arange(4), 50), 4, name="sorted")
    bare = partition("hf:IidPartitioner", view, 4, 1, shuffle_first=False)
    assert [np.unique(view.labels[part]).tolist() for part in bare] == [[0], [1], [2], [3]]
    shuffled = partition("hf:IidPartitioner", view, 4, 1)
    assert all(len(np.unique(view.labels[part])) == 4 for part in shuffled)


def test_clients_hold_exactly_what_flowers_federated_dataset_gives_them(tmp_path: Path) -> None:
    labels = np.random.default_rng(4).integers(0, 3, 200)
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"row": i, "label": int(label)} for i, label in enumerate(labels)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flower = installed("flwr_datasets")
    made = installed("flwr_datasets.partitioner").DirichletPartitioner(5, "label", 0.5)
    federated = flower.FederatedDataset(
        dataset=str(folder), partitioners={"train": made}, cache_dir=str(tmp_path / "files")
    )
    expected = [sorted(federated.load_partition(i)["row"]) for i in range(5)]
    ours = partition("hf:DirichletPartitioner", Labels(labels, 3), 5, 9, alpha=0.5, seed=42)
    assert [part.tolist() for part in ours] == expected


def test_natural_clients_come_from_groups_or_any_column_and_may_be_drawn() -> None:
    names = np.array(["u", "v", "w", "v", "u", "v"])
    view = Labels(
        np.zeros(6, np.int64), 1, np.array([0, 1, 2, 1, 0, 1]), ("u", "v", "w"), "toy", {"site": names}
    )
    for given in ({}, {"partition_by": "site"}, {"partition_by": "group"}):
        parts = partition("hf:NaturalIdPartitioner", view, 0, 1, shuffle_first=False, **given)
        assert [part.tolist() for part in parts] == [[0, 4], [1, 3, 5], [2]]
    two = partition("hf:NaturalIdPartitioner", view, 2, 1)
    assert len(two) == 2
    grouped = partition("hf:GroupedNaturalIdPartitioner", view, 0, 1, group_size=2, sort_unique_ids=True)
    assert [part.tolist() for part in grouped] == [[0, 1, 3, 4, 5], [2]]
    with pytest.raises(UserError, match="makes 3 clients, and clients = 4 were asked for"):
        partition("hf:NaturalIdPartitioner", view, 4, 1)
    with pytest.raises(UserError, match=r"not grouped by user; set partition\.partition_by to one of label"):
        partition("hf:NaturalIdPartitioner", toy(), 0, 1)


def test_classes_that_a_partitioner_drops_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    # Trap: PathologicalPartitioner leaves out classes that were assigned to nobody.
    with caplog.at_level(logging.WARNING, "fedplat"):
        parts = partition("hf:PathologicalPartitioner", toy(), 2, 1, num_classes_per_partition=1)
    assert sum(map(len, parts)) < 300
    assert "will NOT be used" in caplog.text
    assert "training samples belong to no client" in caplog.text


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("DirichletPartitoner", {}, "did you mean 'hf:DirichletPartitioner'"),
        ("Dirichlet", {}, "did you mean 'hf:DirichletPartitioner'"),
        ("VerticalEvenPartitioner", {}, "splits columns, not samples"),
        ("DirichletPartitioner", {"alpha": -1.0}, "strictly greater than zero"),
        ("DirichletPartitioner", {"alpha": 0.5, "partition_by": "labl"}, "did you mean 'label'"),
        ("PathologicalPartitioner", {"num_classes_per_partition": 9}, "greater than the number of unique"),
        ("SizePartitioner", {"partition_sizes": [100, 100]}, "makes 2 clients, and clients = 4"),
        ("SizePartitioner", {"partition_sizes": [400] * 4}, "greater than the size of the dataset"),
    ],
)
def test_what_a_partitioner_refuses_is_a_sentence(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        partition(f"hf:{name}", toy(), 4, 1, **given)


def test_its_settings_are_checked_as_those_of_our_own_are() -> None:
    names = {s.name: s for s in settings(find("partitions", "hf:DirichletPartitioner").load())}
    assert names["alpha"].required
    assert "num_partitions" not in names
    raw = {
        "name": "x",
        "rounds": 1,
        "data": {"name": "digits"},
        "partition": {"name": "hf:DirichletPartitioner", "clients": 4, "alhpa": 0.5},
        "model": {"name": "softmax"},
    }
    with pytest.raises(UserError, match=r"alhpa: unknown key; did you mean 'alpha'"):
        load(raw, "x.toml")
