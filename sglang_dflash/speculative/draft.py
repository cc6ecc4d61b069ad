"""The drafter's side of a round: one forward over ``[bonus, MASK x (block - 1)]``, then candidates per draft position.

The drafter's context K/V are already in its pool (``commit.py`` projects committed taps into it), so the block forward is the
whole cost of a draft. Its rows are written to the slots that the verify will overwrite. Candidates come from the target's
head: under tensor parallelism each rank takes the top-k of its vocabulary shard, and ranks exchange k (logit, id) pairs and
one log-partition per position, never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.kernels.round_plan import Opened


@dataclass(frozen=True)
class Window:
    """What follows each request's committed context in a round.

    Attributes:
        rows: the block's rows, and the slots that block and verify write.
        pool_index_B: the requests' rows of the request table.
        context_len_B: committed tokens.
        context_len_cpu_B: the same on the host, where it may be larger, never smaller.
    """

    rows: Opened
    pool_index_B: torch.Tensor
    context_len_B: torch.Tensor
    context_len_cpu_B: torch.Tensor


def block_forward_batch(
    window: Window, slot_BT: torch.Tensor, *, embedding_TH: torch.Tensor, spec_info: Any
) -> ForwardBatch:
    """The drafter's forward batch; ``slot_BT`` are the block's KV slots. Its attention mask is the draft layers' own."""
    rows = window.rows
    batch_size, block = rows.token_BT.shape
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=batch_size,
        input_ids=rows.token_BT.reshape(-1),
        req_pool_indices=window.pool_index_B,
        seq_lens=window.context_len_B,
        out_cache_loc=slot_BT.view(-1),
        seq_lens_sum=int(window.context_len_cpu_B.sum()) + batch_size * block,
        seq_lens_cpu=window.context_len_cpu_B + block,
        positions=rows.position_BT.reshape(-1),
        input_embeds=embedding_TH,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def draft_candidates(hidden_TH: torch.Tensor, lm_head: Any, *, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` most probable tokens at each draft position through the target's head.

    Args:
        hidden_TH: the drafter's final hidden states at the draft positions (anchor rows left out).
        lm_head: the target's (vocabulary-parallel) head.
        top_k: candidates per position.

    Returns:
        ids int64 ``[T, top_k]`` and log-probabilities fp32 ``[T, top_k]``, best first, over the whole vocabulary.
    """
    logits_TV = _local_logits(hidden_TH, lm_head)
    shard = lm_head.shard_indices
    logits_TV = logits_TV[:, : shard.num_org_elements].float()
    log_partition_T1 = logits_TV.logsumexp(dim=-1, keepdim=True)
    logit_TK, id_TK = logits_TV.topk(min(top_k, logits_TV.shape[1]), dim=-1)
    id_TK = id_TK + shard.org_vocab_start_index
    if get_parallel().tp_size > 1:
        group = get_parallel().tp_group
        logit_TK = group.all_gather(logit_TK, dim=-1)
        id_TK = group.all_gather(id_TK, dim=-1)
        log_partition_T1 = group.all_gather(log_partition_T1, dim=-1).logsumexp(dim=-1, keepdim=True)
        logit_TK, order_TK = logit_TK.topk(top_k, dim=-1)
        id_TK = id_TK.gather(-1, order_TK)
    return id_TK, logit_TK - log_partition_T1


def _local_logits(hidden_TH: torch.Tensor, lm_head: Any) -> torch.Tensor:
    method: Any = getattr(lm_head, "quant_method", None)
    if should_apply_lm_head_quant_method(lm_head, method):
        return method.apply(lm_head, hidden_TH, None)
    return torch.matmul(hidden_TH.to(lm_head.weight.dtype), lm_head.weight.T)
