"""Serves the same prompts autoregressively, with DFLASH and with DDTREE, and says how fast and whether the text is the same.

One server start per arm, greedy, warmed up, and the repetitions of an arm in one start. Speed is only reported beside the
correctness of the same run: how many answers have the autoregressive arm's tokens, and, where one differs, how far apart the
target's two best logits are at that position.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_dflash.bench.server import Server
from sglang_dflash.dump.generate import Generation, Prompt, generate, load_prompts, render
from sglang_dflash.files import write_text

WARM_UP_PROMPTS = 2


@dataclass(frozen=True)
class Arm:
    """One way of serving: a name for the table and the server's flags."""

    name: str
    flags: tuple[str, ...]


def arms(drafter: Path, widths: Sequence[int]) -> list[Arm]:
    """Autoregressive first, then DFLASH, then DDTREE at each verify width."""
    draft = ("--speculative-draft-model-path", str(drafter))
    trees = [
        Arm(
            f"DDTREE, up to {width - 1} nodes",
            ("--speculative-algorithm", "DDTREE", "--speculative-num-draft-tokens", str(width), *draft),
        )
        for width in widths
    ]
    return [Arm("autoregressive", ()), Arm("DFLASH", ("--speculative-algorithm", "DFLASH", *draft)), *trees]


@dataclass(frozen=True)
class Difference:
    """Where an arm's answer leaves the autoregressive one.

    Attributes:
        gap: difference of the two best log-probabilities of the target at ``position``; None where one answer is a prefix of
            the other.
    """

    id: str
    position: int
    gap: float | None


@dataclass
class ArmResult:
    """What one arm did on one set of prompts. tau = 1 + accepted drafts / verify steps."""

    arm: str
    group: str
    tokens: int
    seconds: list[float]
    verify_steps: int
    accepted_drafts: int
    answers: dict[str, list[int]] = field(repr=False)
    differences: list[Difference] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return 1 + self.accepted_drafts / self.verify_steps if self.verify_steps else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of the median repetition."""
        return self.tokens / statistics.median(self.seconds)


def serve_arm(
    arm: Arm,
    groups: dict[str, list[Prompt]],
    *,
    target: Path,
    tokenizer: Any,
    max_new_tokens: int,
    repetitions: int,
    log: Path,
) -> list[ArmResult]:
    """One server start, every group ``repetitions`` times, one request at a time."""
    with Server(target, arm.flags, log=log, label=f"start the server: {arm.name}") as server:
        warm_up = [prompt for prompts in groups.values() for prompt in prompts[:WARM_UP_PROMPTS]]
        generate(warm_up, url=server.url, tokenizer=tokenizer, max_new_tokens=16, rid_prefix="warm-")
        results = []
        for group, prompts in groups.items():
            rounds = [
                generate(
                    prompts,
                    url=server.url,
                    tokenizer=tokenizer,
                    max_new_tokens=max_new_tokens,
                    rid_prefix=f"{group}-{number}-",
                    progress=f"{arm.name}, {group} ({number + 1}/{repetitions})",
                )
                for number in range(repetitions)
            ]
            results.append(_collect(arm, group, rounds))
    return results


def _collect(arm: Arm, group: str, rounds: list[list[Generation]]) -> ArmResult:
    first = rounds[0]
    meta = [generation.meta_info for generation in first]
    return ArmResult(
        arm=arm.name,
        group=group,
        tokens=sum(len(generation.output_ids) for generation in first),
        seconds=[sum(generation.seconds for generation in generations) for generations in rounds],
        verify_steps=sum(int(info.get("spec_verify_ct", 0)) for info in meta),
        accepted_drafts=sum(int(info.get("spec_num_correct_drafts", 0)) for info in meta),
        answers={generation.id: generation.output_ids for generation in first},
    )


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first position at which two answers differ; None where they are the same."""
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def find_differences(
    results: list[ArmResult], prompts: Sequence[Prompt], *, target: Path, tokenizer: Any, log: Path
) -> None:
    """Compare every arm with the autoregressive one and, where needed, ask the target for the gap of its best logits."""
    baseline = {(r.group, i): ids for r in results if r.arm == "autoregressive" for i, ids in r.answers.items()}
    found: list[tuple[ArmResult, str, int]] = []
    for result in results:
        for identity, ids in result.answers.items():
            position = first_difference(baseline[result.group, identity], ids)
            if position is not None:
                found.append((result, identity, position))
    if not found:
        return
    by_id = {prompt.id: prompt for prompt in prompts}
    with Server(target, log=log, label="start the server: logit gaps") as server:
        for result, identity, position in found:
            common = baseline[result.group, identity][:position]
            gap = _logit_gap(server, by_id[identity], common, tokenizer)
            result.differences.append(Difference(identity, position, gap))


