"""Frequency, presence and repetition penalties, and min_new_tokens, along every path of a draft tree.

A penalty depends on the tokens that were generated before the position, so every row has its own: the request's output tokens in
its context, then the row's ancestors and itself. SGLang's own penalizers see one position per step. Here each penalised
request keeps how often it has generated each token, on the device, and the rows' paths are added to that. Counts start when a
request is prefilled (also again, after a retraction) and grow with what is committed, so nothing depends on how far the host is
behind. Batches without such a request pay nothing.

The arithmetic and its order are SGLang's: additive penalties, then the scaling one (``sampling/penaltylib``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from sglang_dflash.kernels.tree_accept import Acceptance
from sglang_dflash.speculative.tree import DraftTree


def is_penalised(sampling: Any) -> bool:
    """Whether a request's ``SamplingParams`` ask for anything of this module."""
    return bool(
        sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
        or sampling.repetition_penalty != 1
        or sampling.min_new_tokens > 0
    )


def stop_tokens(req: Any) -> list[int]:
    """What may not end a request that has to go on: its stop ids and the tokenizer's end tokens."""
    tokenizer = req.tokenizer
    of_tokenizer = {
        getattr(tokenizer, "eos_token_id", None),
        *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
    }
    every = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ()), *of_tokenizer}
    return sorted(token for token in every if token is not None)


class _Followed(NamedTuple):
    """What is kept of a penalised request: how often it generated each token, and the tokens that may end it."""

    counts_V: torch.Tensor
    stop_S: torch.Tensor


class PathPenalties:
    """Output-token counts of the penalised requests, fp32 ``[vocabulary]`` each, and what follows from them.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._followed: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()

    def start(self, reqs: Sequence[Any]) -> None:
        """Requests are prefilled: what they have generated so far is in their context now."""
        for req in reqs:
            if is_penalised(req.sampling_params):
                generated = torch.tensor(list(req.output_ids), dtype=torch.int64)
                counts_V = torch.bincount(generated, minlength=self._vocab_size).float()
                stop_S = torch.tensor(stop_tokens(req), dtype=torch.int64)
                self._followed[req] = _Followed(
                    counts_V.to(self._device, non_blocking=True), stop_S.to(self._device, non_blocking=True)
                )

    def apply(self, logits_TV: torch.Tensor, tree: DraftTree, reqs: Sequence[Any]) -> None:
        """Change the logits of every row in place; ``logits_TV`` is ``[requests * width, vocabulary]``."""
        logits_BWV = logits_TV.view(len(reqs), tree.width, -1)
        for index, req in enumerate(reqs):
            if is_penalised(req.sampling_params):
                _penalise(logits_BWV[index], self._of(req), tree, index, req.sampling_params)

    def commit(self, tree: DraftTree, acceptance: Acceptance, reqs: Sequence[Any]) -> None:
        """The accepted rows of every request join its context."""
        place_D = torch.arange(acceptance.row_BD.shape[1], device=acceptance.row_BD.device)
        for index, req in enumerate(reqs):
            if is_penalised(req.sampling_params):
                token_D = tree.token_BW[index].gather(0, acceptance.row_BD[index])
                accepted_D = (place_D <= acceptance.length_B[index]).float()
                self._of(req).counts_V.index_add_(0, token_D, accepted_D)

    def _of(self, req: Any) -> _Followed:
        assert req in self._followed, f"request {req.rid} is decoded without having been prefilled here"
        return self._followed[req]


def _penalise(logits_WV: torch.Tensor, followed: _Followed, tree: DraftTree, index: int, sampling: Any) -> None:
    total_WV = followed.counts_V + path_counts(tree, index, len(followed.counts_V))
    used_WV = total_WV > 0
    if sampling.frequency_penalty != 0:
        logits_WV.sub_(sampling.frequency_penalty * total_WV)
    if sampling.presence_penalty != 0:
        logits_WV.sub_(sampling.presence_penalty * used_WV)
    if sampling.min_new_tokens > 0:
        stop_S = followed.stop_S
        short_W1 = total_WV.sum(dim=1, keepdim=True) < sampling.min_new_tokens
        logits_WV.index_add_(
            1, stop_S, torch.where(short_W1, float("-inf"), 0.0).expand(-1, len(stop_S)).to(logits_WV.dtype)
        )
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        scaled_WV = torch.where(logits_WV < 0, logits_WV * penalty, logits_WV / penalty)
        logits_WV.copy_(torch.where(used_WV, scaled_WV, logits_WV))


def path_counts(tree: DraftTree, index: int, vocab_size: int) -> torch.Tensor:
    """How often each token stands on each row's path, root and row included: fp32 ``[width, vocab_size]``."""
    token_W = tree.token_BW[index]
    if tree.mask_BWW is None:
        sees_WW = torch.ones((tree.width, tree.width), device=token_W.device).tril()
    else:
        sees_WW = tree.mask_BWW[index].float()
    counts_WV = torch.zeros((tree.width, vocab_size), device=token_W.device)
    return counts_WV.scatter_add_(1, token_W.expand(tree.width, -1), sees_WW)
