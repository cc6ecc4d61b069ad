"""What a round costs on the device, measured at start-up with made-up requests over the padding slot.

Every round of a width is drafted, built, verified, accepted and committed as in serving, with the same CUDA graphs. The requests
are row 0 of the request table, whose slots SGLang keeps for padding, so nothing that is written there is ever read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.speculative.budget import StepCosts
from sglang_dflash.speculative.widths import installed

if TYPE_CHECKING:
    from sglang_dflash.speculative.worker import TreeWorker

SHORT_CONTEXT, LONG_CONTEXT = 64, 4096
CPU_BATCHES, CPU_LONG_CONTEXT = (1, 8), 512
CUDA_RUNS, CPU_RUNS = 5, 1
SLEEP_CYCLES = 20_000_000


def measure_costs(worker: TreeWorker, widths: Sequence[int]) -> StepCosts:
    """The table of step costs at ``widths``: by batch size, with a short and a long context."""
    is_cuda = torch.device(worker.device).type == "cuda"
    batches = CPU_BATCHES
    if is_cuda:
        captured = get_exec().graph.cuda_graph_config.decode.bs
        batches = tuple(sorted(batch for batch in captured if batch & (batch - 1) == 0 or batch == max(captured)))
    most = worker.model_runner.model_config.context_len - 2 * max(worker.width, worker.block_size)
    long = min(LONG_CONTEXT if is_cuda else CPU_LONG_CONTEXT, most)
    short = min(SHORT_CONTEXT, long - 1)
    base, slope = {}, {}
    for width in widths:
        near = [_round_ms(worker, width, batch, short) for batch in batches]
        far = [_round_ms(worker, width, batch, long) for batch in batches]
        base[width] = tuple(near)
        slope[width] = tuple(
            max(0.0, there - here) / (batch * (long - short))
            for here, there, batch in zip(near, far, batches, strict=True)
        )
    return StepCosts(batches, base, slope)


def _round_ms(worker: TreeWorker, width: int, batch: int, context: int) -> float:
    device = torch.device(worker.device)
    nothing_B = torch.zeros(batch, dtype=torch.int64, device=device)
    context_len_cpu_B = torch.full((batch,), context, dtype=torch.int64)
    window = worker.open_window(nothing_B, nothing_B, context_len_cpu_B.to(device), context_len_cpu_B)

    def run() -> None:
        tree = worker.draft_trees(window).narrowed(width)
        verify_input = worker.verify_input(tree, window)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch,
            input_ids=verify_input.draft_token,
            req_pool_indices=window.pool_index_B,
            seq_lens=window.context_len_B,
            out_cache_loc=window.rows.slot_BS[:, :width].reshape(-1),
            seq_lens_sum=batch * (context + width),
            seq_lens_cpu=window.context_len_cpu_B + width,
            positions=verify_input.positions,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=verify_input,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        verify_input.kv_loc_plan.bind(forward_batch, worker.model_runner.kv_index_translator)
        with torch.inference_mode(), installed(worker.model_runner, worker.states[width]):
            worker.model_runner.forward(forward_batch)

    return device_ms(run, device, runs=CUDA_RUNS if device.type == "cuda" else CPU_RUNS)


def device_ms(run: Callable[[], object], device: torch.device | str, *, runs: int) -> float:
    """Milliseconds of the fastest of ``runs`` runs, after one that is not counted: the device's, without the host's gaps."""
    if torch.device(device).type != "cuda":
        times = []
        for _ in range(runs + 1):
            start = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - start))
        return min(times[1:])
    run()
    torch.cuda.synchronize()
    # Behind this everything is queued before it starts, so the host's own time does not show.
    torch.cuda._sleep(SLEEP_CYCLES * runs)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return min(one.elapsed_time(other) for one, other in pairwise(marks))
