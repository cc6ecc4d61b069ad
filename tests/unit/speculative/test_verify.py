from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.kernels.tree_mask import ancestor_mask, write_window_mask_reference
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.verify import TreeVerifyInput, WindowMask, grammar_links, tree_verify_input

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARENTS = torch.tensor([[-1, 0, 1, 0, 3], [-1, 0, 0, 0, -1], [-1, 0, 1, 2, 3]], device=DEVICE)
CONTEXT = torch.tensor([3, 0, 7], device=DEVICE)
SIZE = 5 * (10 + 5 * 3)


def captured_mask(max_bs: int) -> SimpleNamespace:
    buffer = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    return SimpleNamespace(buffer=buffer, fits=lambda bs: bs <= max_bs)


def expected_mask() -> torch.Tensor:
    expected = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE)
    write_window_mask_reference(expected, ancestor_mask(PARENTS), CONTEXT)
    return expected


def test_a_captured_batch_is_masked_in_the_buffer_of_the_graphs() -> None:
    mask = captured_mask(3)
    window = WindowMask(SimpleNamespace(verify_mask=mask), 5)
    given = window.write(ancestor_mask(PARENTS), CONTEXT, CONTEXT.cpu())
    assert given.data_ptr() == mask.buffer.data_ptr() and given.shape == (1,)
    assert torch.equal(mask.buffer, expected_mask())


def test_a_larger_batch_has_a_buffer_of_its_own_that_grows() -> None:
    for captured in (captured_mask(2), None):
        window = WindowMask(SimpleNamespace(verify_mask=captured), 5)
        # The host's lengths may run ahead of the device's.
        given = window.write(ancestor_mask(PARENTS), CONTEXT, CONTEXT.cpu() + 4)
        whole = torch.as_strided(given, (SIZE,), (1,))
        assert torch.equal(whole, expected_mask())
        assert captured is None or not captured.buffer.any()
        small = window.write(ancestor_mask(PARENTS), CONTEXT // 2, CONTEXT.cpu() // 2)
        assert small.data_ptr() == given.data_ptr()
        assert window.write(ancestor_mask(PARENTS), CONTEXT, CONTEXT.cpu() + 400).data_ptr() != given.data_ptr()


def test_rows_are_verified_at_their_depth() -> None:
    depth_BW = torch.tensor([[0, 1, 2, 1, 2]])
    tree = DraftTree(
        token_BW=torch.arange(5)[None],
        parent_BW=PARENTS[:1].cpu(),
        depth_BW=depth_BW,
        score_BW=torch.zeros(1, 5),
        valid_BW=torch.ones(1, 5, dtype=torch.bool),
        mask_BWW=ancestor_mask(PARENTS[:1].cpu()),
    )
    verify = tree_verify_input(tree, torch.tensor([9]))
    assert verify.positions.tolist() == [9, 10, 11, 10, 11]
    assert verify.draft_token.tolist() == [0, 1, 2, 3, 4] and verify.draft_token_num == 5
    assert verify.custom_mask is None and verify.tree_mask_BWW is tree.mask_BWW


def walk(child_W: list[int], sibling_W: list[int], row: int = 0) -> list[tuple[int, int]]:
    """(parent, row) of every row below ``row``, as SGLang's traversal meets them."""
    found, node = [], child_W[row]
    while node != -1:
        found += [(row, node), *walk(child_W, sibling_W, node)]
        node = sibling_W[node]
    return found


def test_a_grammar_walks_every_row_of_the_tree_and_no_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    logp_BLK, id_BLK = torch.randn(20, 4, 9, generator=generator).log_softmax(-1).topk(3)
    logp_BLK[10:, 2:] = -torch.inf  # too few prefixes for the tree
    tree = build_tree(id_BLK, logp_BLK, torch.zeros(20, dtype=torch.int64), num_nodes=14)
    child_BW, sibling_BW, token_BW = grammar_links(tree).resolve()
    assert torch.equal(token_BW, tree.token_BW)
    for request in range(20):
        expected = [(int(tree.parent_BW[request, row]), row) for row in range(1, 15) if tree.valid_BW[request, row]]
        assert sorted(walk(child_BW[request].tolist(), sibling_BW[request].tolist())) == sorted(expected)
        assert sibling_BW[request, 0] == -1
    assert not tree.valid_BW.all()


def test_a_chain_is_walked_to_its_end() -> None:
    chain = DraftTree.chain(torch.tensor([[4, 4, 2]]), torch.tensor([4]))
    child_BW, sibling_BW, _ = grammar_links(chain).resolve()
    assert child_BW.tolist() == [[1, 2, 3, -1]] and sibling_BW.tolist() == [[-1] * 4]


def test_flashinfer_reads_the_context_too_and_requests_that_pad_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def stock(self: Any, **arguments: Any) -> tuple[torch.Tensor, ...]:
        asked.update(arguments)
        return (torch.zeros(1, device=DEVICE), torch.ones(1), torch.full((1,), 2.0), None)

    monkeypatch.setattr(DFlashVerifyInput, "generate_attn_arg_prefill", stock)
    verify = TreeVerifyInput(
        draft_token=torch.zeros(15), positions=torch.zeros(15), draft_token_num=5, tree_mask_BWW=ancestor_mask(PARENTS)
    )
    lens = torch.tensor([3, 0, 7, 1], device=DEVICE)
    indices, indptr, query_indptr, sees = verify.generate_attn_arg_prefill(
        req_pool_indices=torch.zeros(4), paged_kernel_lens=lens, paged_kernel_lens_sum=14, plan="the plan"
    )
    assert asked["plan"] == "the plan" and asked["paged_kernel_lens"] is lens
    assert (indices.item(), indptr.item(), query_indptr.item()) == (0, 1, 2)
    expected = torch.ones(5 * (14 + 5 * 4), dtype=torch.uint8, device=DEVICE)
    write_window_mask_reference(expected, ancestor_mask(PARENTS), CONTEXT)
    assert sees is not None and torch.equal(sees.view(torch.uint8), expected)


def test_flashinfer_is_given_no_mask_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFlashVerifyInput, "generate_attn_arg_prefill", lambda self, **_: (1, 2, 3, None))
    verify = TreeVerifyInput(draft_token=torch.zeros(5), positions=torch.zeros(5), draft_token_num=5)
    arguments = verify.generate_attn_arg_prefill(
        req_pool_indices=torch.zeros(1), paged_kernel_lens=torch.zeros(1), paged_kernel_lens_sum=0
    )
    assert arguments == (1, 2, 3, None)
