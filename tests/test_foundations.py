from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import fedplat
from fedplat import clients, datasets, registry, strategies
from fedplat.errors import UserError
from fedplat.rng import generator, seeded_torch


def modules() -> list[str]:
    names = []
    for package in (fedplat, clients, datasets, strategies):
        names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return sorted({name for name in names if not name.endswith("__main__")})


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_draws_depend_on_purpose_and_keys_alone() -> None:
    def draw(*key) -> float:
        return float(generator(*key).random())

    assert draw(1, "batches", 2, 3) == draw(1, "batches", 2, 3)
    others = [
        draw(2, "batches", 2, 3),
        draw(1, "dropout", 2, 3),
        draw(1, "batches", 3, 2),
        draw(1, "batches", 2),
    ]
    assert len({draw(1, "batches", 2, 3), *others}) == 5


def test_seeding_torch_leaves_its_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    with seeded_torch(1, "x", 2):
        first = torch.rand(3)
    with seeded_torch(1, "x", 2):
        assert torch.equal(torch.rand(3), first)
    with seeded_torch(1, "x", 3):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_registered_name_loads_and_is_documented(kind: str) -> None:
    assert registry.entries(kind)
    for entry in registry.entries(kind).values():
        target = entry.load()
        assert target.__doc__
        registry.settings(target)


def test_global_random_state_is_never_touched() -> None:
    import random

    def state() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = state()
    from .clients.test_app import trained

    trained({}, num_rounds=1)
    assert state() == before


def test_unknown_names_come_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match="unknown strategy 'trimed-mean': did you mean 'trimmed-mean'"):
        registry.find("strategies", "trimed-mean")


def test_an_unknown_flower_is_refused_with_the_versions_that_work() -> None:
    code = (
        "import flwr.app.message.message as message; del message.make_message\n"
        "try:\n    import fedplat.compat\n"
        "except Exception as e:\n    print(type(e).__name__, e)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("UserError fedplat cannot use Flower")
    assert "Tested with 1.42.0" in result.stdout


def test_nothing_of_ours_is_importable_under_a_bare_name() -> None:
    # datasets is not asked for: Hugging Face's package of that name may well be installed.
    code = "from importlib.util import find_spec as f; print([n for n in ('strategies', 'clients') if f(n)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"
