from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.kernels.tree_accept import accept_tree
from sglang_dflash.kernels.tree_build import build_tree, build_tree_reference, build_tree_torch, build_tree_triton
from sglang_dflash.kernels.tree_mask import ancestor_mask_reference
from sglang_dflash.speculative.tree import DraftTree

INF = float("inf")
Nodes = list[tuple[tuple[int, ...], float]]


def all_prefixes(logp_LK: list[list[float]]) -> Nodes:
    """Every possible prefix in the documented order: score, then depth, then the parent's place, then rank."""
    ordered: list[tuple[tuple[int, ...], np.float32]] = []
    level: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    for logp_K in logp_LK:
        extended = [((*ranks, rank), s + np.float32(logp)) for ranks, s in level for rank, logp in enumerate(logp_K)]
        level = sorted((node for node in extended if node[1] > -INF), key=lambda node: -node[1])
        ordered += level
    return [(ranks, float(s)) for ranks, s in sorted(ordered, key=lambda node: -node[1])]


def best_nodes(logp_LK: list[list[float]], num_nodes: int, spine: bool) -> Nodes:
    prefixes = all_prefixes(logp_LK)
    if not spine:
        return prefixes[:num_nodes]
    kept = [node for node in prefixes if not any(node[0]) and len(node[0]) <= num_nodes]
    kept.sort(key=lambda node: len(node[0]))
    return (kept + [node for node in prefixes if any(node[0]) or len(node[0]) > num_nodes])[:num_nodes]


def distinct_ids(depths: int, ranks: int) -> torch.Tensor:
    """Token ids ``[depths, ranks]`` that name their position and rank, out of numeric order."""
    return torch.tensor([[1000 * depth + 7 * rank % 997 + 1 for rank in range(ranks)] for depth in range(depths)])


def nodes_of(tree: DraftTree, request: int, id_LK: torch.Tensor) -> Nodes:
    """The tree's nodes in row order as (ranks from the root, score), read through tokens and parents."""
    rank_of = [{int(token): rank for rank, token in enumerate(row)} for row in id_LK]
    paths: list[tuple[int, ...]] = [()]
    nodes: Nodes = []
    for row in range(1, tree.width):
        if not tree.valid_BW[request, row]:
            paths.append(())
            continue
        parent = int(tree.parent_BW[request, row])
        ancestors = paths[parent]
        ranks = (*ancestors, rank_of[len(ancestors)][int(tree.token_BW[request, row])])
        paths.append(ranks)
        nodes.append((ranks, float(tree.score_BW[request, row])))
    return nodes


def assert_well_formed(tree: DraftTree, bonus_B: torch.Tensor) -> None:
    """The invariants that ``DraftTree`` documents, row by row."""
    assert torch.equal(tree.token_BW[:, 0], bonus_B)
    for token, parent, depth, score, valid in zip(
        tree.token_BW.tolist(),
        tree.parent_BW.tolist(),
        tree.depth_BW.tolist(),
        tree.score_BW.tolist(),
        tree.valid_BW.tolist(),
        strict=True,
    ):
        assert (parent[0], depth[0], score[0], valid[0]) == (-1, 0, 0.0, True)
        siblings = set()
        for row in range(1, tree.width):
            if not valid[row]:
                assert (token[row], parent[row], depth[row], score[row]) == (0, -1, 0, -INF)
                continue
            assert 0 <= parent[row] < row, "parents come first"
            assert valid[parent[row]], "ancestor-closed"
            assert depth[row] == depth[parent[row]] + 1
            assert -INF < score[row] <= score[parent[row]]
            assert (parent[row], token[row]) not in siblings, "siblings carry different tokens"
            siblings.add((parent[row], token[row]))


