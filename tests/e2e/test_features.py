"""What a request may ask for beside plain greedy text, each against a server without speculation, in one mixed batch.

The reference runs without the overlap scheduler: with it, SGLang's own penalties lag a token behind.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Prompt, render

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


@pytest.fixture(scope="session")
def expected(work: Path, target: Path, tokenizer: Any, prompts: list[Prompt]) -> Answers:
    with Server(target, ["--disable-overlap-schedule"], log=work / "plain.log") as server:
        return ask_all(server, tokenizer, prompts, "plain")


def test_every_feature_gives_the_tokens_of_plain_decoding(
    expected: Answers, arm: ArmServer, tokenizer: Any, prompts: list[Prompt]
) -> None:
    if arm.name not in ("DFLASH", "width 17"):
        pytest.skip("one chain and one tree stand for all")
    answers = ask_all(arm.server, tokenizer, prompts, arm.name)
    differing = [key for key in expected if answers[key] != expected[key]]
    for setting, name in differing:
        print(
            f"\n{setting}, {name}:\n{tokenizer.decode(expected[setting, name])!r}\n{tokenizer.decode(answers[setting, name])!r}"
        )
    assert not differing
    greedy = {name: ids for (setting, name), ids in expected.items() if setting == "greedy"}
    for setting in SETTINGS:
        if setting != "greedy":
            assert any(expected[setting, name] != ids for name, ids in greedy.items()), f"{setting} changes nothing"
