"""Bad input is refused when the server starts: SGLang's own argument resolution, once for all cases, in a child process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
answers = {}
for name, argv in json.load(open(sys.argv[1])).items():
    try:
        prepare_server_args(argv).resolve_once()
        answers[name] = ""
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
json.dump(answers, open(sys.argv[2], "w"))
"""


def _variant(folder: Path, drafter: Path, **changes: object) -> str:
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


OTHER_VERSION = """
import sys
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "0.5.99" if name == "sglang" else real(name)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(sys.argv[1:]).resolve_once()
"""


def test_another_sglang_is_refused_by_the_contract(target: Path, drafter: Path) -> None:
    flags = ["--model-path", str(target), "--speculative-algorithm", "DDTREE"]
    flags += ["--speculative-draft-model-path", str(drafter)]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION, *flags], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "ContractError: sglang-dflash contract with SGLang 0.5.99: DOES NOT HOLD" in done.stderr
    assert "install one of: 0.5.23" in done.stderr


@pytest.fixture(scope="module")
def answers(target: Path, drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    work = tmp_path_factory.mktemp("startup")
    base = ["--model-path", str(target), "--speculative-algorithm"]
    tree, chain, draft = [*base, "DDTREE"], [*base, "DFLASH"], "--speculative-draft-model-path"
    good = [draft, str(drafter)]
    cases = {
        "good tree": tree + good,
        "good chain": chain + good,
        "no drafter": tree,
        "width 1": [*tree, *good, "--speculative-num-draft-tokens", "1"],
        "width 66": [*tree, *good, "--speculative-num-draft-tokens", "66"],
        "hidden size": [*tree, draft, _variant(work / "a", drafter, hidden_size=512)],
        "tap count": [*chain, draft, _variant(work / "b", drafter, target_layer_ids=[1, 8, 14, 21])],
        "taps unsorted": [*tree, draft, _variant(work / "c", drafter, target_layer_ids=[8, 1, 14, 21, 27])],
        "tap out of range": [*chain, draft, _variant(work / "d", drafter, target_layer_ids=[1, 8, 14, 21, 29])],
        "mask token": [*tree, draft, _variant(work / "e", drafter, mask_token_id=49152)],
        "draft window": [*tree, *good, "--speculative-draft-window-size", "64"],
    }
    (work / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-c", SCRIPT, str(work / "cases.json"), str(work / "answers.json")]
    subprocess.run(command, check=True, timeout=300)
    return dict(json.loads((work / "answers.json").read_text()))


@pytest.mark.parametrize("case", ["good tree", "good chain"])
def test_accepts_what_fits(answers: dict[str, str], case: str) -> None:
    assert answers[case] == ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no drafter", "needs a drafter: give --speculative-draft-model-path"),
        ("width 1", "--speculative-num-draft-tokens 1 is not a verify width"),
        ("width 66", "allowed are 2 to 65"),
        ("hidden size", "has hidden_size 512, the target 576"),
        ("tap count", "4 taps of hidden size 576 give 2304"),
        ("taps unsorted", "must be strictly ascending"),
        ("tap out of range", "allowed are 0 to 28"),
        ("mask token", "allowed are 0 to 49151"),
        ("draft window", "--speculative-draft-window-size 64 does not work with this worker"),
    ],
)
def test_refuses_what_does_not_fit(answers: dict[str, str], case: str, words: str) -> None:
    assert words in answers[case]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SGLANG_DFLASH_PLUGIN_NO_SUCH", "1", "is not an option of sglang-dflash"),
        ("SGLANG_DFLASH_PLUGIN_TREE_TOPK", "many", "give an integer from 0 to 64"),
    ],
)
def test_bad_options_end_the_start(variable: str, value: str, words: str, target: Path) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)]
    done = subprocess.run(
        command, env={**os.environ, variable: value}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert words in done.stderr
