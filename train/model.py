"""The DFlash drafter in plain torch, with the parameter names and shapes that SGLang's ``DFlashDraftModel`` loads.

A context token enters as its target taps: ``fc`` and ``hidden_norm`` make one vector, and every layer's own K and V projections
read that vector directly (no input norm, no queries, no MLP). A block row runs through full decoder layers; it attends context
strictly before its anchor and the rows of its own block. The embedding and the head are the target's and are not part of the
state dict. Which anchors there are, and what their rows should predict, is ``data``'s and ``objective``'s business.

Shapes: B samples, T context tokens, A anchors, S block size, Q = A * S block rows, F = taps x hidden, H hidden, N heads,
G KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from sglang_dflash.train.config import YarnConfig
from sglang_dflash.train.mask import block_attention_mask

# cos and sin of every position, [B, 1, T, D / 2] each.
Rotation = tuple[torch.Tensor, torch.Tensor]
# K and V of context tokens, [B, G, T, D] each.
KeyValue = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides the drafter's parameters and what they compute."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    is_causal: bool
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        taps = list(self.target_layer_ids)
        if not taps or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < self.num_target_layers:
            raise ValueError(
                f"target_layer_ids {taps} must be strictly ascending layers of the target (0 to {self.num_target_layers - 1})."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even, for the rotary embedding.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not a row of the embedding (0 to {self.vocab_size - 1})."
            )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotary_frequencies(config: DrafterConfig, device: torch.device | None = None) -> torch.Tensor:
    """Radians per position, fp32 ``[D / 2]``.

    With YaRN (Peng et al., arXiv 2309.00071) a frequency that turns often over the original context stays as it is, one that
    turns seldom is divided by the factor, and a linear ramp over the dimensions joins the two.
    """
    half = config.head_dim // 2
    dimension_D = torch.arange(half, dtype=torch.float32, device=device)
    frequency_D = config.rope_theta ** (-dimension_D / half)
    yarn = config.yarn
    if yarn is None:
        return frequency_D

    def dimension(rotations: float) -> float:
        radians = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return half * math.log(radians) / math.log(config.rope_theta)

    # Whole dimensions, and bounds that take the full head size, as in Hugging Face and SGLang.
    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), config.head_dim - 1)
    ramp_D = ((dimension_D - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency_D * (1 - ramp_D) + frequency_D / yarn.factor * ramp_D


def rotation_at(position_BT: torch.Tensor, config: DrafterConfig) -> Rotation:
    """cos and sin at absolute positions, in fp32."""
    angle_B1TD = position_BT[:, None, :, None] * rotary_frequencies(config, position_BT.device)
    amplitude = 1.0 if config.yarn is None else config.yarn.amplitude
    return angle_B1TD.cos() * amplitude, angle_B1TD.sin() * amplitude


def rotate(x_BNTD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotary embedding in the half-split (NeoX) layout."""
    cos, sin = rotation
    first, second = x_BNTD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BNTD.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def key_value(self, x_BTH: torch.Tensor, rotation: Rotation) -> KeyValue:
        """K (normed, rotated) and V of context vectors or block rows."""
        shape = (*x_BTH.shape[:2], -1, self.head_dim)
        key_BGTD = self.k_norm(self.k_proj(x_BTH).view(shape)).transpose(1, 2)
        value_BGTD = self.v_proj(x_BTH).view(shape).transpose(1, 2)
        return rotate(key_BGTD, rotation), value_BGTD

    def forward(
        self, x_BQH: torch.Tensor, rotation: Rotation, context: KeyValue, mask_BQK: torch.Tensor
    ) -> torch.Tensor:
        shape = (*x_BQH.shape[:2], -1, self.head_dim)
        query_BNQD = rotate(self.q_norm(self.q_proj(x_BQH).view(shape)).transpose(1, 2), rotation)
        key_BGQD, value_BGQD = self.key_value(x_BQH, rotation)
        output_BNQD = functional.scaled_dot_product_attention(
            query_BNQD,
            torch.cat([context[0], key_BGQD], dim=2),
            torch.cat([context[1], value_BGQD], dim=2),
            attn_mask=mask_BQK[:, None],
            enable_gqa=True,
        )
        return self.o_proj(output_BNQD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_BQH: torch.Tensor, rotation: Rotation, context: KeyValue, mask_BQK: torch.Tensor
    ) -> torch.Tensor:
        x_BQH = x_BQH + self.self_attn(self.input_layernorm(x_BQH), rotation, context, mask_BQK)
        return x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))


class Drafter(nn.Module):
    """The trainable part of a DFlash drafter. ``forward(context(taps), ...)`` is one serving round for many anchors at once."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.tap_scale_F: torch.Tensor
        self.register_buffer("tap_scale_F", torch.ones(self.fc.in_features), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def set_tap_scale(self, scale_F: torch.Tensor) -> None:
        """Multiply taps by a fixed scale per feature before ``fc``, so that ``fc`` learns from inputs of one size."""
        self.tap_scale_F.copy_(scale_F)

    @torch.no_grad()
    def fold_tap_scale(self) -> None:
        """Move the scale into ``fc``: the outputs stay, and the state dict alone computes them."""
        self.fc.weight.mul_(self.tap_scale_F)
        self.tap_scale_F.fill_(1.0)

    def context(self, taps_BTF: torch.Tensor) -> list[KeyValue]:
        """Every layer's K and V of the context tokens; their packed taps are given from position 0 on, without gaps."""
        context_BTH = self.hidden_norm(self.fc((taps_BTF * self.tap_scale_F).to(self.fc.weight.dtype)))
        rotation = rotation_at(torch.arange(taps_BTF.shape[1], device=taps_BTF.device)[None], self.config)
        layers = cast(Iterable[DecoderLayer], self.layers)
        return [layer.self_attn.key_value(context_BTH, rotation) for layer in layers]

    def forward(
        self, context: list[KeyValue], anchor_BA: torch.Tensor, token_BA: torch.Tensor, embedding_VH: torch.Tensor
    ) -> torch.Tensor:
        """Final hidden states ``[B, A, S, H]`` of a block at every anchor, ready for the target's head.

        Args:
            context: of ``context``, at least up to the position before the last anchor.
            anchor_BA: int64, the anchors' positions.
            token_BA: int64, the anchors' tokens.
            embedding_VH: the target's embedding.
        """
        size = self.config.block_size
        position_BQ = (anchor_BA[:, :, None] + torch.arange(size, device=anchor_BA.device)).flatten(1)
        token_BAS = functional.pad(token_BA[:, :, None], (0, size - 1), value=self.config.mask_token_id)
        x_BQH = functional.embedding(token_BAS.flatten(1), embedding_VH).to(self.fc.weight.dtype)
        mask_BQK = block_attention_mask(anchor_BA, context[0][0].shape[2], size, causal=self.config.is_causal)
        rotation = rotation_at(position_BQ, self.config)
        for layer, key_value in zip(self.layers, context, strict=True):
            x_BQH = layer(x_BQH, rotation, key_value, mask_BQK)
        return self.norm(x_BQH).unflatten(1, (-1, size))
