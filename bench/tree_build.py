"""Time of building draft trees inside a CUDA graph, beside the heap on the host: ``python -m sglang_dflash.bench.tree_build``.

The heap is the usual builder of public ports: pop the best prefix, push its next sibling and its best child. Checks first that
both find prefixes of the same scores. A graph holds ``REPEATS`` builds, so that one replay is long enough to time.
"""

from __future__ import annotations

import heapq
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial

import torch
import triton

from sglang_dflash.kernels.tree_build import build_tree

BATCHES = (1, 8, 32)
NODES = (16, 32, 64)
POSITIONS = 7
VOCABULARY = 49152
REPEATS, REPLAYS = 100, 50


def candidates(batch: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, log-probabilities and bonus tokens as a drafter of middling confidence gives them."""
    generator = torch.Generator("cuda").manual_seed(batch * 100 + nodes)
    logits_BLV = 3 * torch.randn(batch, POSITIONS, VOCABULARY, device="cuda", generator=generator)
    logp_BLK, id_BLK = logits_BLV.log_softmax(-1).topk(nodes)
    return id_BLK, logp_BLK, torch.zeros(batch, dtype=torch.int64, device="cuda")


def heap(logp_LK: list[list[float]], nodes: int) -> list[float]:
    """Scores of the ``nodes`` most probable prefixes, best first."""
    found: list[float] = []
    frontier = [(-logp_LK[0][0], 0.0, 0, 0)]
    while frontier and len(found) < nodes:
        negative, parent, depth, rank = heapq.heappop(frontier)
        found.append(-negative)
        if rank + 1 < len(logp_LK[depth]):
            heapq.heappush(frontier, (-(parent + logp_LK[depth][rank + 1]), parent, depth, rank + 1))
        if depth + 1 < len(logp_LK):
            heapq.heappush(frontier, (negative - logp_LK[depth + 1][0], -negative, depth + 1, 0))
    return found


def check(batch: int, nodes: int) -> None:
    """Kernel and heap find prefixes of the same scores.

    Raises:
        RuntimeError: they do not.
    """
    id_BLK, logp_BLK, bonus_B = candidates(batch, nodes)
    score_BN = build_tree(id_BLK, logp_BLK, bonus_B, num_nodes=nodes, spine=False).score_BW[:, 1:]
    expected_BN = torch.tensor([heap(logp_LK, nodes) for logp_LK in logp_BLK.tolist()], device=score_BN.device)
    if not torch.allclose(score_BN, expected_BN, atol=1e-4):
        raise RuntimeError(f"kernel and heap differ with {batch} requests and {nodes} nodes; no time is worth printing")


def graph_us(run: Callable[[], object]) -> list[float]:
    """Microseconds of one run, one number a replay."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / REPEATS)
    return times


def heap_us(batch: int, nodes: int) -> float:
    """Microseconds of the heap for a batch on the host, without the copies to it and back."""
    rows = candidates(batch, nodes)[1].tolist()
    start = time.perf_counter()
    for logp_LK in rows:
        heap(logp_LK, nodes)
    return 1e6 * (time.perf_counter() - start)


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, commit {commit.strip()}"
    )
    print("requests  nodes   p20 us   p50 us   p80 us   heap on the host us")
    for nodes in NODES:
        for batch in BATCHES:
            check(batch, nodes)
            build = partial(build_tree, *candidates(batch, nodes), num_nodes=nodes)
            quantiles = statistics.quantiles(graph_us(build), n=10)
            p20, p50, p80 = quantiles[1], quantiles[4], quantiles[7]
            print(f"{batch:8d} {nodes:6d} {p20:8.1f} {p50:8.1f} {p80:8.1f} {heap_us(batch, nodes):21.0f}")


if __name__ == "__main__":
    main()
