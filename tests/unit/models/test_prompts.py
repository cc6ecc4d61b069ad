import json
from collections import Counter
from pathlib import Path

import pytest

import sglang_dflash.models
from sglang_dflash.dump.generate import Prompt, load_prompts

FOLDER = Path(sglang_dflash.models.__file__).parent


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_prompts(FOLDER / "prompts.jsonl")


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    return [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def source_rows() -> dict[str, list[str]]:
    """The cells of PROMPTS.md's table, by the prefix of the ids."""
    rows = [line.strip("| ").split(" | ") for line in (FOLDER / "PROMPTS.md").read_text().splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows if len(row) == 3 and row[0].startswith("`")}


def test_splits_and_categories(prompts: list[Prompt]) -> None:
    splits = Counter(prompt.split for prompt in prompts)
    assert set(splits) == {"train", "held_out"}
    assert splits["train"] >= 64
    for split in splits:
        assert {prompt.category for prompt in prompts if prompt.split == split} == {"chat", "code", "arithmetic"}


def test_ids_and_texts_are_unique(prompts: list[Prompt]) -> None:
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.messages[-1]["content"] for prompt in prompts}) == len(prompts), (
        "a held-out prompt was trained on"
    )


def test_each_is_one_short_user_turn(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        (message,) = prompt.messages
        assert message["role"] == "user"
        assert 0 < len(message["content"]) <= 300, prompt.id


def test_every_prompt_has_its_source_and_licence_in_the_table(
    lines: list[dict], source_rows: dict[str, list[str]]
) -> None:
    for line in lines:
        source, licence = source_rows[line["id"].rsplit("-", 1)[0]]
        assert line["source"]
        assert source.startswith(line["source"] + ":"), line["id"]
        assert licence.startswith(line["licence"]), line["id"]
        assert line["licence"].split()[0] in {"MIT", "Apache-2.0"}


def test_the_table_names_no_source_that_is_not_used(lines: list[dict], source_rows: dict[str, list[str]]) -> None:
    assert set(source_rows) == {line["id"].rsplit("-", 1)[0] for line in lines}


def test_the_page_has_the_right_counts(prompts: list[Prompt]) -> None:
    text = (FOLDER / "PROMPTS.md").read_text()
    splits = Counter(prompt.split for prompt in prompts)
    assert f"{len(prompts)} user prompts" in text
    assert f"{splits['train']} to train on and {splits['held_out']} held out" in text
