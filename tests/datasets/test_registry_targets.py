import doctest
import importlib
import inspect

import pytest
from pydantic import TypeAdapter, ValidationError

from fedplat.registry import entries, settings

MODULES = [
    "base", "cache", "cifar_jpeg", "digits", "fedp3_partitions", "fetch", "figures", "image_folder", "images",
    "labelled", "labels", "partition", "retries", "shakespeare", "shapes", "sub_domains", "subset",
    "torchvision_sets",
]  # fmt: skip
TARGETS = [entry for kind in ("datasets", "partitions") for entry in entries(kind).values()]


@pytest.mark.parametrize("entry", TARGETS, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_name_leads_to_a_target_whose_defaults_pass_their_own_checks(entry):
    target = entry.load()
    positional = [
        p.name
        for p in inspect.signature(target).parameters.values()
        if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert positional == (["source"] if entry.kind == "datasets" else ["view", "clients", "rng"])
    for setting in settings(target):
        # A part of a data set has to say of which.
        assert setting.required == ((entry.name, setting.name) == ("subset", "of"))
        if setting.required:
            continue
        TypeAdapter(setting.annotation).validate_python(setting.default)


def test_the_constraints_reach_the_registry():
    alpha = next(s for s in settings(entries("partitions")["dirichlet"].load()) if s.name == "alpha")
    with pytest.raises(ValidationError):
        TypeAdapter(alpha.annotation).validate_python(0.0)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_right(name):
    module = importlib.import_module(f"fedplat.datasets.{name}")
    assert doctest.testmod(module).failed == 0