def _logit_gap(server: Server, prompt: Prompt, common: list[int], tokenizer: Any) -> float | None:
    reply = server.post(
        "/generate",
        {
            "input_ids": render(prompt, tokenizer) + common,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 2,
        },
    )
    best = reply["meta_info"]["output_top_logprobs"][0]
    return float(best[0][0] - best[1][0]) if len(best) > 1 else None


def environment() -> dict[str, str]:
    """What the numbers were measured with."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "device": device,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "sglang": metadata.version("sglang"),
        "sglang-dflash": metadata.version("sglang-dflash"),
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(results: list[ArmResult]) -> str:
    """Markdown: one row per arm and group, with the ratio to the autoregressive arm of the same group."""
    lines = [
        "| prompts | arm | τ | verify steps | tokens/s | x autoregressive | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    speed = {r.group: r.tokens_per_second for r in results if r.arm == "autoregressive"}
    for r in results:
        same = len(r.answers) - len(r.differences)
        tau = f"{r.tau:.2f}" if r.verify_steps else ""
        lines.append(
            f"| {r.group} | {r.arm} | {tau} | {r.verify_steps or ''} | {r.tokens_per_second:.1f} | "
            f"{r.tokens_per_second / speed[r.group]:.2f} | {same} of {len(r.answers)} |"
        )
    return "\n".join([*lines, *_gap_lines(results)])


def _gap_lines(results: list[ArmResult]) -> Iterator[str]:
    for r in results:
        for d in r.differences:
            gap = "one answer ends there" if d.gap is None else f"the two best logits are {d.gap:.2e} apart"
            yield f"\n{r.arm}, {d.id}: differs at token {d.position}, where {gap}."


def compare_arms(
    groups: dict[str, list[Prompt]],
    *,
    target: Path,
    drafter: Path,
    output: Path,
    widths: Sequence[int],
    max_new_tokens: int,
    repetitions: int,
) -> str:
    """Run every arm, write ``compare.json`` and ``compare.md`` into ``output``, and return the table."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    results: list[ArmResult] = []
    for number, arm in enumerate(arms(drafter, widths)):
        results += serve_arm(
            arm,
            groups,
            target=target,
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            repetitions=repetitions,
            log=output / f"server-{number}.log",
        )
    every = [prompt for prompts in groups.values() for prompt in prompts]
    find_differences(results, every, target=target, tokenizer=tokenizer, log=output / "server-gaps.log")
    where = environment()
    text = table(results) + "\n\nMeasured with " + ", ".join(f"{key} {value}" for key, value in where.items()) + ".\n"
    rows = [{**asdict(r), "tau": r.tau, "tokens_per_second": r.tokens_per_second} for r in results]
    write_text(output / "compare.json", json.dumps({"environment": where, "results": rows}, indent=1) + "\n")
    write_text(output / "compare.md", text)
    return text


def run_compare(
    *,
    target: Path,
    drafter: Path,
    prompts: Path,
    output: Path,
    widths: list[int],
    max_new_tokens: int,
    repetitions: int,
) -> str:
    """The ``bench compare`` command: all prompts of a file as one group."""
    output.mkdir(parents=True, exist_ok=True)
    return compare_arms(
        {prompts.stem: load_prompts(prompts)},
        target=target,
        drafter=drafter,
        output=output,
        widths=widths,
        max_new_tokens=max_new_tokens,
        repetitions=repetitions,
    )
