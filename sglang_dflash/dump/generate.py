"""Prompts in, the target's answers out, through a running server's native endpoint.

Used to make training data (the server dumps while it answers) and by the benchmarks. Prompts are rendered with the target's own
chat template and sent as token ids, so that what the engine computes is what is recorded. Any failed request raises, with its
id and what the server said.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

PROMPT_KEYS = {"id", "messages", "category", "split", "source", "licence"}


class PromptError(ValueError):
    """A prompt file has a line that is not a prompt; the message has its number."""


class GenerationError(RuntimeError):
    """The server did not answer a request."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered; ``messages`` are OpenAI's."""

    id: str
    messages: list[dict[str, str]]
    category: str = ""
    split: str = ""


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        meta_info: what SGLang reports of the request, speculative counters included.
        seconds: from sending the request to having the whole answer.
    """

    id: str
    input_ids: list[int]
    output_ids: list[int]
    text: str
    meta_info: dict[str, Any]
    seconds: float


def load_prompts(path: Path) -> list[Prompt]:
    """Read a JSONL prompt file.

    Raises:
        PromptError: bad JSON, an unknown key, no messages, or an id that occurs twice.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{where} is not JSON: {error}") from None
        if not isinstance(data, dict) or not data.keys() <= PROMPT_KEYS or not {"id", "messages"} <= data.keys():
            raise PromptError(
                f"{where}: a prompt has the keys id and messages, and may have {sorted(PROMPT_KEYS)}; "
                f"{line[:80].decode(errors='replace')}"
            )
        prompt = Prompt(str(data["id"]), data["messages"], data.get("category", ""), data.get("split", ""))
        if not _are_messages(prompt.messages):
            raise PromptError(f"{where}: messages must be a non-empty list of objects with the texts role and content.")
        if prompt.id in seen:
            raise PromptError(f"{where}: id {prompt.id!r} is that of line {seen[prompt.id]} already.")
        seen[prompt.id] = number
        prompts.append(prompt)
    return prompts


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and {type(m.get("role")), type(m.get("content"))} == {str} for m in messages)
    )


def render(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of the conversation with the target's chat template, ready for its answer."""
    rendered = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
    return list(rendered["input_ids"])


def post(url: str, path: str, payload: dict[str, Any], *, timeout: float = 600) -> Any:
    """POST JSON to a server and return its JSON.

    Raises:
        GenerationError: with the status and the body that the server sent.
    """
    body = json.dumps(payload).encode()
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise GenerationError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise GenerationError(f"{url}{path} cannot be reached: {error}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise GenerationError(f"{url}{path} broke off its answer: {error}") from error


def generate(
    prompts: Sequence[Prompt],
    *,
    url: str,
    tokenizer: Any,
    max_new_tokens: int,
    concurrency: int = 1,
    rid_prefix: str = "",
    progress: str | None = None,
) -> list[Generation]:
    """Answer every prompt greedily; results are in the order of ``prompts``.

    Args:
        rid_prefix: put before the prompt's id to make the request id, which must be new to the server.
        progress: label of a progress bar, or None for none.

    Raises:
        GenerationError: for the first request that fails; names it.
    """

    def answer(prompt: Prompt) -> Generation:
        input_ids = render(prompt, tokenizer)
        payload = {
            "rid": rid_prefix + prompt.id,
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        }
        begin = time.perf_counter()
        try:
            reply = post(url, "/generate", payload)
            seconds = time.perf_counter() - begin
            return Generation(prompt.id, input_ids, reply["output_ids"], reply["text"], reply["meta_info"], seconds)
        except GenerationError as error:
            raise GenerationError(f"Request {prompt.id}: {error}") from error
        except (KeyError, TypeError) as error:
            raise GenerationError(f"Request {prompt.id}: the answer has no {error}: {str(reply)[:200]}") from error

    results: dict[str, Generation] = {}
    bar = tqdm(total=len(prompts), desc=progress, unit="prompt", disable=progress is None, dynamic_ncols=True)
    with bar, ThreadPoolExecutor(concurrency) as pool:
        begin, tokens = time.perf_counter(), 0
        futures = [pool.submit(answer, prompt) for prompt in prompts]
        try:
            for future in as_completed(futures):
                result = future.result()
                results[result.id] = result
                tokens += len(result.output_ids)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.1f} tok/s")
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[prompt.id] for prompt in prompts]
