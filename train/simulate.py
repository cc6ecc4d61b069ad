"""What a drafter would accept, replayed offline on dumped requests: the same round as in serving, without a server.

The dump holds what the target chose, so walking a request needs no target: draft at the anchor, accept while the drafted tokens
are the request's own, go on behind the bonus. Only greedy requests can be replayed this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dflash.kernels.tree_accept import accept_tree
from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.train.data import IGNORE, Batch, Sample, make_batch
from sglang_dflash.train.mask import block_attention_mask
from sglang_dflash.train.model import Drafter


@dataclass(frozen=True)
class Simulated:
    """Counters over all requests. tau = 1 + accepted drafts / verify steps."""

    accepted_drafts: int
    verify_steps: int

    @property
    def tau(self) -> float:
        return 1 + self.accepted_drafts / self.verify_steps if self.verify_steps else 1.0


def draft_hidden(drafter: Drafter, batch: Batch, embedding_VH: torch.Tensor) -> torch.Tensor:
    """The drafter's final hidden states at every block row: ``[B, A, S, H]``."""
    config = drafter.config
    batch_size, anchors = batch.anchor_BA.shape
    position_BAS = batch.anchor_BA[:, :, None] + torch.arange(config.block_size, device=batch.anchor_BA.device)
    token_BAS = torch.full_like(position_BAS, config.mask_token_id)
    token_BAS[:, :, 0] = batch.token_BT.gather(1, batch.anchor_BA)
    mask_BQS = block_attention_mask(
        batch.anchor_BA, batch.taps_BTF.shape[1], config.block_size, causal=config.is_causal
    )
    hidden_BQH = drafter(
        batch.taps_BTF,
        torch.nn.functional.embedding(token_BAS.flatten(1), embedding_VH),
        position_BAS.flatten(1),
        mask_BQS,
    )
    return hidden_BQH.view(batch_size, anchors, config.block_size, -1)


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
    """Replay ``samples`` with chain drafts, or with trees of ``num_nodes``."""
    accepted = steps = 0
    for sample in samples:
        batch = make_batch([sample], 1 << 30, drafter.config.block_size, max_length).to(head_VH.device)
        hidden_ALH = draft_hidden(drafter, batch, embedding_VH)[0, :, 1:]
        length_A = _accepted_lengths(hidden_ALH, head_VH, batch, num_nodes)
        anchor = 0
        while anchor < len(length_A):
            accepted += length_A[anchor]
            steps += 1
            anchor += length_A[anchor] + 1
    return Simulated(accepted, steps)


def _accepted_lengths(
    hidden_ALH: torch.Tensor, head_VH: torch.Tensor, batch: Batch, num_nodes: int | None
) -> list[int]:
    """Drafts that each anchor of one request would accept."""
    depth = hidden_ALH.shape[1]
    top_k = num_nodes or 1
    pieces = []
    for hidden_LH in hidden_ALH:
        logp_LV = torch.log_softmax((hidden_LH @ head_VH.T).float(), dim=-1)
        pieces.append(logp_LV.topk(min(top_k, len(head_VH)), dim=-1))
    logp_ALK = torch.stack([piece.values for piece in pieces])
    id_ALK = torch.stack([piece.indices for piece in pieces])
    bonus_A = batch.token_BT[0, batch.anchor_BA[0]]
    tree = (
        build_tree(id_ALK, logp_ALK, bonus_A, num_nodes=num_nodes)
        if num_nodes
        else DraftTree.chain(id_ALK[..., 0], bonus_A)
    )
    # Only rows on the request's own path are ever reached; there the target's token after depth d is the label of slot d + 1.
    # IGNORE, past the request's end, equals no token.
    label_AS = torch.nn.functional.pad(batch.label_BAS[0, :, 1:], (0, 1), value=IGNORE)
    target_token_AW = label_AS.gather(1, tree.depth_BW)
    return accept_tree(tree, target_token_AW, max_depth=min(depth, tree.width - 1)).length_B.tolist()
