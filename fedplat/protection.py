"""What a scenario puts around its clients and its strategies: signatures, masks, and noise for privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import Strategy

from .clients.mods.compression import CompressionMod
from .clients.mods.fedp3 import FedP3Mod
from .clients.mods.memory_cap import MemoryCapMod
from .clients.mods.privacy import LocalPrivacyMod
from .clients.mods.secure_aggregation import SecureAggregationMod
from .clients.mods.signing import SigningMod
from .errors import UserError
from .security.signatures import occasion_of, sign, simulation_key, simulation_keys
from .strategies.differential_privacy import CentralPrivacy, LocalPrivacyAccount
from .strategies.secure_aggregation import SecureAggregation
from .strategies.signed_updates import SignedUpdates

if TYPE_CHECKING:
    from .config import ExperimentConfig


def client_mods(
    config: ExperimentConfig, *, simulation: bool, least_members: int = 2
) -> tuple[list[Mod], list[Mod]]:
    """Return the mods of a client inside and outside of its attack, if it has one.

    An attacker keeps to no clipping, but signs, masks and compresses what it sends, as it otherwise had no
    say at all. What is signed is the model that the server will decode. A limit of memory is around the
    training alone.
    In a ``simulation`` keys and noise follow from the run's seed. ``least_members`` is the smallest number of
    updates in a sum that the client lets its own be part of.
    """
    inner: list[Mod] = []
    if config.privacy.mode == "local":
        inner.append(
            LocalPrivacyMod(
                clip=config.privacy.clip,
                noise_multiplier=config.privacy.noise_multiplier,
                seed=config.seed if simulation else None,
            )
        )
    if config.emulation.enforce:
        inner.append(MemoryCapMod())
    outer: list[Mod] = []
    if config.security.signed_updates:
        outer.append(SigningMod.for_simulation(config.seed) if simulation else SigningMod.from_node_config())
    if config.aggregation.secure_groups:
        outer.append(SecureAggregationMod(least_members=least_members))
    if config.compression.name != "none":
        outer = [CompressionMod(config.compression.build(), config.seed, within=outer)]
    # Of a client's whole model a part is sent, which is what is signed and compressed.
    outer.append(FedP3Mod(noise_seed=config.seed if simulation else None))
    return inner, outer


def colluders_signature(
    config: ExperimentConfig, *, simulation: bool
) -> Callable[[RecordDict, Message, int], RecordDict] | None:
    """Return how a forged reply of a simulated client gets its signature; None where nobody signs so."""
    if not (config.security.signed_updates and simulation):
        return None

    def sign_for(content: RecordDict, asked: Message, client: int) -> RecordDict:
        occasion = occasion_of(asked)
        return sign(content, occasion, simulation_key(config.seed, client)) if occasion else content

    return sign_for


def protected(strategy: Strategy, config: ExperimentConfig, clients: int, *, simulation: bool) -> Strategy:
    """Return a strategy with what the scenario puts around it; itself if that is nothing.

    ``clients`` is their number. Raises UserError for a strategy that cannot be protected so, and for real
    clients that are to sign while the server has no folder of their keys.
    """
    privacy, aggregation, security = config.privacy, config.aggregation, config.security
    account = {"noise_multiplier": privacy.noise_multiplier, "delta": privacy.delta, "budget": privacy.budget}
    if privacy.mode == "central":
        seed = config.seed if simulation else None
        strategy = CentralPrivacy(strategy, clip=privacy.clip, seed=seed, **account)  # type: ignore[arg-type]
    if aggregation.secure_groups:
        strategy = SecureAggregation(
            strategy,
            groups=aggregation.secure_groups,
            threshold=aggregation.threshold,
            clip=aggregation.clip,
            bits=aggregation.bits,
            max_weight=aggregation.max_weight,
            seed=config.seed,
            timeout=min(config.timeout, 120.0),
        )
    if privacy.mode == "local":
        strategy = LocalPrivacyAccount(strategy, **account)  # type: ignore[arg-type]
    if security.signed_updates:
        if security.signing_keys is None and not simulation:
            raise UserError(
                "security.signed_updates: real clients sign with keys of their own; give the folder of "
                "their public keys as security.signing_keys"
            )
        keys = security.signing_keys or simulation_keys(config.seed, clients)
        strategy = SignedUpdates(strategy, keys)
    return strategy
