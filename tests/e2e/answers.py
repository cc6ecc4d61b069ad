"""Comparing answers with autoregressive ones.

A token may differ only where the target's two best log-probabilities are closer than the noise of its fp32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dflash.bench.compare import first_difference
from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Generation

# Log-probability noise of two fp32 forwards with different row counts; see LOG.md.
LOGIT_NOISE = 1e-3


def count_differences(server: Server, expected: Sequence[Generation], answers: Sequence[Generation]) -> int:
    """How many answers leave the expected ones, after checking that each does so at a tie.

    Answers may be shorter than what is expected of them: then their length is compared.

    Raises:
        AssertionError: one differs where the target is not undecided.
    """
    differing = 0
    for whole, answer in zip(expected, answers, strict=True):
        wanted = whole.output_ids[: len(answer.output_ids)]
        position = first_difference(wanted, answer.output_ids)
        if position is not None:
            differing += 1
            gap = _gap(server, whole.input_ids + wanted[:position])
            assert gap < LOGIT_NOISE, f"{answer.id} differs at {position}, where the gap is {gap:.1e}"
    return differing


def _gap(server: Server, ids: list[int]) -> float:
    reply = server.post(
        "/generate",
        {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    )
    best = reply["meta_info"]["output_top_logprobs"][0]
    return float(best[0][0] - best[1][0])
