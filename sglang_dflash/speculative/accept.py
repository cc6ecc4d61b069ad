"""The target's own choice at every verified row.

Greedy rows take the argmax. Sampled rows take one draw from the target's distribution after temperature, top-k, top-p and
min-p, with SGLang's own torch samplers. The tree was fixed before this randomness is drawn, so walking the tree along these
choices (``kernels.tree_accept``) emits exactly what sampling token by token would (research: Ringel and Romano, arXiv
2604.12989). What depends on the path (penalties, grammars) is in the logits already.
"""

from __future__ import annotations

from typing import Any

import torch


def choose_tokens(logits_TV: torch.Tensor, sampling_info: Any, num_rows: int) -> torch.Tensor:
    """The target's token after each of ``num_rows`` rows per request.

    Args:
        logits_TV: ``[requests * num_rows, vocabulary]``, request-major. Logit bias is added in place.
        sampling_info: SGLang's ``SamplingBatchInfo``, or None for greedy.
        num_rows: verified rows of one request (the width).

    Returns:
        int64 ``[requests, num_rows]``.
    """
    if sampling_info is not None and sampling_info.logit_bias is not None:
        logits_TV.view(-1, num_rows, logits_TV.shape[-1]).add_(sampling_info.logit_bias[:, None, :])
    greedy_T = logits_TV.argmax(dim=-1)
    if sampling_info is None or sampling_info.is_all_greedy:
        return greedy_T.view(-1, num_rows)
    top_k_T = sampling_info.top_ks.repeat_interleave(num_rows)
    drawn_T = _draw(logits_TV, sampling_info, top_k_T, num_rows)
    return torch.where(top_k_T == 1, greedy_T, drawn_T).view(-1, num_rows)


def _draw(logits_TV: torch.Tensor, sampling_info: Any, top_k_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch

    temperature_T1 = sampling_info.temperatures.repeat_interleave(num_rows, dim=0)
    probability_TV = torch.softmax(logits_TV.float() / temperature_T1, dim=-1)
    filtered = (
        sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling or sampling_info.need_min_p_sampling
    )
    if not filtered:
        return sampling_from_probs_torch(probability_TV, sampling_seed=None, positions=None).to(torch.int64)
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probability_TV,
        top_k_T,
        sampling_info.top_ps.repeat_interleave(num_rows),
        sampling_info.min_ps.repeat_interleave(num_rows),
        sampling_info.need_min_p_sampling,
        None,
        torch.zeros_like(top_k_T),
        max_top_k=sampling_info.max_top_k,
    ).to(torch.int64)
