"""What a request may ask for beside plain greedy text, each against a server without speculation, in one mixed batch.

The reference runs without the overlap scheduler: with it, SGLang's own penalties lag a token behind.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Prompt, render

from .answers import LOGIT_NOISE
from .conftest import ArmServer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.2},
    "every penalty": {
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.05,
        "min_new_tokens": 30,
    },
    "logit bias": {"logit_bias": {"28": -5.0, "30": 2.0}},
    "regex": {"regex": r"(I|You|We) (like|want|know) [a-z ]{5,40}\."},
    "json": {"json_schema": json.dumps(PERSON)},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") ", because " [a-z ]+ "."'},
}
NUM_PROMPTS = 3
NEW_TOKENS = 40

Answers = dict[tuple[str, str], list[int]]


def ask_all(server: Server, tokenizer: Any, prompts: list[Prompt], rid: str) -> Answers:
    def ask(job: tuple[str, Prompt]) -> list[int]:
        setting, prompt = job
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **SETTINGS[setting]}
        payload = {
            "rid": f"{rid}-{setting}-{prompt.id}",
            "input_ids": render(prompt, tokenizer),
            "sampling_params": sampling,
        }
        return list(server.post("/generate", payload)["output_ids"])

    jobs = [(setting, prompt) for prompt in prompts[:NUM_PROMPTS] for setting in SETTINGS]
    with ThreadPoolExecutor(8) as pool:
        return {(setting, prompt.id): ids for (setting, prompt), ids in zip(jobs, pool.map(ask, jobs), strict=True)}


def ask_log_probs(server: Server, tokenizer: Any, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Log-probs of the answer, of the best tokens and of chosen ones, greedy requests side by side."""

    def ask(prompt: Prompt) -> dict[str, Any]:
        payload = {
            "input_ids": render(prompt, tokenizer),
            "sampling_params": {"temperature": 0, "max_new_tokens": 20},
            "return_logprob": True,
            "top_logprobs_num": 3,
            "token_ids_logprob": [28, 30],
        }
        return dict(server.post("/generate", payload)["meta_info"])

    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        return list(pool.map(ask, prompts[:NUM_PROMPTS]))


@dataclass(frozen=True)
class Reference:
    """What a server without speculation answers."""

    answers: Answers
    log_probs: list[dict[str, Any]]


@pytest.fixture(scope="session")
def expected(work: Path, target: Path, tokenizer: Any, prompts: list[Prompt]) -> Reference:
    with Server(target, ["--disable-overlap-schedule"], log=work / "plain.log") as server:
        return Reference(ask_all(server, tokenizer, prompts, "plain"), ask_log_probs(server, tokenizer, prompts))


def test_every_feature_gives_the_tokens_of_plain_decoding(
    expected: Reference, arm: ArmServer, tokenizer: Any, prompts: list[Prompt]
) -> None:
    if arm.name not in ("DFLASH", "width 17"):
        pytest.skip("one chain and one tree stand for all")
    answers, wanted = ask_all(arm.server, tokenizer, prompts, arm.name), expected.answers
    differing = [key for key in wanted if answers[key] != wanted[key]]
    for setting, name in differing:
        print(
            f"\n{setting}, {name}:\n{tokenizer.decode(wanted[setting, name])!r}\n{tokenizer.decode(answers[setting, name])!r}"
        )
    assert not differing
    greedy = {name: ids for (setting, name), ids in wanted.items() if setting == "greedy"}
    for setting in SETTINGS:
        if setting != "greedy":
            assert any(wanted[setting, name] != ids for name, ids in greedy.items()), f"{setting} changes nothing"


def test_log_probs_are_those_of_plain_decoding(
    expected: Reference, arm: ArmServer, tokenizer: Any, prompts: list[Prompt]
) -> None:
    if arm.name not in ("DFLASH", "width 17"):
        pytest.skip("one chain and one tree stand for all")
    for found, wanted in zip(ask_log_probs(arm.server, tokenizer, prompts), expected.log_probs, strict=True):
        assert found.get("spec_verify_ct", 0) > 0
        for field in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
            assert flat(found[field], 1) == flat(wanted[field], 1), field
            assert flat(found[field], 0) == pytest.approx(flat(wanted[field], 0), abs=LOGIT_NOISE), field


def flat(entries: list[Any], column: int) -> list[float]:
    """One column (0 the log-prob, 1 the token) of (log-prob, token, text) triples, alone or in lists."""
    triples = [triple for entry in entries for triple in (entry if isinstance(entry[0], list) else [entry])]
    return [triple[column] for triple in triples]
