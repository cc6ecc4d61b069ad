"""The loss: cross-entropy of every draft slot against the target's own token, through the target's frozen head.

Slot j weighs exp(-(j - 1) / gamma): a later slot only counts when the earlier ones were right. Logits are made a chunk of rows
at a time and never kept: since the head is frozen, the gradient with respect to a row is known as soon as its logits are.

Shapes: R rows, H hidden, V vocabulary (or the candidates of a step), S block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

CHUNK_ROWS = 1024


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted sum of cross-entropies; returns it and, per row, whether the argmax is the label."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RH: torch.Tensor, head_VH: torch.Tensor, label_R: torch.Tensor, weight_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = hidden_RH.new_zeros((), dtype=torch.float32)
        gradient_RH = torch.empty_like(hidden_RH)
        correct_R = torch.empty_like(label_R, dtype=torch.bool)
        for start in range(0, len(hidden_RH), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits_CV = (hidden_RH[rows] @ head_VH.T).float()
            label_C1 = label_R[rows, None]
            correct_R[rows] = logits_CV.argmax(dim=1) == label_R[rows]
            log_partition_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
            loss += ((log_partition_C1 - logits_CV.gather(1, label_C1))[:, 0] * weight_R[rows]).sum()
            error_CV = torch.exp_(logits_CV.sub_(log_partition_C1))
            error_CV.scatter_add_(1, label_C1, torch.full_like(error_CV[:, :1], -1.0))
            error_CV *= weight_R[rows, None]
            gradient_RH[rows] = error_CV.to(head_VH.dtype) @ head_VH
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(correct_R)
        return loss, correct_R

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_RH,) = ctx.saved_tensors
        return gradient_RH * gradients[0].to(gradient_RH.dtype), None, None, None


def cross_entropy(
    hidden_RH: torch.Tensor, head_VH: torch.Tensor, label_R: torch.Tensor, weight_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted mean cross-entropy, correct_R). The head gets no gradient."""
    total, correct_R = _ChunkedCrossEntropy.apply(hidden_RH, head_VH, label_R, weight_R)
    return total / weight_R.sum(), correct_R


def cross_entropy_reference(
    hidden_RH: torch.Tensor, head_VH: torch.Tensor, label_R: torch.Tensor, weight_R: torch.Tensor
) -> torch.Tensor:
    """The same loss with all logits at once."""
    loss_R = functional.cross_entropy(hidden_RH.float() @ head_VH.T.float(), label_R, reduction="none")
    return (loss_R * weight_R).sum() / weight_R.sum()


def slot_weights(slot_R: torch.Tensor, gamma: float) -> torch.Tensor:
    """Weight of each row by its slot in the block (1 is the first drafted token)."""
    return torch.exp(-(slot_R.float() - 1) / gamma)


@dataclass(frozen=True)
class Candidates:
    """The vocabulary of one step: a subset of the head's rows, and where each token id is in it.

    Attributes:
        head_VH: rows of the head.
        index_of: int64 ``[full vocabulary]``; undefined for tokens that are not candidates.
    """

    head_VH: torch.Tensor
    index_of: torch.Tensor


class CandidateSampler:
    """Draws a step's candidates: every token that is a label somewhere, plus ``extra`` others."""

    def __init__(self, head_VH: torch.Tensor, label_ids: torch.Tensor, extra: int) -> None:
        self._head_VH = head_VH
        self._seen = label_ids.unique().to(head_VH.device)
        unseen = torch.ones(len(head_VH), dtype=torch.bool, device=head_VH.device)
        unseen[self._seen] = False
        self._unseen = unseen.nonzero()[:, 0]
        self._extra = min(extra, len(self._unseen))
        self._index_of = torch.full((len(head_VH),), -1, dtype=torch.int64, device=head_VH.device)
        self._index_of[self._seen] = torch.arange(len(self._seen), device=head_VH.device)
        self._seen_head = head_VH[self._seen]

    def draw(self, seed: int) -> Candidates:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self._unseen), (self._extra,), generator=generator).to(self._unseen.device)
        # A token drawn twice counts twice among thousands; drawing without replacement costs a sort of the vocabulary.
        return Candidates(torch.cat([self._seen_head, self._head_VH[self._unseen[chosen]]]), self._index_of)
