"""A picture of a partition: what each client holds, by class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_QUALITATIVE = 20


def draw_partition(counts: NDArray[np.int64], classes: Sequence[str], path: Path, title: str) -> None:
    """Draw counts (clients, classes) as one stacked horizontal bar per client and save it as a PNG.

    The first client is on top. Up to 20 classes have a legend, more a colour scale. Needs no display and
    leaves pyplot's state alone; the same counts make the same file.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    clients, num_classes = counts.shape
    few = num_classes <= _QUALITATIVE
    legend = 0.7 + 0.2 * num_classes if few else 2.6
    height = float(max(legend, 2.0, min(0.9 + 0.17 * clients, 15.0)))
    figure = Figure(figsize=(8.0, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()

    palette = colormaps["tab10" if num_classes <= 10 else "tab20" if few else "turbo"]
    colours = palette(np.arange(num_classes) if few else np.linspace(0.03, 0.97, num_classes))

    right = np.cumsum(counts, axis=1)
    client, label = np.nonzero(counts)
    x0, x1 = (right - counts)[client, label], right[client, label]
    half = 0.42 if clients <= 150 else 0.5
    y0, y1 = client - half, client + half
    corners = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([y0, y0, y1, y1], 1)], axis=2)
    edge = 0.3 if clients <= 60 and few else 0.0
    axes.add_collection(
        PolyCollection(list(corners), facecolors=colours[label], edgecolors="white", linewidths=edge)
    )

    axes.set_xlim(0, max(1, int(right[:, -1].max(initial=0))) * 1.02)
    axes.set_ylim(clients - 0.4, -0.6)
    axes.yaxis.set_major_locator(
        MaxNLocator(nbins=max(4, int(height / 0.2)), integer=True, steps=[1, 2, 5, 10])
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="training samples", ylabel="client")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)

    if few:
        from matplotlib.patches import Patch

        handles = [Patch(color=colour, label=name) for colour, name in zip(colours, classes, strict=True)]
        figure.legend(
            handles=handles, title="class", loc="outside right upper", frameon=False, fontsize=9,
            handlelength=1.0, handleheight=1.0, labelspacing=0.35,
        )  # fmt: skip
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(0, num_classes - 1), palette)
        figure.colorbar(scale, ax=axes, label=f"class, {classes[0]} to {classes[-1]}", pad=0.02, aspect=40)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
