from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedplat.errors import UserError
from fedplat.models.backbones import BackboneRecipe, Frozen, frozen, of_file, read_weights
from fedplat.models.ssf import total_channels
from fedplat.models.vit import VisionTransformer, from_torchvision, vit_of_state
from fedplat.rng import seeded_torch

from .backbone_nets import SHAPE, tiny_conv, tiny_vit, write_safetensors


def images(n: int = 3, shape: tuple[int, ...] = SHAPE) -> Tensor:
    with seeded_torch(5, "test"):
        return torch.randn(n, *shape)


def torchvision_net(width: int = 16, heads: int = 2) -> Any:
    from torchvision.models.vision_transformer import VisionTransformer as Theirs

    with seeded_torch(3, "test"):
        net = Theirs(
            image_size=16,
            patch_size=8,
            num_layers=2,
            num_heads=heads,
            hidden_dim=width,
            mlp_dim=4 * width,
            num_classes=7,
        )
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return net.eval()


def test_our_blocks_compute_what_torchvisions_do_from_the_same_weights() -> None:
    theirs = torchvision_net()
    ours = vit_of_state(SHAPE, theirs.state_dict(), heads=2).eval()
    x = images()
    tokens = theirs._process_input(x)
    tokens = torch.cat([theirs.class_token.expand(len(x), -1, -1), tokens], dim=1)
    torch.testing.assert_close(ours(x), theirs.encoder(tokens)[:, 0], atol=1e-5, rtol=1e-5)


def test_a_block_has_six_sites_and_vit_b_has_74_of_205824_numbers_per_member() -> None:
    with torch.device("meta"):
        base = VisionTransformer((3, 224, 224), patch=16, width=768, depth=12, heads=12)
    assert len(base.sites) == 74
    assert 2 * total_channels(base.sites) == 205_824
    assert sum(p.numel() for p in base.parameters()) == 85_798_656
    assert [site.name for site in base.sites[1:7]] == [
        f"blocks.0.{name}" for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
    ]
    assert [site.channels for site in base.sites[1:7]] == [768, 2304, 768, 768, 3072, 768]


@pytest.mark.parametrize("make", [tiny_vit, tiny_conv])
def test_every_site_is_passed_once_in_order_with_its_number_of_channels(make: Any) -> None:
    net, seen = make(), []

    def note(site: int, y: Tensor) -> Tensor:
        seen.append((site, y.shape[1] if y.ndim == 4 else y.shape[-1]))
        return y

    adapted = net.features(images(), note)
    assert torch.equal(adapted, net(images()))
    # The shortcut of a residual block comes after its convolutions.
    assert seen == [(number, site.channels) for number, site in enumerate(net.sites)]


def test_fc1_is_adapted_before_its_activation_and_norms_before_what_follows() -> None:
    net = tiny_vit(depth=1)
    off = {name: index for index, site in enumerate(net.sites) for name in [site.name]}

    def zero_at(name: str) -> Tensor:
        return net.features(images(), lambda site, y: y * 0 if site == off[name] else y)

    block, x = net.blocks[0], images()
    tokens = torch.cat([net.cls_token.expand(3, -1, -1), net.patch_embed(x)], dim=1) + net.pos_embed
    attended = tokens + block.attn.proj(block.attn.mix(block.attn.qkv(block.norm1(tokens))))  # type: ignore
    # gelu(0) = 0, so that only the bias of fc2 is left of the perceptron.
    expected = net.norm((attended + block.mlp.fc2.bias)[:, 0])  # type: ignore
    torch.testing.assert_close(zero_at("blocks.0.mlp.fc1"), expected)
    # All queries, keys and values 0: every token gets proj's bias.
    alike = tokens + block.attn.proj.bias  # type: ignore
    hidden = torch.nn.functional.gelu(block.mlp.fc1(block.norm2(alike)))  # type: ignore
    expected = net.norm((alike + block.mlp.fc2(hidden))[:, 0])  # type: ignore
    torch.testing.assert_close(zero_at("blocks.0.attn.qkv"), expected)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("names", ["torchvision", "ours"])
def test_weights_of_a_file_are_those_of_the_net(ending: str, names: str, tmp_path: Path) -> None:
    theirs = torchvision_net(width=64, heads=1)
    state = theirs.state_dict() if names == "torchvision" else from_torchvision(theirs.state_dict())
    path = tmp_path / f"weights{ending}"
    if ending == ".pth":
        torch.save(dict(state), path)
    else:
        write_safetensors(path, dict(state))
    recipe = BackboneRecipe(kind="vit-b-16", width=64, weights=path)
    net = of_file(recipe, SHAPE).eval()
    direct = vit_of_state(SHAPE, theirs.state_dict()).eval()
    assert torch.equal(net(images()), direct(images()))


def test_a_frozen_net_of_a_file_has_one_copy_per_process_and_no_gradients(tmp_path: Path) -> None:
    path = tmp_path / "conv.pt"
    torch.save(tiny_conv().state_dict(), path)
    recipe = BackboneRecipe(kind="conv", width=4, weights=path)
    held = frozen(recipe, SHAPE)
    assert held.on("cpu") is frozen(recipe, SHAPE).on("cpu")
    assert not any(p.requires_grad for p in held.on("cpu").parameters())
    assert not held.on("cpu").training
    assert torch.equal(held.on("cpu")(images()), tiny_conv()(images()))
    with torch.device("meta"):
        assert held.on("meta")(torch.empty(2, *SHAPE)).shape == (2, 16)


def test_nothing_is_downloaded_and_missing_weights_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    recipe = BackboneRecipe(kind="vit-b-16")
    with pytest.raises(UserError, match=r"backbone.weights.*backbone.download = true.*vit-mini"):
        Frozen(recipe, (3, 224, 224)).on("cpu")
    for wrong in ("nothing.pth", "text.pth", "text.safetensors"):
        path = tmp_path / wrong
        if "text" in wrong:
            path.write_bytes(b"these are words, and many more of them than eight")
        with pytest.raises(UserError, match=r"cannot read|not a s"):
            read_weights(path)


def test_missing_weights_may_be_replaced_by_a_small_net_that_is_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedplat.models.backbones import available

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    recipe = BackboneRecipe(kind="vit-b-16", if_missing="vit-mini", data="digits", classes=(0, 1))
    assert available(recipe).kind == "vit-mini"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "vit_b_16-c867db91.pth").write_bytes(b"there")
    assert available(recipe) is recipe


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = torchvision_net().state_dict()
    with pytest.raises(UserError, match="pos_embed"):
        vit_of_state((3, 32, 32), state, heads=2)
    with pytest.raises(UserError, match="no class token"):
        vit_of_state(SHAPE, {"fc.weight": torch.zeros(2, 2)})
    path = tmp_path / "conv.pt"
    torch.save(tiny_conv().state_dict(), path)
    with pytest.raises(UserError, match="do not fit"):
        of_file(BackboneRecipe(kind="conv", width=8, weights=path), SHAPE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"patch": 5}, "do not fill"), ({"heads": 3}, "not divisible by 3"), ({"patch": 32}, "at least 32x32")],
)
def test_impossible_sizes_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        VisionTransformer(SHAPE, **{"width": 16, "depth": 1, "heads": 2, **settings})


@pytest.mark.parametrize(
    "recipe", [{}, {"data": "digits"}, {"data": "digits", "classes": (1,), "held_back": 5}]
)
def test_a_recipe_needs_public_data_or_weights(recipe: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="public 'classes' or 'held_back'"):
        BackboneRecipe(**recipe)
