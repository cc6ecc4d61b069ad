"""The target at several verify widths: attention backend, CUDA graphs and window mask of each, and what trees promise there.

SGLang sizes a verify for one width at start-up. A budget that may choose needs each width captured; SGLang's adaptive EAGLE
builds its states the same way: backend and graph runner made while the width's flag is overridden, and put into the model
runner for the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.verify import WindowMask

PROMISE_ROUNDS = 8


@dataclass(frozen=True)
class VerifyState:
    """What a verify of one width runs with.

    Attributes:
        graph_runner: None where there are no graphs.
        window_mask: None where the backend reads the tree's own mask, and for the chain, which has none.
    """

    attn_backend: Any
    graph_runner: Any
    window_mask: WindowMask | None


def build_states(model_runner: Any, widths: Sequence[int], *, chain_width: int) -> dict[int, VerifyState]:
    """States for ``widths``, whose last the model runner was started with; captures the graphs of the others."""
    states = {}
    for width in widths:
        backend, runner = model_runner.attn_backend, model_runner.decode_cuda_graph_runner
        if width != widths[-1] and runner is not None:
            with get_spec().override(speculative_num_draft_tokens=width):
                backend = model_runner._get_attention_backend(init_new_workspace=True)
                _share_kv_indices(backend, model_runner.attn_backend)
                runner = type(runner)(model_runner, attn_backend=backend, speculative_num_draft_tokens=width)
        reads_window = width > chain_width and type(backend).__name__ == "TritonAttnBackend"
        states[width] = VerifyState(backend, runner, WindowMask(backend, width) if reads_window else None)
    return states


def _share_kv_indices(backend: Any, widest: Any) -> None:
    """Let the graphs of ``backend`` read the KV indices of the widest: every round writes them before its replay."""
    indices = getattr(widest, "cuda_graph_kv_indices", None)
    if isinstance(indices, torch.Tensor):
        backend.init_cuda_graph_state = partial(backend.init_cuda_graph_state, kv_indices_buf=indices)


@contextmanager
def installed(model_runner: Any, state: VerifyState) -> Iterator[None]:
    """The model runner verifies with ``state`` inside, and is as it was outside."""
    kept = model_runner.attn_backend, model_runner.decode_cuda_graph_runner
    model_runner.attn_backend, model_runner.decode_cuda_graph_runner = state.attn_backend, state.graph_runner
    try:
        yield
    finally:
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = kept


class Promise:
    """What trees promise to emit at every width, brought to the host without waiting for the device.

    One round in ``PROMISE_ROUNDS`` is asked; the answer is read when the next one is, long after it has arrived. So every rank
    reads the same answer in the same round.
    """

    def __init__(self, widths: Sequence[int], device: torch.device | str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._last_row_M = torch.tensor(widths, device=device) - 1
        self._host_M = torch.empty(len(widths), pin_memory=self._is_cuda)
        self._arrived = torch.cuda.Event() if self._is_cuda else None
        self._rounds = 0

    def next(self, tree: DraftTree) -> list[float] | None:
        """Ask ``tree`` if it is a round's turn, and return the previous answer then; None in other rounds."""
        turn, self._rounds = self._rounds, self._rounds + 1
        if turn % PROMISE_ROUNDS:
            return None
        if self._arrived is not None and turn:
            self._arrived.synchronize()
        answer = self._host_M.tolist() if turn else None
        self._host_M.copy_(promised_tokens(tree, self._last_row_M), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return answer


def promised_tokens(tree: DraftTree, last_row_M: torch.Tensor) -> torch.Tensor:
    """Expected tokens of a round, bonus included, if rows up to each of ``last_row_M`` are verified: fp32, mean over requests.

    A row's score is the log-probability that its whole prefix is accepted, under the drafter's marginals.
    """
    return tree.score_BW.exp().cumsum(dim=1)[:, last_row_M].mean(dim=0)
