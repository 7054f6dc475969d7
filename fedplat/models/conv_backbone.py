"""A small residual network that can be scaled and shifted after each convolution: cheap enough for a CPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .shapes import image_shape
from .ssf import Adapt, Backbone, Site, plain


class AdaptedBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, each with its BatchNorm; each of them is a site."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.sites = ["conv1", "conv2"]
        self.has_shortcut = stride != 1 or fan_in != fan_out
        if self.has_shortcut:
            self.sites.append("shortcut")
            # Pooled first: no pixel is skipped, and strided 1x1 kernels are not safe in channels last.
            self.shortcut = nn.Conv2d(fan_in, fan_out, 1, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(fan_out)
        self.stride = stride

    def forward(self, x: Tensor, adapt: Adapt = plain, site: int = 0) -> Tensor:
        """Return relu(F(x) + shortcut(x)); ``site`` is the number of the block's first site."""
        out = functional.relu(adapt(site, self.norm1(self.conv1(x))))
        out = adapt(site + 1, self.norm2(self.conv2(out)))
        if self.has_shortcut:
            x = functional.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x
            x = adapt(site + 2, self.shortcut_norm(self.shortcut(x)))
        return functional.relu(out + x)


class ConvBackbone(Backbone):
    """ResNet-8, or deeper: a stem and three stages of ``depth`` blocks; width, 2 and 4 · width channels.

    Features are the channels' means after the last block, 4 · width of them. Sites: the stem, each
    convolution with its BatchNorm, and the features. BatchNorm has to be in evaluation mode where the net
    is frozen.
    Raises UserError for images under 8x8.

    Source: He et al., CVPR 2016; the pooled shortcut is He et al., CVPR 2019 (ResNet-D); where the sites are
    is inferred from those of the vision transformer.
    """

    def __init__(self, input_shape: tuple[int, ...], *, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        channels, _, _ = image_shape("conv backbone", input_shape, smallest=8)
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        sites = [Site("stem", width)]
        blocks, fan_in = [], width
        for stage in range(3):
            for position in range(depth):
                fan_out, stride = width << stage, 2 if stage and not position else 1
                blocks.append(AdaptedBlock(fan_in, fan_out, stride))
                name = f"blocks.{len(blocks) - 1}"
                sites += [Site(f"{name}.{conv}", fan_out) for conv in blocks[-1].sites]
                fan_in = fan_out
        self.blocks = nn.ModuleList(blocks)
        self.width = fan_in
        self.sites = (*sites, Site("pool", fan_in))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor, adapt: Adapt | None = None) -> Tensor:
        """Return the channels' means (n, D)."""
        at, site = adapt or plain, 1
        out = functional.relu(at(0, self.stem_norm(self.stem(x))))
        for block in self.blocks:
            assert isinstance(block, AdaptedBlock)
            out = block(out, at, site)
            site += len(block.sites)
        return at(site, out.mean(dim=(2, 3)))
