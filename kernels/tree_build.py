"""Best-first draft trees: the most probable prefixes under the drafter's per-position marginals.

A prefix's score is the sum of its tokens' log-probabilities. The expected number of accepted drafts under the marginals is
the sum over nodes of exp(score), so the N best prefixes are the best tree of N nodes (Ringel and Romano, arXiv 2604.12989).
Because extending a prefix, or taking a less probable last token, never raises its score, a prefix's ancestors score at least
as well as it does: the N best are ancestor-closed, and a depth-synchronous search that keeps the N best of each depth finds
them.

The *spine* is the greedy chain (the best token at every position). With ``spine=True`` its first min(L, N) nodes are always
in the tree, so a tree never accepts less than the chain of the same width; the other places go to the most probable prefixes
that are not spine. Their ancestors are spine nodes or better-scored others, so the tree stays ancestor-closed.

Ties are broken by depth (shallow first), then by the parent's place in its own depth, then by the token's rank: the order of a
stable sort over (depth, parent place, rank).

``build_tree`` is static-shaped and never synchronises with the host: one Triton program per request on a GPU (every row offers
its best child that is not in the tree yet; the best offer becomes the next row), the depth-synchronous search in torch
elsewhere. Both give the same rows, ties included; ``build_tree_reference`` is the readable heap.

Shapes: B requests, L draft positions, K candidates per position, N nodes, M = N frontier places, W = N + 1 rows.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.tree_mask import ancestor_mask
from sglang_dflash.speculative.tree import DraftTree

NEG_INF = float("-inf")


def build_tree(
    topk_id_BLK: torch.Tensor,
    topk_logp_BLK: torch.Tensor,
    bonus_B: torch.Tensor,
    *,
    num_nodes: int,
    spine: bool = True,
) -> DraftTree:
    """The best tree of ``num_nodes`` nodes per request.

    Args:
        topk_id_BLK: int64, the K best tokens of each position, best first.
        topk_logp_BLK: their log-probabilities, descending.
        bonus_B: int64, the root's token.
        num_nodes: nodes beyond the root; rows for which there is no prefix are padding.
        spine: keep the greedy chain inside.

    Returns:
        Trees whose rows are the spine first (with ``spine``), then the others by score.
    """
    build = build_tree_triton if topk_id_BLK.is_cuda else build_tree_torch
    return build(topk_id_BLK, topk_logp_BLK.float(), bonus_B, num_nodes=num_nodes, spine=spine)


def build_tree_triton(
    topk_id_BLK: torch.Tensor, topk_logp_BLK: torch.Tensor, bonus_B: torch.Tensor, *, num_nodes: int, spine: bool
) -> DraftTree:
    """``build_tree`` as one Triton program per request, for up to 64 nodes (a row's ancestors are one 64-bit word)."""
    batch, depths, ranks = topk_id_BLK.shape
    width = num_nodes + 1
    num_spine = min(depths, num_nodes) if spine else 0
    tree = DraftTree.empty(batch, width, topk_id_BLK.device, num_spine=num_spine)
    _build_kernel[(batch,)](
        topk_id_BLK.contiguous(),
        topk_logp_BLK.contiguous(),
        bonus_B.contiguous(),
        *tree.tensors(),
        width,
        depths,
        ranks,
        num_spine,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=1,
    )
    return tree


@triton.jit
def _offer(logp_ptr, score, depth, rank, depths, ranks):  # type: ignore[no-untyped-def]
    """Score of a row's child of this rank; -inf where there is none."""
    exists = (depth < depths) & (rank < ranks)
    return score + tl.load(logp_ptr + depth * ranks + rank, mask=exists, other=float("-inf"))


@triton.jit
def _build_kernel(  # type: ignore[no-untyped-def]
    id_ptr,
    logp_ptr,
    bonus_ptr,
    token_ptr,
    parent_ptr,
    depth_ptr,
    score_ptr,
    valid_ptr,
    mask_ptr,
    width,
    depths,
    ranks,
    spine_rows,
    BLOCK_W: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    id_ptr += request * depths * ranks
    logp_ptr += request * depths * ranks
    row_W = tl.arange(0, BLOCK_W)
    bonus = tl.load(bonus_ptr + request)
    token_W = tl.where(row_W == 0, bonus, tl.zeros([BLOCK_W], tl.int64))
    parent_W = tl.full([BLOCK_W], -1, tl.int32)
    depth_W = tl.zeros([BLOCK_W], tl.int32)
    score_W = tl.where(row_W == 0, 0.0, float("-inf"))
    ancestors_W = tl.zeros([BLOCK_W], tl.int64)  # bit j - 1: row j is an ancestor, or the row itself
    rank_W = tl.zeros([BLOCK_W], tl.int32)  # of the child that the row offers
    root_offer = _offer(logp_ptr, 0.0, 0, 0, depths, ranks)
    offer_W = tl.where(row_W == 0, root_offer, float("-inf"))
    on_spine = spine_rows > 0
    for row in range(1, width):
        best = tl.max(offer_W, 0)
        # The spine's next row is the last row's best child, as long as there is one.
        spine_offer = tl.max(tl.where(row_W == row - 1, offer_W, float("-inf")), 0)
        on_spine = on_spine & (row <= spine_rows) & (spine_offer > float("-inf"))
        # Ties: the shallowest, then the parent that came first.
        place_W = depth_W * BLOCK_W + row_W
        parent = tl.min(tl.where(offer_W == best, place_W, BLOCK_W * BLOCK_W * 2), 0) % BLOCK_W
        parent = tl.where(on_spine, row - 1, parent)
        is_parent_W = row_W == parent
        found = tl.max(tl.where(is_parent_W, offer_W, float("-inf")), 0)
        if found > float("-inf"):
            depth = tl.sum(tl.where(is_parent_W, depth_W, 0), 0)
            rank = tl.sum(tl.where(is_parent_W, rank_W, 0), 0)
            parent_score = tl.max(tl.where(is_parent_W, score_W, float("-inf")), 0)
            ancestors = tl.sum(tl.where(is_parent_W, ancestors_W, 0), 0) | (tl.full([], 1, tl.int64) << (row - 1))
            is_row_W = row_W == row
            token_W = tl.where(is_row_W, tl.load(id_ptr + depth * ranks + rank), token_W)
            parent_W = tl.where(is_row_W, parent, parent_W)
            depth_W = tl.where(is_row_W, depth + 1, depth_W)
            score_W = tl.where(is_row_W, found, score_W)
            ancestors_W = tl.where(is_row_W, ancestors, ancestors_W)
            rank_W = tl.where(is_parent_W, rank + 1, rank_W)
            first = _offer(logp_ptr, found, depth + 1, 0, depths, ranks)
            sibling = _offer(logp_ptr, parent_score, depth, rank + 1, depths, ranks)
            offer_W = tl.where(is_row_W, first, tl.where(is_parent_W, sibling, offer_W))
    inside_W = row_W < width
    valid_W = score_W > float("-inf")
    out_W = request * width + row_W
    tl.store(token_ptr + out_W, token_W, mask=inside_W)
    tl.store(parent_ptr + out_W, parent_W.to(tl.int64), mask=inside_W)
    tl.store(depth_ptr + out_W, depth_W.to(tl.int64), mask=inside_W)
    tl.store(score_ptr + out_W, score_W, mask=inside_W)
    tl.store(valid_ptr + out_W, valid_W, mask=inside_W)
    for row in range(width):
        # Column 0 is the root, which every row of the tree sees; padding sees itself alone.
        shift = tl.maximum(row - 1, 0).to(tl.int64)
        sees_W = tl.where(row == 0, valid_W, ((ancestors_W >> shift) & 1) != 0) | (row_W == row)
        tl.store(mask_ptr + (request * width + row_W) * width + row, sees_W, mask=inside_W)


def build_tree_torch(
    topk_id_BLK: torch.Tensor, topk_logp_BLK: torch.Tensor, bonus_B: torch.Tensor, *, num_nodes: int, spine: bool
) -> DraftTree:
    """``build_tree`` in torch: the N best prefixes of every depth, then the N best of all."""
    places = _frontier(topk_logp_BLK, num_nodes)
    order_BN, valid_BN = _choose(places, num_nodes, spine, topk_id_BLK.shape[1])
    tree = _assemble(places, order_BN, valid_BN, topk_id_BLK, bonus_B, num_nodes)
    num_spine = min(topk_id_BLK.shape[1], num_nodes) if spine else 0
    return replace(tree, mask_BWW=ancestor_mask(tree.parent_BW), num_spine=num_spine)


class _Places(NamedTuple):
    """Every kept prefix, depth by depth, as flat ``[B, L * M]`` columns."""

    score_BP: torch.Tensor
    rank_BP: torch.Tensor  # of the prefix's last token at its position
    parent_BP: torch.Tensor  # flat place of the prefix one shorter; negative at depth 0


def _frontier(logp_BLK: torch.Tensor, num_places: int) -> _Places:
    batch, depths, num_ranks = logp_BLK.shape
    device = logp_BLK.device
    score_BM = torch.full((batch, num_places), NEG_INF, device=device)
    score_BM[:, 0] = 0.0
    scores, ranks, parents = [], [], []
    for depth in range(depths):
        candidate_BC = (score_BM[:, :, None] + logp_BLK[:, depth, None, :]).flatten(1)
        candidate_BC, index_BC = candidate_BC.sort(dim=-1, descending=True, stable=True)
        score_BM = _padded(candidate_BC, num_places, NEG_INF)
        index_BM = _padded(index_BC, num_places, 0)
        scores.append(score_BM)
        ranks.append(index_BM % num_ranks)
        parents.append(index_BM // num_ranks + (depth - 1) * num_places)
    return _Places(torch.cat(scores, dim=1), torch.cat(ranks, dim=1), torch.cat(parents, dim=1))


def _padded(values_BC: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    missing = count - values_BC.shape[1]
    return torch.nn.functional.pad(values_BC, (0, missing), value=fill) if missing > 0 else values_BC[:, :count]


def _choose(places: _Places, num_nodes: int, spine: bool, depths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat places of the tree's nodes in row order, and which of them exist."""
    score_BP = places.score_BP
    spine_nodes = min(depths, num_nodes) if spine else 0
    # The greedy chain is the best prefix of each depth, hence place 0 of each depth.
    place_P = torch.arange(score_BP.shape[1], device=score_BP.device)
    spine_P = (place_P % num_nodes == 0) & (place_P < spine_nodes * num_nodes)
    # +inf lifts the spine, as far as it is possible at all, in front of all others; a stable sort keeps its depth order.
    lifted_BP = torch.where(spine_P & (score_BP > NEG_INF), float("inf"), score_BP)
    order_BP = lifted_BP.argsort(dim=-1, descending=True, stable=True)
    order_BN = order_BP[:, :num_nodes]
    return order_BN, score_BP.gather(1, order_BN) > NEG_INF


def _assemble(
    places: _Places,
    order_BN: torch.Tensor,
    valid_BN: torch.Tensor,
    topk_id_BLK: torch.Tensor,
    bonus_B: torch.Tensor,
    num_nodes: int,
) -> DraftTree:
    depth_BN = order_BN // num_nodes
    rank_BN = places.rank_BP.gather(1, order_BN)
    token_BN = topk_id_BLK.flatten(1).gather(1, depth_BN * topk_id_BLK.shape[-1] + rank_BN)
    # Row of each place: the root stands before place 0, so parents at depth 0 (flat place < 0) read row 0.
    row_of_place_BP = torch.zeros_like(places.parent_BP)
    rows_BN = torch.arange(1, num_nodes + 1, device=order_BN.device).expand_as(order_BN)
    row_of_place_BP = row_of_place_BP.scatter(1, order_BN, rows_BN)
    parent_place_BN = places.parent_BP.gather(1, order_BN)
    parent_BN = row_of_place_BP.gather(1, parent_place_BN.clamp_min(0)) * (parent_place_BN >= 0)
    return DraftTree(
        token_BW=torch.cat([bonus_B[:, None], token_BN * valid_BN], dim=1),
        parent_BW=_with_root(parent_BN.masked_fill(~valid_BN, -1), -1),
        depth_BW=_with_root((depth_BN + 1) * valid_BN, 0),
        score_BW=_with_root(places.score_BP.gather(1, order_BN).masked_fill(~valid_BN, NEG_INF), 0),
        valid_BW=_with_root(valid_BN, 1),
    )


def _with_root(values_BN: torch.Tensor, root: int) -> torch.Tensor:
    return torch.nn.functional.pad(values_BN, (1, 0), value=root)


def build_tree_reference(
    topk_logp_LK: list[list[float]], *, num_nodes: int, spine: bool = True
) -> list[tuple[tuple[int, ...], float]]:
    """The nodes of one request's tree in row order, each as (ranks from the root, score): a heap over prefixes.

    Scores are summed in fp32 as ``build_tree`` does, so that ties are the same ties.
    """
    depths = len(topk_logp_LK)
    logp_LK = torch.tensor(topk_logp_LK, dtype=torch.float32).reshape(depths, -1)

    def score(ranks: tuple[int, ...]) -> float:
        total = torch.zeros((), dtype=torch.float32)
        for depth, rank in enumerate(ranks):
            total = total + logp_LK[depth, rank]
        return float(total)

    def place(ranks: tuple[int, ...]) -> tuple[Any, ...]:
        return (-score(ranks), place(ranks[:-1]), ranks[-1]) if ranks else ()

    spine_nodes = {(0,) * depth for depth in range(1, min(depths, num_nodes) + 1)} if spine else set()
    nodes = [(ranks, score(ranks)) for ranks in sorted(spine_nodes, key=len) if score(ranks) > NEG_INF]
    heap: list[tuple[Any, ...]] = []

    def push(ranks: tuple[int, ...]) -> None:
        if len(ranks) <= depths and ranks[-1] < logp_LK.shape[1] and score(ranks) > NEG_INF:
            heapq.heappush(heap, (-score(ranks), len(ranks), place(ranks), ranks))

    push((0,))
    while heap and len(nodes) < num_nodes:
        ranks = heapq.heappop(heap)[-1]
        if ranks not in spine_nodes:
            nodes.append((ranks, score(ranks)))
        push((*ranks[:-1], ranks[-1] + 1))
        push((*ranks, 0))
    return nodes
