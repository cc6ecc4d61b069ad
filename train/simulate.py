"""What a drafter would accept, replayed offline on dumped requests: the same rounds as in serving, without a server.

The dump holds what the target chose, so walking a request needs no target: from the first generated token on, draft at the
anchor, accept while the drafted tokens are the request's own, go on behind the bonus. Only greedy requests can be replayed this
way; which ones are, is the caller's to know. A last round that drafts past a request's end accepts what the record can confirm.

Shapes: B requests, T positions, A anchors (1), S block size, L = S - 1 draft positions, R = B * L,
W tree rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dflash.kernels.tree_accept import accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.train.data import Sample, pad_taps
from sglang_dflash.train.model import Drafter

# Requests that are walked in step: enough rows for an efficient product with the head, few enough contexts to hold.
REQUESTS_AT_ONCE = 16
# Equals no token.
PAST_THE_END = -1


@dataclass(frozen=True)
class Simulated:
    """Counters over all requests, micro-averaged: tau = 1 + accepted drafts / verify steps.

    Attributes:
        steps_by_accepted: how many verify steps accepted 0, 1, ... drafts.
    """

    steps_by_accepted: tuple[int, ...]

    @property
    def verify_steps(self) -> int:
        return sum(self.steps_by_accepted)

    @property
    def accepted_drafts(self) -> int:
        return sum(accepted * steps for accepted, steps in enumerate(self.steps_by_accepted))

    @property
    def tau(self) -> float:
        return 1 + self.accepted_drafts / self.verify_steps if self.verify_steps else 1.0


@torch.no_grad()
def simulate(
    drafter: Drafter,
    samples: Sequence[Sample],
    embedding_VH: torch.Tensor,
    head_VH: torch.Tensor,
    *,
    num_nodes: int | None = None,
    max_length: int = 4096,
) -> Simulated:
    """Replay the first ``max_length`` rows of ``samples`` with chain drafts, or with trees of ``num_nodes``.

    Drafter, embedding and head are on one device; the head multiplies in its own dtype.
    """
    counts_S = torch.zeros(drafter.config.block_size, dtype=torch.int64)
    for start in range(0, len(samples), REQUESTS_AT_ONCE):
        walk = _Walk(samples[start : start + REQUESTS_AT_ONCE], drafter, max_length, head_VH.device)
        while (alive := walk.alive()).numel():
            hidden_BLH, anchor_B, target_BS = walk.draft(alive, embedding_VH)
            tree = _tree(hidden_BLH, anchor_B, head_VH, num_nodes)
            # Only rows on the request's own path are ever reached; the target's token after depth d is target_BS[:, d].
            target_BW = target_BS.gather(1, tree.depth_BW)
            max_depth = min(hidden_BLH.shape[1], tree.width - 1)
            length_B = accept_tree(tree, target_BW, max_depth=max_depth).length_B.cpu()
            walk.advance(alive, length_B + 1)
            counts_S += length_B.bincount(minlength=len(counts_S))
    return Simulated(tuple(counts_S.tolist()))


class _Walk:
    """Some requests, each at its own position; their contexts are projected once."""

    def __init__(self, samples: Sequence[Sample], drafter: Drafter, max_length: int, device: torch.device) -> None:
        self._drafter = drafter
        taps_BTF = pad_taps(samples, max_length)
        rows_B = [min(len(sample.token_ids), max_length) for sample in samples]
        size = drafter.config.block_size
        token_BT = torch.full((len(samples), taps_BTF.shape[1] + size), PAST_THE_END, dtype=torch.int64)
        for index, (sample, rows) in enumerate(zip(samples, rows_B, strict=True)):
            token_BT[index, :rows] = sample.token_ids[:rows]
        self._context = drafter.context(taps_BTF.to(device))
        self._token_BT = token_BT.to(device)
        self._position_B = torch.tensor([sample.prompt_len for sample in samples])
        self._last_B = torch.tensor(rows_B) - 1

    def alive(self) -> torch.Tensor:
        """Requests that have a token to predict."""
        return (self._position_B < self._last_B).nonzero()[:, 0]

    def advance(self, alive: torch.Tensor, rows_B: torch.Tensor) -> None:
        self._position_B[alive] += rows_B

    def draft(self, alive: torch.Tensor, embedding_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(hidden states of the draft slots ``[B, L, H]``, anchor tokens, the request's next S tokens) of ``alive``."""
        device = self._token_BT.device
        row_B, anchor_B1 = alive.to(device), self._position_B[alive, None].to(device)
        context = [(key[row_B], value[row_B]) for key, value in self._context]
        position_BS = anchor_B1 + 1 + torch.arange(self._drafter.config.block_size, device=device)
        token_BT = self._token_BT[row_B]
        token_B1 = token_BT.gather(1, anchor_B1)
        hidden_BASH = self._drafter(context, anchor_B1, token_B1, embedding_VH)
        return hidden_BASH[:, 0, 1:], token_B1[:, 0], token_BT.gather(1, position_BS)


def _tree(hidden_BLH: torch.Tensor, anchor_B: torch.Tensor, head_VH: torch.Tensor, num_nodes: int | None) -> DraftTree:
    # Flat rows make one product; a sliced three-dimensional operand would become one per request, several times slower on a CPU.
    logits_RV = hidden_BLH.to(head_VH.dtype).flatten(0, 1) @ head_VH.T
    logits_BLV = logits_RV.float().unflatten(0, hidden_BLH.shape[:2])
    if num_nodes is None:
        return DraftTree.chain(logits_BLV.argmax(dim=-1), anchor_B)
    top = torch.log_softmax(logits_BLV, dim=-1).topk(min(num_nodes, len(head_VH)), dim=-1)
    return build_tree(top.indices, top.values, anchor_B, num_nodes=num_nodes)
