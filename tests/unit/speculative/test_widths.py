from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.kernels.tree_build import build_tree
from sglang_dflash.speculative import widths
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.widths import PROMISE_ROUNDS, Promise, build_states, installed, promised_tokens


def tree_of(probability: float, batch: int = 2) -> DraftTree:
    """Two positions, each with a token of this probability and one of half of it."""
    logp_BLK = torch.tensor([[probability, probability / 2]] * 2).log().expand(batch, 2, 2)
    id_BLK = torch.tensor([[1, 2], [3, 4]]).expand(batch, 2, 2)
    return build_tree(id_BLK, logp_BLK, torch.zeros(batch, dtype=torch.int64), num_nodes=6)


def test_promised_tokens_are_the_bonus_and_the_probability_of_every_prefix() -> None:
    promised_M = promised_tokens(tree_of(0.6), torch.tensor([2, 3, 6]))
    spine = 0.6 + 0.6 * 0.6
    assert promised_M.tolist() == pytest.approx([1 + spine, 1 + spine + 0.3, 1 + spine + 0.3 + 2 * 0.18 + 0.09])


def test_padding_promises_nothing() -> None:
    tree = build_tree(torch.tensor([[[1]]]), torch.tensor([[[math.log(0.5)]]]), torch.tensor([0]), num_nodes=4)
    assert promised_tokens(tree, torch.tensor([1, 4])).tolist() == pytest.approx([1.5, 1.5])


def test_a_promise_is_read_when_the_next_is_asked() -> None:
    promise = Promise((3, 4), "cpu")
    answers = [promise.next(tree_of(0.5 + turn / 100)) for turn in range(2 * PROMISE_ROUNDS + 1)]
    assert [turn for turn, answer in enumerate(answers) if answer is not None] == [PROMISE_ROUNDS, 2 * PROMISE_ROUNDS]
    assert answers[PROMISE_ROUNDS] == pytest.approx(promised_tokens(tree_of(0.5), torch.tensor([2, 3])).tolist())


def test_without_graphs_every_width_verifies_with_the_one_backend() -> None:
    runner = SimpleNamespace(attn_backend=object(), decode_cuda_graph_runner=None)
    states = build_states(runner, (8, 17), chain_width=8)
    assert [state.attn_backend for state in states.values()] == [runner.attn_backend] * 2
    assert all(state.graph_runner is None and state.window_mask is None for state in states.values())


class GraphBackend:
    """What ``build_states`` uses of SGLang's Triton backend."""

    cuda_graph_kv_indices: torch.Tensor

    def init_cuda_graph_state(self, rows: int, kv_indices_buf: torch.Tensor | None = None) -> None:
        self.cuda_graph_kv_indices = torch.zeros(rows) if kv_indices_buf is None else kv_indices_buf


class GraphRunner:
    """Captures as SGLang's graph runner does: it asks the backend for its buffers first."""

    def __init__(self, runner: object, attn_backend: GraphBackend, speculative_num_draft_tokens: int) -> None:
        attn_backend.init_cuda_graph_state(10 * speculative_num_draft_tokens)


def test_graphs_of_every_width_read_the_widest_ones_kv_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "get_spec", lambda: SimpleNamespace(override=lambda **flags: nullcontext()))
    widest = GraphBackend()
    runner = SimpleNamespace(
        attn_backend=widest,
        decode_cuda_graph_runner=GraphRunner(None, widest, 33),
        _get_attention_backend=lambda init_new_workspace: GraphBackend(),
    )
    states = build_states(runner, (8, 17, 33), chain_width=8)
    backends = [state.attn_backend for state in states.values()]
    assert len(set(map(id, backends))) == 3
    assert all(backend.cuda_graph_kv_indices is widest.cuda_graph_kv_indices for backend in backends)
    assert len(widest.cuda_graph_kv_indices) == 330


def test_a_state_is_installed_for_one_forward() -> None:
    runner = SimpleNamespace(attn_backend="old", decode_cuda_graph_runner="graphs")
    state = SimpleNamespace(attn_backend="new", graph_runner=None)
    with pytest.raises(KeyError), installed(runner, state):  # type: ignore[arg-type]
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("new", None)
        raise KeyError
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("old", "graphs")
