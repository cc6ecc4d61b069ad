"""The torch reference attention backend: every forward mode, every mask a draft or a tree needs, on any device.

One path serves extend, decode and TARGET_VERIFY. A request's queries attend ``context + rows`` keys gathered through
``req_to_token``; a mask over the last ``rows`` keys says what each row sees of its own block:

* causal (prefill, decode, chain verify): rows up to itself,
* bidirectional (``AttentionType.ENCODER_ONLY``, the drafter's block): all rows,
* tree (``TreeVerifyInput``): ancestors and itself.

The context is always visible, less a sliding window where the layer has one. This backend is the oracle for the kernels and
what the CPU platform serves with. It loops over requests and is not made to be captured in a graph; encoder-decoder
attention, attention sinks and quantised KV are refused by SGLang's own checks before they get here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import pad, scaled_dot_product_attention


@dataclass(frozen=True)
class _RequestSpan:
    """One request's share of a forward: query rows ``[start, stop)`` and the KV slots of context + rows."""

    start: int
    stop: int
    slots_S: torch.Tensor
    tree_mask_RS: torch.Tensor | None


def block_mask(num_keys: int, num_rows: int, *, causal: bool, window: int, device: torch.device) -> torch.Tensor | None:
    """The ``[num_rows, num_keys]`` mask (True: attend) of rows at the end of a sequence; None where all is visible.

    ``window`` is SGLang's ``window_left``: a query sees at most ``window`` earlier keys besides itself; -1 means no limit.
    """
    if window < 0 and (not causal or num_rows == 1):
        return None
    query_R1 = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None]
    key_1S = torch.arange(num_keys, device=device)[None, :]
    mask_RS = torch.ones((num_rows, num_keys), dtype=torch.bool, device=device)
    if causal:
        mask_RS &= key_1S <= query_R1
    if window >= 0:
        mask_RS &= key_1S >= query_R1 - window
    return mask_RS


def attend(
    query_RHD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGE: torch.Tensor,
    *,
    scale: float,
    mask_RS: torch.Tensor | None,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of ``R`` rows over ``S`` keys with ``H`` query and ``G`` KV heads; returns ``[R, H, E]``."""
    query_HRD, key_GSD, value_GSE = (x.transpose(0, 1) for x in (query_RHD, key_SGD, value_SGE))
    key_GSD, value_GSE = key_GSD.to(query_HRD.dtype), value_GSE.to(query_HRD.dtype)
    if logit_cap > 0:
        return _attend_capped(query_HRD, key_GSD, value_GSE, scale, mask_RS, logit_cap).transpose(0, 1)
    output_1HRE = scaled_dot_product_attention(
        query_HRD[None],
        key_GSD[None],
        value_GSE[None],
        attn_mask=mask_RS,
        scale=scale,
        enable_gqa=query_HRD.shape[0] != key_GSD.shape[0],
    )
    return output_1HRE[0].transpose(0, 1)


def _attend_capped(
    query_HRD: torch.Tensor,
    key_GSD: torch.Tensor,
    value_GSE: torch.Tensor,
    scale: float,
    mask_RS: torch.Tensor | None,
    logit_cap: float,
) -> torch.Tensor:
    repeat = query_HRD.shape[0] // key_GSD.shape[0]
    score_HRS = query_HRD @ key_GSD.repeat_interleave(repeat, 0).transpose(1, 2) * scale
    score_HRS = logit_cap * torch.tanh(score_HRS / logit_cap)
    if mask_RS is not None:
        score_HRS = score_HRS.masked_fill(~mask_RS, float("-inf"))
    return score_HRS.softmax(-1) @ value_GSE.repeat_interleave(repeat, 0)


class TorchAttentionBackend(AttentionBackend):
    """SGLang attention backend ``dflash_torch``. Reads only the runner's pools and the forward batch."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.device = torch.device(model_runner.device)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._spans: list[_RequestSpan] = []
        self._masks: dict[tuple[int, int, bool, int], torch.Tensor | None] = {}

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._masks = {}
        if forward_batch.forward_mode.is_idle():
            self._spans = []
            return
        rows, context = self._rows_and_context(forward_batch)
        tree_mask_BWW = getattr(forward_batch.spec_info, "tree_mask_BWW", None)
        req_to_token = self.req_to_token_pool.req_to_token
        self._spans = []
        start = 0
        for index, (num_rows, num_context) in enumerate(zip(rows, context, strict=True)):
            row_of_pool = req_to_token[forward_batch.req_pool_indices[index]]
            self._spans.append(
                _RequestSpan(
                    start=start,
                    stop=start + num_rows,
                    slots_S=row_of_pool[: num_context + num_rows].to(torch.int64),
                    tree_mask_RS=None
                    if tree_mask_BWW is None
                    else pad(tree_mask_BWW[index], (num_context, 0), value=True),
                )
            )
            start += num_rows

    @staticmethod
    def _rows_and_context(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
        """Query rows and already written context per request."""
        seq_lens = forward_batch.seq_lens.tolist()
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            width = int(forward_batch.spec_info.draft_token_num)
            return [width] * len(seq_lens), seq_lens
        if mode.is_decode():
            return [1] * len(seq_lens), [length - 1 for length in seq_lens]
        rows = forward_batch.extend_seq_lens.tolist()
        return rows, [length - count for length, count in zip(seq_lens, rows, strict=True)]

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        key_PGD = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_PGE = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query_THD = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output_THE = query_THD.new_zeros((query_THD.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        for span in self._spans:
            output_THE[span.start : span.stop] = attend(
                query_THD[span.start : span.stop],
                key_PGD.index_select(0, span.slots_S),
                value_PGE.index_select(0, span.slots_S),
                scale=layer.scaling,
                mask_RS=self._mask(span, layer),
                logit_cap=float(layer.logit_cap or 0.0),
            )
        return output_THE.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def _mask(self, span: _RequestSpan, layer: RadixAttention) -> torch.Tensor | None:
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        if span.tree_mask_RS is not None:
            if window >= 0:
                raise NotImplementedError("dflash_torch has no tree mask with a sliding window.")
            return span.tree_mask_RS
        num_keys, num_rows = len(span.slots_S), span.stop - span.start
        causal = layer.attn_type != AttentionType.ENCODER_ONLY and not layer.is_cross_attention
        key = (num_keys, num_rows, causal, window)
        if key not in self._masks:
            self._masks[key] = block_mask(num_keys, num_rows, causal=causal, window=window, device=self.device)
        return self._masks[key]
