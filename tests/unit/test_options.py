from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from sglang_dflash.options import PREFIX, OptionError, Options, read_options


def test_defaults() -> None:
    options = read_options({"PATH": "/bin", "SGLANG_OTHER": "x"})
    assert options == Options()
    assert (options.tree_topk, options.budget, options.dump_dir) == (0, "adaptive", None)
    assert options.cpu_linear == "packed_fp16"
    assert (options.dump_segment_mb, options.dump_queue_mb) == (256, 512)


def test_every_option_is_read_from_its_variable() -> None:
    given = {
        "TREE_TOPK": "4",
        "BUDGET": "fixed",
        "DUMP_DIR": "/data/dump",
        "DUMP_SEGMENT_MB": "1",
        "DUMP_QUEUE_MB": "7",
        "CPU_LINEAR": "native",
    }
    assert {name.lower() for name in given} == {field.name for field in fields(Options)}
    assert read_options({PREFIX + name: text for name, text in given.items()}) == Options(
        tree_topk=4,
        budget="fixed",
        dump_dir=Path("/data/dump"),
        dump_segment_mb=1,
        dump_queue_mb=7,
        cpu_linear="native",
    )


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX + "TREE_TOPK", "3")
    assert read_options().tree_topk == 3


@pytest.mark.parametrize("name", ["TREE_TOPKK", "tree_topk", ""])
def test_unknown_variable_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(OptionError) as refusal:
        read_options({PREFIX + name: "1"})
    assert str(refusal.value).startswith(f"{PREFIX}{name} is not an option")
    for field in fields(Options):
        assert PREFIX + field.name.upper() in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("TREE_TOPK", "-1", "an integer from 0 to 64"),
        ("TREE_TOPK", "65", "an integer from 0 to 64"),
        ("TREE_TOPK", "four", "an integer from 0 to 64"),
        ("TREE_TOPK", "", "an integer from 0 to 64"),
        ("TREE_TOPK", "1.5", "an integer from 0 to 64"),
        ("DUMP_SEGMENT_MB", "0", "an integer from 1 to 65536"),
        ("DUMP_SEGMENT_MB", "65537", "an integer from 1 to 65536"),
        ("DUMP_QUEUE_MB", "0", "an integer from 1 to 1048576"),
        ("DUMP_QUEUE_MB", "1048577", "an integer from 1 to 1048576"),
        ("CPU_LINEAR", "Native", "one of packed_fp16, native"),
        ("CPU_LINEAR", "", "one of packed_fp16, native"),
        ("DUMP_DIR", "dump", "an absolute path"),
        ("DUMP_DIR", "./dump", "an absolute path"),
        ("DUMP_DIR", "", "an absolute path"),
        ("DUMP_DIR", "~no-such-user/dump", "an absolute path"),
    ],
)
def test_value_that_is_not_allowed_is_refused(name: str, text: str, allowed: str) -> None:
    with pytest.raises(OptionError) as refusal:
        read_options({PREFIX + name: text})
    assert f"{PREFIX}{name}={text!r} is not allowed; give {allowed}" in str(refusal.value)


@pytest.mark.parametrize("text", ["0", "64"])
def test_bounds_are_allowed(text: str) -> None:
    assert read_options({PREFIX + "TREE_TOPK": text}).tree_topk == int(text)


def test_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert read_options({PREFIX + "DUMP_DIR": "~/dump"}).dump_dir == Path("/home/someone/dump")
