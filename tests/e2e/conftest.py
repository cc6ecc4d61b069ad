"""One small pipeline shared by all end-to-end tests: the real target, its dumped answers, a drafter trained for a minute.

Servers are expensive (about 45 s on two cores), so each arm is started once and asked everything that its tests need.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sglang_dflash.models
from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Generation, Prompt, generate, load_prompts
from sglang_dflash.models.smollm2 import prepare_target

LAYER_IDS = (1, 8, 14, 21, 27)
MASK_TOKEN_ID = 16
NUM_PROMPTS = 32
NEW_TOKENS = 96


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def target() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-dflash" / "demo"
    return prepare_target(cache, progress=False)


@pytest.fixture(scope="session")
def tokenizer(target: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    every = load_prompts(Path(sglang_dflash.models.__path__[0]) / "prompts.jsonl")
    return every[::4][:NUM_PROMPTS]


@dataclass(frozen=True)
class Dumped:
    """What the capturing server left: its dump and its (autoregressive) answers."""

    folder: Path
    answers: list[Generation]


@pytest.fixture(scope="session")
def dumped(work: Path, target: Path, tokenizer: Any, prompts: list[Prompt]) -> Dumped:
    folder = work / "dump"
    flags = ["--speculative-algorithm", "DFLASH", "--enable-return-aux-hidden-states"]
    flags += ["--return-aux-hidden-state-layer-ids", *map(str, LAYER_IDS), "--chunked-prefill-size", "33"]
    with Server(target, flags, log=work / "capture.log", env={"SGLANG_DFLASH_PLUGIN_DUMP_DIR": str(folder)}) as server:
        answers = generate(
            prompts, url=server.url, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, concurrency=8, rid_prefix="first-"
        )
        # The same prompts again hit the radix cache: their prompt rows are not computed a second time.
        again = generate(
            prompts[:4], url=server.url, tokenizer=tokenizer, max_new_tokens=4, concurrency=4, rid_prefix="again-"
        )
        assert all(generation.meta_info["cached_tokens"] > 0 for generation in again)
        time.sleep(3)
    return Dumped(folder, answers)


@pytest.fixture(scope="session")
def drafter(work: Path, target: Path, dumped: Dumped) -> Path:
    from sglang_dflash.train.config import load_config
    from sglang_dflash.train.loop import train

    settings = [
        f"data.dump={dumped.folder}",
        f"data.target={target}",
        "data.anchors_per_sample=16",
        "data.holdout_fraction=0",
        f"model.mask_token_id={MASK_TOKEN_ID}",
        "objective.sampled_vocab=1024",
        "optim.lr=3e-3",
        "loop.samples_per_batch=4",
        "loop.epochs=200",
        "loop.max_minutes=1.5",
        f"output={work / 'run'}",
    ]
    return train(load_config(None, settings), progress=False).drafter


FIXED = {"SGLANG_DFLASH_PLUGIN_BUDGET": "fixed"}
WIDTH_5 = ("--speculative-num-draft-tokens", "5", "--page-size", "64")
WIDTH_33 = ("--speculative-num-draft-tokens", "33", "--page-size", "16")
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "DFLASH": (("--speculative-algorithm", "DFLASH"), {}),
    "one branch": (
        ("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", "8"),
        {"SGLANG_DFLASH_PLUGIN_TREE_TOPK": "1"},
    ),
    "width 5": (("--speculative-algorithm", "DDTREE", *WIDTH_5), {}),
    "width 17": (("--speculative-algorithm", "DDTREE"), FIXED),
    "width 33": (("--speculative-algorithm", "DDTREE", *WIDTH_33), FIXED),
    "up to 33": (("--speculative-algorithm", "DDTREE", *WIDTH_33, "--enable-metrics"), {}),
}


@dataclass(frozen=True)
class ArmServer:
    """A running arm and its answers to the shared prompts."""

    name: str
    server: Server
    answers: list[Generation]


@pytest.fixture(scope="session", params=list(ARMS))
def arm(
    request: pytest.FixtureRequest, work: Path, target: Path, drafter: Path, tokenizer: Any, prompts: list[Prompt]
) -> Iterator[ArmServer]:
    flags, env = ARMS[request.param]
    flags = (*flags, "--speculative-draft-model-path", str(drafter))
    log = work / f"{request.param.replace(' ', '-')}.log"
    with Server(target, flags, log=log, env=env) as server:
        answers = generate(prompts, url=server.url, tokenizer=tokenizer, max_new_tokens=NEW_TOKENS, concurrency=8)
        yield ArmServer(request.param, server, answers)
