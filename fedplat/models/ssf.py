"""Scale and shift (SSF): per-channel factors and offsets after the operations of a frozen network.

A network that can be adapted names its ``sites``, in the order of their use, and hands what comes out at each
to a callable ``adapt(site, y)``; without one it computes as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Adapt = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """A place where a network can be scaled and shifted: its name, and the number of channels there."""

    name: str
    channels: int


class Backbone(nn.Module):
    """A network that turns images into features and can be scaled and shifted at its ``sites``.

    ``width`` is the number of features D. Called as a module it computes them without any adaptation.
    """

    sites: tuple[Site, ...]
    width: int

    def features(self, x: Tensor, adapt: Adapt | None = None) -> Tensor:
        """Return the features (n, D) of images (n, C, H, W), with every site passed through ``adapt``."""
        raise TypeError(f"{type(self).__name__} does not say how its features are computed")

    def forward(self, x: Tensor) -> Tensor:
        """Return the features without any adaptation."""
        return self.features(x)


def plain(site: int, y: Tensor) -> Tensor:
    """Adapt nothing."""
    return y


def scale_and_shift(y: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return gamma ⊙ y + beta per channel; ``gamma`` and ``beta`` are (n, W), or (1, W) for all alike.

    Channels are the second axis of images (n, W, H, B) and the last one of tokens (n, T, W) and of features
    (n, W). The type of ``y`` is kept. Source: Lian et al., NeurIPS 2022 (SSF).

    >>> y = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> scale_and_shift(y, torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 10.0]])).tolist()
    [[2.0, 12.0], [6.0, 14.0]]
    """
    if y.ndim == 4:
        gamma, beta = gamma[:, :, None, None], beta[:, :, None, None]
    elif y.ndim == 3:
        gamma, beta = gamma[:, None, :], beta[:, None, :]
    return y * gamma.to(y.dtype) + beta.to(y.dtype)


class ScaleAndShift:
    """Adapts all sites by one row per sample: ``gamma`` and ``beta`` (n, S) are those of all sites in a row.

    S is the sum of the sites' channels; (1, S) adapts all samples alike.
    """

    def __init__(self, sites: Sequence[Site], gamma: Tensor, beta: Tensor) -> None:
        channels = [site.channels for site in sites]
        self._gamma, self._beta = gamma.split(channels, dim=1), beta.split(channels, dim=1)

    def __call__(self, site: int, y: Tensor) -> Tensor:
        """Return what came out of a site, adapted."""
        return scale_and_shift(y, self._gamma[site], self._beta[site])


def total_channels(sites: Sequence[Site]) -> int:
    """Return S, the number of channels of all sites together.

    >>> total_channels([Site("stem", 8), Site("pool", 4)])
    12
    """
    return sum(site.channels for site in sites)


def pool_floats(
    sites: Sequence[Site], width: int, num_classes: int, members: int, *, keys: bool = True
) -> int:
    """Return how many numbers a pool has, which is what travels each way per client and round.

    M members of 2·S for scales and shifts, D for a key and C·(D + 1) for a head.

    >>> pool_floats([Site("stem", 8), Site("pool", 4)], width=4, num_classes=3, members=2)
    86
    """
    return members * (2 * total_channels(sites) + width * keys + num_classes * (width + 1))


def spread(selected: Tensor) -> tuple[Tensor, float]:
    """Return the shares (M,) of how often members were selected, and their entropy in nats.

    Both are nan where nothing was selected. The entropy is ln M if all are used alike, 0 if one is alone.

    >>> shares, entropy = spread(torch.tensor([2, 2, 0, 0]))
    >>> shares.tolist(), round(entropy, 4)
    ([0.5, 0.5, 0.0, 0.0], 0.6931)
    """
    shares = selected.double() / selected.sum()
    return shares, float(torch.special.entr(shares).sum())
