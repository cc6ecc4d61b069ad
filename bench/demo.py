"""The demo: a real model, its own data, a drafter trained on it, and a table that says whether it pays. No GPU.

Steps, each kept in the work folder and reused by a second run: the target as a Hugging Face folder; its answers to the shipped
prompts with the dump on; a drafter trained for minutes; the same and unseen prompts served autoregressively, with DFLASH and with
DDTREE. A step is reused only when the fingerprint of its inputs is the one that it was made with.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang_dflash.models
from sglang_dflash.bench.compare import compare_arms
from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Prompt, generate, load_prompts
from sglang_dflash.files import write_text
from sglang_dflash.models.smollm2 import prepare_target

LAYER_IDS = (1, 8, 14, 21, 27)
# `<empty_output>` of SmolLM2's tokenizer, which no text contains.
MASK_TOKEN_ID = 16
ANSWER_TOKENS = 64
CONCURRENCY = 8
WIDTH = 17
RECIPE = (
    f"model.mask_token_id={MASK_TOKEN_ID}",
    "model.num_hidden_layers=2",
    "model.block_size=8",
    "model.init=target",
    "data.anchors_per_sample=16",
    "data.holdout_fraction=0",
    "objective.sampled_vocab=1024",
    "optim.lr=3e-3",
    "loop.samples_per_batch=4",
    "loop.epochs=200",
    "loop.max_minutes=2.5",
)


def run_demo(work_dir: Path, *, fresh: bool = False) -> None:
    """Run what is not there yet and print the table.

    Args:
        fresh: throw away what an earlier run made.
    """
    if fresh and work_dir.exists():
        shutil.rmtree(work_dir)
    work_dir.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(Path(sglang_dflash.models.__path__[0]) / "prompts.jsonl")
    # Two cores answer about one prompt in two seconds: three of four keep the whole demo under fifteen minutes.
    answered = [p for number, p in enumerate(p for p in prompts if p.split == "train") if number % 4]
    unseen = [p for p in prompts if p.split == "held_out"]
    started = time.monotonic()
    print("1/4 The target: SmolLM2-135M-Instruct as a Hugging Face folder")
    target = prepare_target(work_dir)
    print(f"2/4 Its answers to {len(answered)} prompts, with the dump on")
    answers = {"prompts": [prompt.id for prompt in answered], "tokens": ANSWER_TOKENS, "layers": LAYER_IDS}
    dump = _step(work_dir / "dump", answers, lambda folder: _dump(folder, target, answered))
    print("3/4 A drafter, trained on what the target computed")
    recipe = {"recipe": RECIPE, "dump": answers}
    drafter = _step(work_dir / "drafter", recipe, lambda folder: _train(folder, target, dump)) / "drafter"
    print("4/4 The same prompts and unseen ones: autoregressive, DFLASH, DDTREE")
    served = {"seen in training": answered[::6], "held out": unseen[::4]}
    print(_compare(work_dir / "compare", target, drafter, served))
    print(f"Done in {(time.monotonic() - started) / 60:.1f} minutes; everything is in {work_dir}.")


def _step(folder: Path, inputs: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """``folder`` as ``make`` left it, made only where it is missing or was made from other inputs."""
    mark = folder / "inputs.json"
    wanted = json.dumps(inputs, indent=1)
    if mark.is_file() and mark.read_text() == wanted:
        print(f"    reused from {folder}")
        return folder
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    make(folder)
    write_text(mark, wanted)
    return folder


def _dump(folder: Path, target: Path, prompts: list[Prompt]) -> None:
    from transformers import AutoTokenizer

    from sglang_dflash.dump.reader import DumpReader
    from sglang_dflash.dump.record import DumpError

    flags = [
        "--speculative-algorithm",
        "DFLASH",
        "--enable-return-aux-hidden-states",
        "--return-aux-hidden-state-layer-ids",
    ]
    flags += [str(layer) for layer in LAYER_IDS]
    env = {"SGLANG_DFLASH_PLUGIN_DUMP_DIR": str(folder.resolve())}
    with Server(target, flags, log=folder.parent / "dump-server.log", env=env, label="start the server") as server:
        answers = generate(
            prompts,
            url=server.url,
            tokenizer=AutoTokenizer.from_pretrained(target),
            max_new_tokens=ANSWER_TOKENS,
            concurrency=CONCURRENCY,
            progress="answers",
        )
        # The writer closes a request's last rows when it has been idle for a second.
        time.sleep(3)
    reader = DumpReader(folder)
    report = reader.verify()
    print(f"    {report.rows} rows of {report.samples} requests on disk")
    length = {ref.rid: ref.length for ref in reader.samples()}
    # The last token of an answer need not have been computed with: nothing came after it.
    short = [a.id for a in answers if length.get(a.id, 0) < len(a.input_ids) + len(a.output_ids) - 1]
    if short or not report.ok:
        raise DumpError(f"The dump is not whole. Cut short: {short}. Damaged or missing: {list(report.problems)}.")


def _train(folder: Path, target: Path, dump: Path) -> None:
    from sglang_dflash.train.config import load_config
    from sglang_dflash.train.loop import train

    config = load_config(None, [*RECIPE, f"data.dump={dump}", f"data.target={target}", f"output={folder}"])
    result = train(config)
    print(f"    simulated τ on the training prompts: {result.seen.tau:.2f}")


def _compare(folder: Path, target: Path, drafter: Path, groups: dict[str, list[Prompt]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return compare_arms(
        groups,
        target=target,
        drafter=drafter,
        output=folder,
        widths=[WIDTH],
        max_new_tokens=ANSWER_TOKENS,
        repetitions=1,
    )
