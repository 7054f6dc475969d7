"""The picture of reconstructed images: a row for the true ones, one per guess and kind of upload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fedplat.clients.attacks.leakage.study import TRUTH, Inverted

_MOST = 4


def draw_reconstructions(found: Mapping[int, Mapping[str, Inverted]], path: Path, title: str) -> None:
    """Draw the first images of every batch size and kind of upload, by batch size, and save a PNG.

    Needs no display; the same images make the same file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(next(iter(found.values())))
    shown = {size: min(_MOST, len(kinds[TRUTH].psnr)) for size, kinds in found.items()}
    ratios = [shown[size] for size in found]
    figure = Figure(figsize=(2.2 + 0.62 * (sum(ratios) + 1), 0.7 + 0.62 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(names), len(found), squeeze=False, gridspec_kw={"width_ratios": ratios})
    for row, name in enumerate(names):
        for column, (size, kinds) in enumerate(found.items()):
            axes = panels[row, column]
            images = torch.cat(kinds[name].images)[: shown[size]]
            strip = np.concatenate([_padded(image.permute(1, 2, 0).numpy()) for image in images], axis=1)
            axes.imshow(strip.squeeze(-1) if strip.shape[-1] == 1 else strip, cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if row == 0:
                axes.set_title("one image" if size == 1 else f"{size} images at once", fontsize=8)
        panels[row, 0].set_ylabel(name, fontsize=7, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _padded(image: np.ndarray) -> np.ndarray:
    """Return an image (H, W, C) with a white line to its right."""
    return np.pad(image, ((0, 0), (0, 1), (0, 0)), constant_values=1)
