"""DDTREE where memory or machines are short: a pool that is too small for its requests, and three tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Prompt, generate

from .answers import count_differences
from .conftest import NEW_TOKENS, Dumped

TREE = ("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "17", "--speculative-draft-model-path")


def test_retraction_and_eviction_change_no_text(
    work: Path, target: Path, drafter: Path, dumped: Dumped, tokenizer: Any, prompts: list[Prompt]
) -> None:
    flags = [*TREE, str(drafter), "--max-total-tokens", "600", "--schedule-conservativeness", "0.05"]
    log = work / "small-pool.log"
    with Server(target, flags, log=log) as server:
        answers = generate(prompts[:12], url=server.url, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, concurrency=8)
        assert [len(answer.output_ids) for answer in answers] == [len(one.output_ids) for one in dumped.answers[:12]]
        assert count_differences(server, dumped.answers[:12], answers) <= 1
        # What did not fit was evicted or retracted; prompts that were are computed again.
        again = generate(prompts[:4], url=server.url, tokenizer=tokenizer, max_new_tokens=16, concurrency=4)
        assert count_differences(server, dumped.answers[:4], again) == 0
    assert "#retracted_reqs" in log.read_text()


def test_three_ranks_give_the_text_of_one(
    work: Path, target: Path, drafter: Path, dumped: Dumped, tokenizer: Any, prompts: list[Prompt]
) -> None:
    # The target's 9 heads can be divided by 3 alone. SGLang wants to be told where ranks run if there are more than NUMA nodes.
    env = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1|1"}
    flags = [*TREE, str(drafter), "--tp-size", "3"]
    with Server(target, flags, log=work / "ranks.log", env=env) as server:
        answers = generate(prompts[:4], url=server.url, tokenizer=tokenizer, max_new_tokens=24, concurrency=4)
        assert count_differences(server, dumped.answers[:4], answers) == 0
        assert sum(answer.meta_info["spec_verify_ct"] for answer in answers) > 0
