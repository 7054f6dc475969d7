"""Vision transformers whose blocks can be scaled and shifted after each of their six operations.

Pre-norm blocks with one linear layer for queries, keys and values, named as in timm, so that its state
dicts fit as they are; torchvision's are renamed by :func:`from_torchvision`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UserError
from .shapes import image_shape
from .ssf import Adapt, Backbone, Site, plain

_PER_BLOCK = 6
_TORCHVISION = (
    (r"conv_proj\.", "patch_embed.proj."),
    (r"class_token$", "cls_token"),
    (r"encoder\.pos_embedding$", "pos_embed"),
    (r"encoder\.ln\.", "norm."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
)


class PatchEmbedding(nn.Module):
    """Cuts images (n, C, H, W) into patches, row by row, and maps each to a token: (n, T, D)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens."""
        tokens: Tensor = self.proj(x)
        return tokens.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """The two linear layers of multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def mix(self, qkv: Tensor) -> Tensor:
        """Return what each token attends to, (n, T, D), from queries, keys and values (n, T, 3·D)."""
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """The two linear layers of a block's perceptron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)


class Block(nn.Module):
    """A pre-norm block; its sites are the outcomes of norm1, qkv, proj, norm2, fc1 (before GELU) and fc2."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor, adapt: Adapt = plain, site: int = 0) -> Tensor:
        """Return the block's tokens (n, T, D); ``site`` is the number of its first site."""
        attn, mlp = self.attn, self.mlp
        y = adapt(site + 1, attn.qkv(adapt(site, self.norm1(x))))
        x = x + adapt(site + 2, attn.proj(attn.mix(y)))
        y = adapt(site + 4, mlp.fc1(adapt(site + 3, self.norm2(x))))
        return x + adapt(site + 5, mlp.fc2(functional.gelu(y)))


class VisionTransformer(Backbone):
    """A vision transformer without a classifier: its features are the class token after the last norm.

    Sites: the embedded patches, six per block, and the outcome of the last norm; 2 + 6 · depth in all. Raises
    UserError for images that patches do not fill, and for a width that the heads do not divide.

    Source: Dosovitskiy et al., ICLR 2021; sites as in the released code of FedIns (Feng et al., ICCV 2023).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        *,
        patch: int = 4,
        width: int = 128,
        depth: int = 6,
        heads: int = 4,
        mlp_ratio: int = 4,
    ) -> None:
        super().__init__()
        channels, height, across = image_shape("vision transformer", input_shape, smallest=patch)
        if height % patch or across % patch:
            raise UserError(f"patches of {patch}x{patch} do not fill images of {height}x{across}")
        if width % heads:
            raise UserError(f"vision transformer: a width of {width} is not divisible by {heads} heads")
        self.width = width
        self.patch_embed = PatchEmbedding(channels, width, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + height // patch * (across // patch), width))
        self.blocks = nn.ModuleList(Block(width, heads, mlp_ratio * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        for tensor in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(tensor, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        sites = [Site("patch_embed", width)]
        for number in range(depth):
            sites += _block_sites(f"blocks.{number}", width, mlp_ratio * width)
        self.sites = (*sites, Site("norm", width))

    def features(self, x: Tensor, adapt: Adapt | None = None) -> Tensor:
        """Return the class token (n, D)."""
        at = adapt or plain
        tokens = at(0, self.patch_embed(x))
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1) + self.pos_embed
        for number, block in enumerate(self.blocks):
            tokens = block(tokens, at, 1 + _PER_BLOCK * number)
        # The norm works on each token by itself, and only the class token is asked for.
        return at(len(self.sites) - 1, self.norm(tokens[:, 0]))


def _block_sites(name: str, width: int, hidden: int) -> list[Site]:
    channels = {
        "norm1": width, "attn.qkv": 3 * width, "attn.proj": width,
        "norm2": width, "mlp.fc1": hidden, "mlp.fc2": width,
    }  # fmt: skip
    return [Site(f"{name}.{operation}", size) for operation, size in channels.items()]


def from_torchvision(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of torchvision's ``VisionTransformer`` under our names, without its classifier.

    One that has our names, which are timm's, only loses its classifier. Raises UserError for anything else.

    >>> list(from_torchvision({"class_token": torch.zeros(1, 1, 4), "heads.head.bias": torch.zeros(2)}))
    ['cls_token']
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(("head.", "heads.", "fc_norm.")):
            continue
        new = name
        for pattern, replacement in _TORCHVISION:
            new = re.sub(f"^{pattern}", replacement, new)
        renamed[new] = tensor
    if "cls_token" not in renamed:
        raise UserError("these are not the weights of a vision transformer: they have no class token")
    return renamed


def vit_of_state(
    input_shape: tuple[int, ...], state: Mapping[str, Tensor], heads: int = 0
) -> VisionTransformer:
    """Return the vision transformer that a state dict of torchvision's or timm's describes, with its weights.

    ``heads`` is the one size that weights do not tell; 0 means 64 channels per head, as in all common ones.
    Raises UserError if the weights are of something else, or for images of another size.
    """
    ours = from_torchvision(state)
    try:
        width, _, patch, _ = ours["patch_embed.proj.weight"].shape
        depth = 1 + max(int(name.split(".")[1]) for name in ours if name.startswith("blocks."))
        hidden = len(ours["blocks.0.mlp.fc1.weight"])
    except (KeyError, ValueError) as error:
        raise UserError(f"these are not the weights of a vision transformer: {error}") from None
    net = VisionTransformer(
        input_shape,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads or max(width // 64, 1),
        mlp_ratio=hidden // width,
    )
    expected = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    if wrong := sorted(set(expected.items()) ^ set(found.items())):
        names = ", ".join(sorted({name for name, _ in wrong})[:4])
        raise UserError(f"the weights do not fit a vision transformer for images {input_shape}: see {names}")
    net.load_state_dict({name: tensor.float() for name, tensor in ours.items()})
    return net
