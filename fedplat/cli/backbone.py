"""``fedplat backbone``: makes the frozen network that a scenario's model is built around, and judges it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .common import Overrides, Scenario, Seed, console, load_config


def backbone(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or auto.")] = "cpu",
) -> None:
    """Pre-train the backbone of a scenario's model on data that no client has, once, and tell how good it is.

    SCENARIO is a name that "fedplat list scenarios" shows, or a TOML file. What is made is kept in the cache
    and used by every run that describes the same backbone; a run makes it by itself if it is not there. After
    Ctrl-C it goes on at the last full epoch. Weights differ in their last digits between devices.
    """
    config = load_config(scenario, overrides, seed)

    from .. import models, registry
    from ..datasets.base import Source
    from ..datasets.cache import default_cache
    from ..experiment import resolve_device
    from ..models.backbones import BackboneRecipe, Frozen, available
    from ..models.pool import InstancePool
    from ..models.pretraining import check_gate, check_split, make

    settings = config.model.settings()
    recipe = settings.get("backbone")
    if not isinstance(recipe, BackboneRecipe):
        raise UserError(f"model '{config.model.name}' has no backbone")
    check_split(settings, config.data.name, config.data.settings())
    root = config.data.root or (Path(os.environ["FEDPLAT_DATA"]) if os.environ.get("FEDPLAT_DATA") else None)
    source = Source(root, default_cache(), config.data.download, config.seed)
    dataset = config.data.build(source)
    screen, recipe = console(), available(recipe)
    held = Frozen(recipe, dataset.sample_shape)
    screen.print(
        f"{recipe.kind}: {held.parameters:,} weights, {held.width} features, {len(held.sites)} sites"
    )
    if recipe.from_file:
        screen.print(f"weights of a file, hash {held.fingerprint()[:16]}; nothing to pre-train")
    else:
        public = f"{recipe.held_back} samples" if recipe.held_back else f"classes {list(recipe.classes)}"
        screen.print(f"public: {public} of {recipe.data}")
        own = Source(root, default_cache(), config.data.download, recipe.seed)

        def on_epoch(epoch: int, total: int, loss: float) -> None:
            screen.print(f"epoch {epoch}/{total}: loss {loss:.3f}")

        made = make(recipe, dataset.sample_shape, own, resolve_device(device), on_epoch)
        facts = made.facts
        screen.print(f"hash: {made.fingerprint[:16]}, {facts['samples']:,} public samples")
        gain = 100 * (facts["probe"] - facts["probe-random"])
        screen.print(
            f"linear probe on other classes: {100 * facts['probe']:.1f} %, with random weights "
            f"{100 * facts['probe-random']:.1f} %: {gain:+.1f} points"
        )
        check_gate(recipe, made)
    builder = registry.find("models", config.model.name).load()
    model = models.build(builder, dataset.sample_shape, dataset.num_classes, config.seed, **settings)
    sent = models.count_parameters(model)
    whole = held.parameters + dataset.num_classes * (held.width + 1)
    what = f"pool of {model.members}" if isinstance(model, InstancePool) else "model"
    screen.print(
        f"{what}: {sent:,} floats each way per client and round, {100 * sent / whole:.1f} % of {whole:,}"
    )
