"""The loss: cross-entropy of every draft slot against the target's own token, through the target's frozen head.

Slot j weighs exp(-(j - 1) / gamma): a later slot only counts when the earlier ones were right. Logits are made a chunk of rows
at a time and never kept: since the head is frozen, the gradient with respect to a row is known as soon as its logits are.
Which rows have a label is ``data``'s business.

Shapes: R labelled rows, A anchors, S block size, H hidden, V vocabulary (or the candidates of a step).
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
    """(weighted mean cross-entropy, whether each row's argmax is its label).

    Args:
        hidden_RH: the drafter's final hidden states, in the head's dtype.
        head_VH: the target's head, or a step's candidates; gets no gradient.
        label_R: int64, rows of ``head_VH``.
        weight_R: fp32.
    """
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


def block_accuracy(
    correct_R: torch.Tensor, row_R: torch.Tensor, *, num_anchors: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(share of right drafts in each slot, fp32 ``[S]``; tau = 1 + drafts accepted per anchor).

    Every anchor counts once here. A server counts the anchors that it gets to, so its tau differs; ``simulate`` walks as it does.

    Args:
        correct_R: bool, whether a labelled row's draft is right.
        row_R: int64, the place of each labelled row among the ``num_anchors`` blocks; an anchor without label in slot 1 is
            padding.
    """
    rows = torch.zeros(num_anchors * block_size, device=correct_R.device)
    known_AS = rows.index_fill(0, row_R, 1.0).view(-1, block_size)
    correct_AS = rows.index_copy(0, row_R, correct_R.float()).view(-1, block_size)
    accepted = correct_AS[:, 1:].cumprod(dim=1).sum()
    return correct_AS.sum(dim=0) / known_AS.sum(dim=0).clamp_min(1), 1 + accepted / known_AS[:, 1].sum()


@dataclass(frozen=True)
class Candidates:
    """The vocabulary of one step: a subset of the head's rows, and where each token id is in it.

    Attributes:
        head_VH: rows of the head.
        index_of: int64 ``[full vocabulary]``; -1 for tokens that are no label anywhere.
    """

    head_VH: torch.Tensor
    index_of: torch.Tensor


class CandidateSampler:
    """Draws a step's candidates: every token that is a label somewhere, plus ``extra`` others.

    The softmax over candidates is biased: the others' part of the partition function is counted for the drawn ones alone. With
    ``extra`` at least the number of others it is the whole vocabulary, and exact.
    """

    def __init__(self, head_VH: torch.Tensor, label_ids: torch.Tensor, extra: int) -> None:
        device = head_VH.device
        self._head_VH = head_VH
        seen = label_ids.unique().to(device)
        unseen = torch.ones(len(head_VH), dtype=torch.bool, device=device)
        unseen[seen] = False
        self._unseen = unseen.nonzero()[:, 0]
        self._extra = extra
        self._seen_head_VH = head_VH[seen]
        self._index_of = torch.full((len(head_VH),), -1, dtype=torch.int64, device=device)
        self._index_of[seen] = torch.arange(len(seen), device=device)

    def draw(self, generator: torch.Generator) -> Candidates:
        """The candidates of a step. ``generator`` is a CPU generator."""
        chosen = self._unseen
        if self._extra < len(chosen):
            # A token drawn twice counts twice among thousands; drawing without replacement costs a sort of the vocabulary.
            chosen = chosen[torch.randint(len(chosen), (self._extra,), generator=generator).to(chosen.device)]
        return Candidates(torch.cat([self._seen_head_VH, self._head_VH[chosen]]), self._index_of)