def random_candidates(seed: int, batch: int, depths: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_BLV = 2 * torch.randn(batch, depths, max(ranks, 4) + 3, generator=generator)
    logp_BLK, id_BLK = logits_BLV.log_softmax(-1).topk(ranks)
    return id_BLK, logp_BLK


@st.composite
def marginals(draw: st.DrawFn, possible_first: bool) -> list[list[float]]:
    """Descending log-probabilities ``[L][K]``, with ties and impossible tokens."""
    depths, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tied = st.sampled_from([0.0, -0.25, -0.5, -1.0, -2.0, -INF])
    value = draw(st.sampled_from([tied, st.floats(-6, 0, width=32)]))
    rows = [sorted((draw(value) for _ in range(ranks)), reverse=True) for _ in range(depths)]
    if possible_first:
        rows = [[-0.125 if row[0] == -INF else row[0], *row[1:]] for row in rows]
        rows = [sorted(row, reverse=True) for row in rows]
    return rows


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same_trees(actual: DraftTree, expected: DraftTree) -> None:
    for one, other in zip(actual.tensors(), expected.tensors(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def assert_all_agree(logp_LK: list[list[float]], num_nodes: int, spine: bool) -> None:
    expected = best_nodes(logp_LK, num_nodes, spine)
    assert build_tree_reference(logp_LK, num_nodes=num_nodes, spine=spine) == expected
    id_LK = distinct_ids(len(logp_LK), len(logp_LK[0]))
    bonus_B = torch.tensor([5])
    inputs = (id_LK[None], torch.tensor([logp_LK]), bonus_B)
    tree = build_tree_torch(*inputs, num_nodes=num_nodes, spine=spine)
    on_device = [tensor.to(DEVICE) for tensor in inputs]
    assert_same_trees(build_tree_triton(*on_device, num_nodes=num_nodes, spine=spine), tree)
    assert tree.width == num_nodes + 1
    assert tree.mask_BWW is not None
    assert tree.mask_BWW[0].tolist() == ancestor_mask_reference(tree.parent_BW[0].tolist())
    assert nodes_of(tree, 0, id_LK) == expected
    assert_well_formed(tree, bonus_B)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(logp_LK=marginals(possible_first=True), num_nodes=st.integers(1, 24))
def test_tree_with_spine_is_the_chain_and_the_best_other_prefixes(logp_LK: list[list[float]], num_nodes: int) -> None:
    assert_all_agree(logp_LK, num_nodes, spine=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(logp_LK=marginals(possible_first=False), num_nodes=st.integers(1, 24))
def test_tree_without_spine_is_the_most_probable_prefixes(logp_LK: list[list[float]], num_nodes: int) -> None:
    assert_all_agree(logp_LK, num_nodes, spine=False)


@pytest.mark.parametrize("spine", [True, False])
def test_fewer_prefixes_than_nodes_leaves_padding_at_the_end(spine: bool) -> None:
    logp_LK = [[-0.5, -1.5], [-0.25, -INF]]
    assert len(all_prefixes(logp_LK)) == 4
    assert_all_agree(logp_LK, 9, spine)
    tree = build_tree(distinct_ids(2, 2)[None], torch.tensor([logp_LK]), torch.tensor([5]), num_nodes=9, spine=spine)
    assert tree.valid_BW.tolist() == [[True] * 5 + [False] * 5]


def test_position_without_a_possible_token_ends_the_spine_and_wastes_no_node() -> None:
    impossible_K = [-INF] * 4
    assert_all_agree([[-0.5, -1.5, -2.5, -3.5], impossible_K, [-0.5, -1.5, -2.5, -3.5]], 4, spine=True)


def test_no_set_of_prefixes_expects_more_accepted_tokens() -> None:
    """Without the spine, the sum of exp(score) is the largest that any N prefixes can have."""
    id_BLK, logp_BLK = random_candidates(0, 16, 4, 4)
    tree = build_tree(id_BLK, logp_BLK, torch.zeros(16, dtype=torch.int64), num_nodes=10, spine=False)
    gain_B = tree.score_BW[:, 1:].exp().sum(1)
    for request, logp_LK in enumerate(logp_BLK.tolist()):
        best = sorted((math.exp(score) for _, score in all_prefixes(logp_LK)), reverse=True)[:10]
        torch.testing.assert_close(float(gain_B[request]), sum(best), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("depths", "num_nodes"), [(1, 1), (3, 2), (4, 4), (4, 9), (7, 20)])
def test_spine_comes_first_and_never_expects_less_than_the_chain(depths: int, num_nodes: int) -> None:
    id_BLK, logp_BLK = random_candidates(1, 64, depths, 4)
    tree = build_tree(id_BLK, logp_BLK, torch.zeros(64, dtype=torch.int64), num_nodes=num_nodes)
    spine = min(depths, num_nodes)
    row_S = torch.arange(1, spine + 1)
    assert torch.equal(tree.token_BW[:, 1 : spine + 1], id_BLK[:, :spine, 0])
    assert torch.equal(tree.parent_BW[:, 1 : spine + 1], (row_S - 1).expand(64, -1))
    assert torch.equal(tree.depth_BW[:, 1 : spine + 1], row_S.expand(64, -1))
    chain_gain_B = logp_BLK[:, :spine, 0].cumsum(1).exp().sum(1)
    gain_B = tree.score_BW[:, 1:].exp().sum(1)
    # Sums of at most 20 fp32 terms below 1 in two orders.
    assert bool((gain_B >= chain_gain_B - 1e-5).all())
    if num_nodes > depths:
        assert bool((gain_B > chain_gain_B).all())


@pytest.mark.parametrize(("depths", "num_nodes"), [(1, 3), (3, 2), (4, 4), (4, 9), (6, 16)])
def test_tree_never_accepts_less_than_the_chain_of_its_width(depths: int, num_nodes: int) -> None:
    batch, vocabulary = 512, 5
    generator = torch.Generator().manual_seed(2)
    logits_BLV = torch.randn(batch, depths, vocabulary, generator=generator)
    logp_BLK, id_BLK = logits_BLV.log_softmax(-1).topk(4)
    bonus_B = torch.zeros(batch, dtype=torch.int64)
    tree = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=num_nodes)
    target_BW = torch.randint(vocabulary, (batch, num_nodes + 1), generator=generator)
    # Half of the requests have a target that follows the drafter for a while.
    spine = min(depths, num_nodes)
    target_BW[::2, : spine // 2 + 1] = id_BLK[::2, : spine // 2 + 1, 0]
    chain = DraftTree.chain(id_BLK[:, :spine, 0], bonus_B)
    chained = accept_tree(chain, target_BW[:, : spine + 1], max_depth=spine)
    accepted = accept_tree(tree, target_BW, max_depth=spine)
    assert bool((accepted.length_B >= chained.length_B).all())
    assert int(chained.length_B.sum()) > 0
    if num_nodes > depths:
        assert int(accepted.length_B.sum()) > int(chained.length_B.sum())


@pytest.mark.parametrize("spine", [True, False])
@pytest.mark.parametrize(("depths", "num_nodes"), [(5, 3), (5, 5), (3, 6)])
def test_one_candidate_per_position_gives_the_chain(depths: int, num_nodes: int, spine: bool) -> None:
    id_BLK, logp_BLK = random_candidates(3, 4, depths, 1)
    bonus_B = torch.tensor([9, 8, 7, 6])
    tree = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=num_nodes, spine=spine)
    nodes = min(depths, num_nodes)
    chain = DraftTree.chain(id_BLK[:, :nodes, 0], bonus_B)
    for name in ("token_BW", "parent_BW", "depth_BW", "valid_BW"):
        assert torch.equal(getattr(tree, name)[:, : nodes + 1], getattr(chain, name)), name
    assert not tree.valid_BW[:, nodes + 1 :].any()
    assert_well_formed(tree, bonus_B)


def test_every_width_from_2_to_65() -> None:
    bonus_B = torch.tensor([1, 2])
    for width in range(2, 66):
        id_BLK, logp_BLK = random_candidates(width, 2, 7, min(width - 1, 20))
        tree = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=width - 1)
        assert tree.width == width and tree.batch == 2 and not tree.is_chain
        assert_well_formed(tree, bonus_B)
        assert int(tree.valid_BW.sum()) == 2 * width
        if width in (2, 3, 8, 17, 65):
            for request in range(2):
                reference = build_tree_reference(logp_BLK[request].tolist(), num_nodes=width - 1)
                assert nodes_of(tree, request, id_BLK[request]) == reference


def test_requests_of_a_batch_do_not_touch_each_other() -> None:
    id_BLK, logp_BLK = random_candidates(4, 5, 4, 3)
    bonus_B = torch.arange(5)
    batched = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=11)
    for request in range(5):
        one = slice(request, request + 1)
        alone = build_tree(id_BLK[one], logp_BLK[one], bonus_B[one], num_nodes=11)
        for name in ("token_BW", "parent_BW", "depth_BW", "score_BW", "valid_BW"):
            assert torch.equal(getattr(batched, name)[one], getattr(alone, name)), name


@pytest.mark.parametrize("spine", [True, False])
@pytest.mark.parametrize(("depths", "ranks", "num_nodes"), [(1, 1, 1), (7, 16, 16), (7, 3, 33), (15, 64, 64)])
def test_triton_builds_the_same_trees(depths: int, ranks: int, num_nodes: int, spine: bool) -> None:
    id_BLK, logp_BLK = random_candidates(7, 3, depths, ranks)
    logp_BLK = (4 * logp_BLK).round() / 4  # many ties
    inputs = [tensor.to(DEVICE) for tensor in (id_BLK, logp_BLK, torch.arange(3))]
    tree = build_tree_triton(*inputs, num_nodes=num_nodes, spine=spine)
    assert_same_trees(tree, build_tree_torch(id_BLK, logp_BLK, torch.arange(3), num_nodes=num_nodes, spine=spine))


@pytest.mark.parametrize("build", [build_tree_torch, build_tree_triton])
@pytest.mark.parametrize(("depths", "ranks"), [(7, 32), (3, 6), (12, 4)])
def test_the_first_rows_of_a_tree_are_the_best_tree_of_that_width(build: Any, depths: int, ranks: int) -> None:
    id_BLK, logp_BLK = random_candidates(11, 3, depths, ranks)
    logp_BLK = (4 * logp_BLK).round() / 4  # many ties
    inputs = [tensor.to(DEVICE) for tensor in (id_BLK, logp_BLK, torch.arange(3))]
    wide = build(*inputs, num_nodes=32, spine=True)
    for width in range(2, 33):
        narrow, alone = wide.narrowed(width), build(*inputs, num_nodes=width - 1, spine=True)
        assert narrow.is_chain == (width <= depths + 1)
        assert narrow.num_spine == alone.num_spine == min(depths, width - 1)
        if narrow.is_chain:
            assert narrow.mask_BWW is None
            for name in ("parent_BW", "depth_BW"):
                assert torch.equal(
                    getattr(narrow, name), getattr(DraftTree.chain(alone.token_BW[:, 1:], alone.token_BW[:, 0]), name)
                )
            alone = dataclasses.replace(alone, mask_BWW=None)
        assert_same_trees(narrow, alone)
    assert wide.narrowed(33) is wide


@pytest.mark.parametrize("spine", [True, False])
def test_empty_batch(spine: bool) -> None:
    id_BLK, logp_BLK = random_candidates(5, 0, 3, 2)
    tree = build_tree(id_BLK, logp_BLK, torch.zeros(0, dtype=torch.int64), num_nodes=4, spine=spine)
    for name in ("token_BW", "parent_BW", "depth_BW", "score_BW", "valid_BW"):
        assert getattr(tree, name).shape == (0, 5), name


def test_traces_without_a_graph_break() -> None:
    id_BLK, logp_BLK = random_candidates(6, 3, 4, 3)
    bonus_B = torch.arange(3)
    traced = torch.compile(build_tree, fullgraph=True, backend="eager")(id_BLK, logp_BLK, bonus_B, num_nodes=8)
    plain = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=8)
    for name in ("token_BW", "parent_BW", "depth_BW", "score_BW", "valid_BW"):
        assert torch.equal(getattr(traced, name), getattr(plain, name)), name
