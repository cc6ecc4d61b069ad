"""The DFlash drafter in plain torch, with the parameter names and shapes that SGLang's ``DFlashDraftModel`` loads.

A context token enters as its target taps: ``fc`` and ``hidden_norm`` make one vector, and every layer's own K and V projections
read that vector directly (no input norm, no queries, no MLP). A block row runs through full decoder layers; it attends context
strictly before its anchor and the rows of its own block. The embedding and the head are the target's and are not part of the
state dict.

Shapes: B samples, T context tokens, Q block rows, F = taps x hidden, H hidden, N heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


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

    def __post_init__(self) -> None:
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)):
            raise ValueError(f"target_layer_ids {list(self.target_layer_ids)} must be strictly ascending.")
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


def rotate(x_BNTD: torch.Tensor, position_BT: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in the half-split (NeoX) layout at absolute positions."""
    half = x_BNTD.shape[-1] // 2
    frequency_D = theta ** (-torch.arange(half, device=x_BNTD.device, dtype=torch.float32) / half)
    angle_BTD = position_BT[:, :, None].float() * frequency_D
    cos, sin = angle_BTD.cos()[:, None], angle_BTD.sin()[:, None]
    first, second = x_BNTD.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BNTD.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def key_value(self, x_BTH: torch.Tensor, position_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K (normed, rotated) and V of context vectors or block rows: ``[B, G, T, D]`` each."""
        shape = (*x_BTH.shape[:2], -1, self.config.head_dim)
        key_BGTD = self.k_norm(self.k_proj(x_BTH).view(shape)).transpose(1, 2)
        value_BGTD = self.v_proj(x_BTH).view(shape).transpose(1, 2)
        return rotate(key_BGTD, position_BT, self.config.rope_theta), value_BGTD

    def forward(
        self,
        x_BQH: torch.Tensor,
        position_BQ: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        mask_BQS: torch.Tensor,
    ) -> torch.Tensor:
        shape = (*x_BQH.shape[:2], -1, self.config.head_dim)
        query_BNQD = rotate(
            self.q_norm(self.q_proj(x_BQH).view(shape)).transpose(1, 2), position_BQ, self.config.rope_theta
        )
        key_BGQD, value_BGQD = self.key_value(x_BQH, position_BQ)
        output_BNQD = functional.scaled_dot_product_attention(
            query_BNQD,
            torch.cat([context[0], key_BGQD], dim=2),
            torch.cat([context[1], value_BGQD], dim=2),
            attn_mask=mask_BQS[:, None],
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
        self,
        x_BQH: torch.Tensor,
        position_BQ: torch.Tensor,
        context_BTH: torch.Tensor,
        context_position_BT: torch.Tensor,
        mask_BQS: torch.Tensor,
    ) -> torch.Tensor:
        context = self.self_attn.key_value(context_BTH, context_position_BT)
        x_BQH = x_BQH + self.self_attn(self.input_layernorm(x_BQH), position_BQ, context, mask_BQS)
        return x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))


class Drafter(nn.Module):
    """The trainable part of a DFlash drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        taps_BTF: torch.Tensor,
        embedding_BQH: torch.Tensor,
        position_BQ: torch.Tensor,
        mask_BQS: torch.Tensor,
    ) -> torch.Tensor:
        """Final hidden states ``[B, Q, H]`` of the block rows, ready for the target's head.

        Args:
            taps_BTF: packed taps of the context tokens, position 0 first.
            embedding_BQH: the target's embedding of each block row (anchor or mask token).
            position_BQ: absolute position of each block row.
            mask_BQS: bool, True where a row attends a key; keys are the T context tokens, then the Q block rows.
        """
        context_BTH = self.hidden_norm(self.fc(taps_BTF))
        context_position_BT = torch.arange(taps_BTF.shape[1], device=taps_BTF.device).expand(taps_BTF.shape[:2])
        x_BQH = embedding_BQH
        for layer in self.layers:
            x_BQH = layer(x_BQH, position_BQ, context_BTH, context_position_BT, mask_BQS)
        return self.norm(x_BQH)
