"""What a worker says once, when it is ready to serve: effective options, step costs, and the memory that trees take."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_dflash.speculative.budget import StepCosts
from sglang_dflash.speculative.tree import DraftTree
from sglang_dflash.speculative.widths import VerifyState

if TYPE_CHECKING:
    from sglang_dflash.speculative.worker import TreeWorker

logger = logging.getLogger(__name__)


class Buffer(NamedTuple):
    """Device memory of a purpose; ``formula`` is its size in bytes."""

    name: str
    formula: str
    num_bytes: int


def log_start(worker: TreeWorker, costs: StepCosts | None) -> None:
    """One line of options; then step costs and buffers, where there are any."""
    widths = sorted(worker.states)
    logger.info(
        "%s: verify widths %s (%s), draft block %d, %d candidates a position, attention backend %s, CUDA graphs %s",
        "DDTREE" if worker.is_tree else "DFLASH",
        " ".join(map(str, widths)),
        "fixed" if costs is None else "chosen in each round",
        worker.block_size,
        worker.tree_topk,
        type(worker.model_runner.attn_backend).__name__,
        "on" if worker.states[widths[-1]].graph_runner is not None else "off",
    )
    if costs is not None:
        logger.info("DDTREE: device time of a round in ms: %s", describe_costs(costs))
    for buffer in list_buffers(worker.tree_storage, worker.states):
        logger.info("DDTREE: buffer %s: %s = %.1f MiB", buffer.name, buffer.formula, buffer.num_bytes / 2**20)


def describe_costs(costs: StepCosts) -> str:
    """The table as text: by width, one number a batch size."""
    rows = [f"width {width} {' '.join(f'{ms:.2f}' for ms in row)}" for width, row in sorted(costs.base_ms.items())]
    return f"{'; '.join(rows)}, with {', '.join(map(str, costs.batches))} requests"


def list_buffers(storage: DraftTree | None, states: Mapping[int, VerifyState]) -> list[Buffer]:
    """What grows with the widths: our trees, and what SGLang allocates for each width and for all."""
    buffers = []
    if storage is not None:
        num_bytes = sum(tensor.nbytes for tensor in storage.tensors())
        buffers.append(Buffer("trees", "requests x width x (29 + width)", num_bytes))
    widest = states[max(states)]
    indices = getattr(widest.attn_backend, "cuda_graph_kv_indices", None)
    buffers += _buffer("KV indices, all widths", "requests x widest x context x 8", indices)
    for width, state in sorted(states.items()):
        backend = state.attn_backend
        mask = getattr(backend, "verify_mask", None)
        for name, formula, tensor in (
            ("window mask", "requests x width x (context + width)", getattr(mask, "buffer", None)),
            (
                "attention partials",
                "requests x width x heads x KV splits x head size x 4",
                getattr(backend, "cuda_graph_attn_logits", None),
            ),
        ):
            buffers += _buffer(f"{name}, width {width}", formula, tensor)
    runner: Any = widest.graph_runner
    static = getattr(runner, "buffers", None)
    logits = getattr(static, "next_token_logits_buffer", None)
    buffers += _buffer("logits, all widths", "requests x widest x vocabulary x 4", logits)
    taps = getattr(static, "aux_hidden_states", None)
    return buffers + _buffer("taps, all widths", "requests x widest x taps x hidden x 2", taps)


def _buffer(name: str, formula: str, tensor: torch.Tensor | None) -> list[Buffer]:
    return [Buffer(name, formula, tensor.nbytes)] if isinstance(tensor, torch.Tensor) else []
