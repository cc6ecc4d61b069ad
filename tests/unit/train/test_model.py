from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from sglang_dflash.train.config import YarnConfig
from sglang_dflash.train.model import Drafter, rotary_frequencies, rotation_at

YARN = {"factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


def inputs(drafter: Drafter, *, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps ``[2, tokens, F]`` and an embedding."""
    generator = torch.Generator().manual_seed(3)
    embedding_VH = torch.randn(drafter.config.vocab_size, drafter.config.hidden_size, generator=generator)
    return torch.randn(2, tokens, drafter.fc.in_features, generator=generator), embedding_VH


def one_block(
    drafter: Drafter, taps_TF: torch.Tensor, anchor: int, token: int, embedding_VH: torch.Tensor
) -> torch.Tensor:
    """The drafter's definition, for one block of one request, a head and a row at a time: ``[S, H]``."""
    config, weights = drafter.config, dict(drafter.named_parameters())
    size, half = config.head_dim, config.head_dim // 2

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def rope(x_D: torch.Tensor, position: int) -> torch.Tensor:
        out = torch.empty_like(x_D)
        for i in range(half):
            angle = position / config.rope_theta ** (2 * i / size)
            out[i] = x_D[i] * math.cos(angle) - x_D[i + half] * math.sin(angle)
            out[i + half] = x_D[i + half] * math.cos(angle) + x_D[i] * math.sin(angle)
        return out

    def heads(x_TH: torch.Tensor, name: str, norm_name: str | None, positions: range) -> torch.Tensor:
        """``[heads, T, D]``"""
        split = (x_TH @ weights[name].T).unflatten(1, (-1, size)).transpose(0, 1)
        if norm_name is None:
            return split
        split = norm(split, norm_name)
        for head in range(len(split)):
            for row, position in enumerate(positions):
                split[head, row] = rope(split[head, row], position)
        return split

    context_TH = norm(taps_TF[:anchor] @ weights["fc.weight"].T, "hidden_norm.weight")
    x_SH = embedding_VH[torch.tensor([token] + [config.mask_token_id] * (config.block_size - 1))]
    positions = range(anchor, anchor + config.block_size)
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.self_attn."
        h_SH = norm(x_SH, f"layers.{layer}.input_layernorm.weight")
        query = heads(h_SH, name + "q_proj.weight", name + "q_norm.weight", positions)
        keys = [
            heads(context_TH, name + "k_proj.weight", name + "k_norm.weight", range(anchor)),
            heads(h_SH, name + "k_proj.weight", name + "k_norm.weight", positions),
        ]
        values = [heads(x, name + "v_proj.weight", None, positions) for x in (context_TH, h_SH)]
        outputs = []
        for head in range(config.num_attention_heads):
            group = head * config.num_key_value_heads // config.num_attention_heads
            for row in range(config.block_size):
                seen = anchor + (row + 1 if config.is_causal else config.block_size)
                key, value = (torch.cat([part[group] for part in parts])[:seen] for parts in (keys, values))
                outputs.append((query[head, row] @ key.T / math.sqrt(size)).softmax(-1) @ value)
        joined_SH = (
            torch.stack(outputs).view(config.num_attention_heads, config.block_size, size).transpose(0, 1).flatten(1)
        )
        x_SH = x_SH + joined_SH @ weights[name + "o_proj.weight"].T
        h_SH = norm(x_SH, f"layers.{layer}.post_attention_layernorm.weight")
        mlp = f"layers.{layer}.mlp."
        gate = functional.silu(h_SH @ weights[mlp + "gate_proj.weight"].T)
        x_SH = x_SH + (gate * (h_SH @ weights[mlp + "up_proj.weight"].T)) @ weights[mlp + "down_proj.weight"].T
    return norm(x_SH, "norm.weight")


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_many_blocks_at_once_equal_each_alone(causal: bool, make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter(is_causal=causal)
    taps_BTF, embedding_VH = inputs(drafter)
    anchor_BA, token_BA = torch.tensor([[1, 5, 6], [9, 0, 5]]), torch.tensor([[3, 4, 5], [6, 7, 8]])
    hidden_BASH = drafter(drafter.context(taps_BTF), anchor_BA, token_BA, embedding_VH)
    assert hidden_BASH.shape == (2, 3, drafter.config.block_size, drafter.config.hidden_size)
    for b in range(2):
        for a in range(3):
            alone_SH = one_block(drafter, taps_BTF[b], int(anchor_BA[b, a]), int(token_BA[b, a]), embedding_VH)
            # fp32; the two sum in different orders.
            torch.testing.assert_close(hidden_BASH[b, a], alone_SH, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_only_context_before_the_anchor_matters(make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter()
    taps_BTF, embedding_VH = inputs(drafter)

    def drafts(taps: torch.Tensor) -> torch.Tensor:
        return drafter(drafter.context(taps), torch.tensor([[5], [5]]), torch.tensor([[3], [4]]), embedding_VH)

    base, changed = drafts(taps_BTF), taps_BTF.clone()
    changed[:, 5:] = 1e3
    assert torch.equal(drafts(changed), base), "the anchor's own taps and later ones do not exist yet"
    changed[:, 4] += 1.0
    assert not torch.allclose(drafts(changed), base)


def test_names_and_shapes_are_the_checkpoint_contract(make_drafter: Callable[..., Drafter]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in make_drafter().state_dict().items()}
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (64, 32),
        "self_attn.k_proj.weight": (32, 32),
        "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.gate_proj.weight": (40, 32),
        "mlp.up_proj.weight": (40, 32),
        "mlp.down_proj.weight": (32, 40),
    }
    expected = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert shapes == {**expected, "norm.weight": (32,), "fc.weight": (32, 64), "hidden_norm.weight": (32,)}


def test_folding_the_tap_scale_changes_no_output(make_drafter: Callable[..., Drafter]) -> None:
    drafter = make_drafter()
    taps_BTF, _ = inputs(drafter)
    plain = drafter.context(taps_BTF)[0][0]
    drafter.set_tap_scale(torch.linspace(0.1, 10, drafter.fc.in_features))
    scaled = drafter.context(taps_BTF)[0][0]
    assert not torch.allclose(scaled, plain)
    drafter.fold_tap_scale()
    assert "tap_scale_F" not in drafter.state_dict()
    torch.testing.assert_close(drafter.context(taps_BTF)[0][0], scaled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("amplitude", [1.0, 1 + 0.1 * math.log(16)])
@pytest.mark.parametrize("theta", [10000.0, 50000.0])
def test_yarn_is_hugging_faces(amplitude: float, theta: float, make_drafter: Callable[..., Drafter]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = make_drafter(rope_theta=theta, yarn=YarnConfig(**YARN, amplitude=amplitude)).config
    parameters = {"rope_type": "yarn", "rope_theta": theta, "attention_factor": amplitude, **YARN}
    stand_in = SimpleNamespace(
        head_dim=16, hidden_size=32, num_attention_heads=4, rope_parameters=parameters, max_position_embeddings=256
    )
    stand_in.standardize_rope_params = lambda: None
    expected_D, factor = ROPE_INIT_FUNCTIONS["yarn"](stand_in, "cpu")
    torch.testing.assert_close(rotary_frequencies(config), expected_D)
    position_BT = torch.tensor([[0, 7, 200]])
    cos, sin = rotation_at(position_BT, config)
    angle_TD = position_BT[0, :, None] * expected_D
    torch.testing.assert_close(cos[0, 0], angle_TD.cos() * factor)
    torch.testing.assert_close(sin[0, 0], angle_TD.sin() * factor)


def test_drafts_in_bf16(make_drafter: Callable[..., Drafter]) -> None:
    """Exported bf16 weights run as they are, with fp32 taps and embedding."""
    drafter = make_drafter().bfloat16()
    taps_BTF, embedding_VH = inputs(drafter)
    hidden = drafter(drafter.context(taps_BTF), torch.tensor([[5], [2]]), torch.tensor([[3], [4]]), embedding_VH)
    assert hidden.dtype == torch.bfloat16 and bool(hidden.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_layer_ids": (2, 1)}, r"target_layer_ids \[2, 1\] must be strictly ascending layers .* \(0 to 3\)"),
        ({"target_layer_ids": (1, 1)}, "strictly ascending"),
        ({"target_layer_ids": (1, 4)}, "strictly ascending"),
        ({"target_layer_ids": ()}, "strictly ascending"),
        ({"mask_token_id": 48}, r"mask_token_id 48 is not a row of the embedding \(0 to 47\)"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    changes: dict[str, Any], expected: str, make_drafter: Callable[..., Drafter]
) -> None:
    with pytest.raises(ValueError, match=expected):
        make_drafter(**changes)
