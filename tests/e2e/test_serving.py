"""Greedy output against autoregressive decoding, and what a server's users do to it, with a real drafter."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_dflash.dump.generate import GenerationError, Prompt, render

from .answers import LOGIT_NOISE, count_differences
from .conftest import ARMS, ArmServer, Dumped

_CHAIN: dict[str, list[int]] = {}


def test_same_tokens_as_autoregressive(arm: ArmServer, dumped: Dumped) -> None:
    assert [len(answer.output_ids) for answer in arm.answers] == [len(answer.output_ids) for answer in dumped.answers]
    differing = count_differences(arm.server, dumped.answers, arm.answers)
    print(f"\n{arm.name}: {differing} of {len(arm.answers)} answers differ from autoregressive decoding")
    assert differing <= len(arm.answers) // 10


def test_drafts_are_accepted_and_counted(arm: ArmServer) -> None:
    meta = [answer.meta_info for answer in arm.answers]
    steps = sum(info["spec_verify_ct"] for info in meta)
    accepted = sum(info["spec_num_correct_drafts"] for info in meta)
    tokens = sum(len(answer.output_ids) for answer in arm.answers)
    print(f"\n{arm.name}: tau {1 + accepted / steps:.2f}")
    assert accepted > 0
    # Every token but the prefill's is a bonus or an accepted draft; the last round may be cut short.
    assert tokens - len(meta) <= accepted + steps
    for info in meta:
        if "spec_verify_ct" in info:  # an answer of one token has no round
            by_length = info["spec_correct_drafts_histogram"]
            assert sum(by_length) == info["spec_verify_ct"]
            assert sum(length * rounds for length, rounds in enumerate(by_length)) == info["spec_num_correct_drafts"]


def test_rounds_and_drafts_are_counted(arm: ArmServer) -> None:
    if "--enable-metrics" not in ARMS[arm.name][0]:
        pytest.skip("this arm counts nothing")
    with urllib.request.urlopen(arm.server.url + "/metrics", timeout=10) as response:
        counted = [line for line in response.read().decode().splitlines() if line.startswith("sglang:dflash_")]
    rounds = {
        int(line.split('width="')[1].split('"')[0]): float(line.split()[-1])
        for line in counted
        if line.startswith("sglang:dflash_rounds_total{")
    }
    [proposed] = [
        float(line.split()[-1]) for line in counted if line.startswith("sglang:dflash_proposed_drafts_total{")
    ]
    of_requests = sum(answer.meta_info["spec_num_proposed_drafts"] for answer in arm.answers)
    assert of_requests <= proposed
    assert of_requests == sum(
        drafts * rounds
        for answer in arm.answers
        for drafts, rounds in enumerate(answer.meta_info["spec_cap_lens_histogram"])
    )
    [accepted] = [float(line.split()[-1]) for line in counted if line.startswith("sglang:dflash_accepted_drafts_sum{")]
    print(f"\n{arm.name}: rounds by width {rounds}, {proposed} drafts proposed, {accepted} accepted")
    assert set(rounds) <= {8, 17, 33}
    steps = sum(answer.meta_info["spec_verify_ct"] for answer in arm.answers)
    assert accepted >= sum(answer.meta_info["spec_num_correct_drafts"] for answer in arm.answers)
    assert 7 * steps <= proposed
    assert sum(rounds.values()) <= steps + 8


def test_one_branch_is_the_chain(arm: ArmServer) -> None:
    ids = {answer.id: answer.output_ids for answer in arm.answers}
    if arm.name == "DFLASH":
        _CHAIN.update(ids)
        assert len(_CHAIN) == len(arm.answers)
    elif arm.name == "one branch":
        assert ids == _CHAIN
    else:
        pytest.skip("compares the two chains")


def test_mixed_lengths_stops_and_aborts(arm: ArmServer, tokenizer: Any, prompts: list[Prompt]) -> None:
    if arm.name != "width 17":
        pytest.skip("the default width stands for all")

    def ask(number: int, rid: str) -> tuple[list[int], Any]:
        payload = {
            "rid": f"{rid}-{number}",
            "input_ids": render(prompts[number], tokenizer),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 7 + 9 * number,
                "stop": ["the", "return"][number % 2],
            },
        }
        reply = arm.server.post("/generate", payload)
        return reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]

    alone = [ask(number, "alone") for number in range(8)]
    with ThreadPoolExecutor(12) as pool:
        endless = [pool.submit(_endless, arm, f"abort-{number}", tokenizer, prompts[number]) for number in range(4)]
        together = list(pool.map(lambda number: ask(number, "together"), range(8)))
        for number in range(4):
            arm.server.post_text("/abort_request", {"rid": f"abort-{number}"})
        for future in endless:
            assert future.result() in ("abort", "length", "stop")
    assert together == alone
    assert {"stop", "length"} <= {reason for _, reason in alone}
    _pool_is_empty(arm)


def _endless(arm: ArmServer, rid: str, tokenizer: Any, prompt: Prompt) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}
    reply = arm.server.post(
        "/generate", {"rid": rid, "input_ids": render(prompt, tokenizer), "sampling_params": sampling}
    )
    return str(reply["meta_info"]["finish_reason"]["type"])


def _pool_is_empty(arm: ArmServer) -> None:
    """Flushing succeeds only when nothing runs; SGLang's idle check ends the server when slots are unaccounted for."""
    time.sleep(2)
    arm.server.post_text("/flush_cache")
    time.sleep(2)
    assert arm.server.healthy()
    log = arm.server.log.read_text(errors="replace")
    assert "leak" not in log, arm.server.log_tail()
    assert "Traceback" not in log, arm.server.log_tail()


def test_sampling_and_logprobs(arm: ArmServer, tokenizer: Any, prompts: list[Prompt]) -> None:
    if arm.name != "width 17":
        pytest.skip("the default width stands for all")
    sampled = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "max_new_tokens": 24}
    ids = render(prompts[0], tokenizer)
    reply = arm.server.post("/generate", {"input_ids": ids, "sampling_params": sampled})
    assert 0 < len(reply["output_ids"]) <= 24
    greedy = {"temperature": 0, "max_new_tokens": 12}
    reply = arm.server.post("/generate", {"input_ids": ids, "sampling_params": greedy, "return_logprob": True})
    logprobs = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, *_ in logprobs] == reply["output_ids"]
    # The same answer as a prompt: the target scores every position in one forward.
    scored = arm.server.post(
        "/generate",
        {
            "input_ids": ids + reply["output_ids"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )["meta_info"]["input_token_logprobs"][len(ids) :]
    for (value, token, *_), (expected, expected_token, *_) in zip(logprobs, scored, strict=True):
        assert token == expected_token
        assert value == pytest.approx(expected, abs=LOGIT_NOISE)


def test_refuses_what_it_cannot_serve_exactly(arm: ArmServer, tokenizer: Any, prompts: list[Prompt]) -> None:
    if arm.name not in ("DFLASH", "width 17"):
        pytest.skip("one chain and one tree stand for all")
    sampling = {"temperature": 0, "max_new_tokens": 4}
    ids = render(prompts[0], tokenizer)
    with pytest.raises(GenerationError, match=r"beam_width=1 is not served"):
        arm.server.post("/generate", {"input_ids": ids, "sampling_params": {**sampling, "beam_width": 1}})
    # Without deterministic inference SGLang ignores a seed; so does this worker.
    seeded = arm.server.post("/generate", {"input_ids": ids, "sampling_params": {**sampling, "sampling_seed": 1}})
    plain = arm.server.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert seeded["output_ids"] == plain["output_ids"]
