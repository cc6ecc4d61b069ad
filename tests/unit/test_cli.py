import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglang_dflash.contract
from sglang_dflash import cli
from sglang_dflash.bench.server import ServerStartError
from sglang_dflash.contract import Finding, Report, Symbol
from sglang_dflash.dump.record import Kind, Record, prefix_hashes
from sglang_dflash.dump.store import Manifest, SegmentWriter

MANIFEST = Manifest(
    architecture="LlamaForCausalLM",
    config_hash="00",
    vocab_size=100,
    num_layers=4,
    hidden_size=8,
    layer_ids=(1, 3),
    dtype="bfloat16",
    quantization=None,
    kv_cache_dtype="bfloat16",
    sglang_version="0.5.23",
)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Two requests: five given positions and three generated ones, and four given ones."""
    directory = tmp_path / "dump"
    with SegmentWriter(directory, MANIFEST, segment_bytes=1 << 20) as writer:
        prompt, answer, other = (np.arange(*ends, dtype=np.int32) for ends in ((5,), (5, 8), (40, 44)))
        *_, last = prefix_hashes(MANIFEST.id, prompt)
        writer.append(Record(Kind.PREFILL, "a", 0, MANIFEST.id, prompt, bytes(5 * 32)))
        writer.append(Record(Kind.DECODE, "a", 5, last, answer, bytes(3 * 32)))
        writer.append(Record(Kind.PREFILL, "b", 0, MANIFEST.id, other, bytes(4 * 32)))
    return directory


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "command", ["", "check", "demo", "dump", "dump inspect", "dump verify", "train", "bench", "bench compare"]
)
def test_help_imports_nothing_heavy(command: str) -> None:
    script = (
        "import sys\n"
        "from sglang_dflash.cli import main\n"
        "try:\n"
        f"    main({[*command.split(), '--help']!r})\n"
        "except SystemExit as exit:\n"
        "    assert exit.code == 0\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: sglang-dflash {command}".strip())


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["serve"],
        ["dump"],
        ["bench", "compare", "--target", "t"],
        ["dump", "verify"],
    ],
)
def test_incomplete_arguments_are_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sglang-dflash")


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("not found", 1)])
def test_check_prints_the_report(
    problem: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("0.5.23", "", (Finding(Symbol("a.b", "worker"), problem),))
    monkeypatch.setattr(sglang_dflash.contract, "check", lambda: report)
    assert cli.main(["check"]) == code
    assert capsys.readouterr().out == f"{report}\n"


def test_inspect_shows_manifest_and_counts(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump", "inspect", str(dump)]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    shown = {name: value.strip() for name, value in shown.items()}
    assert shown["id"] == MANIFEST.id.hex()
    assert shown["layer_ids"] == "1, 3"
    assert shown["requests"] == "2"
    assert shown["positions"] == "12, 3 of them generated"
    assert shown["rows stored"] == "12"
    assert "damage" not in shown


def test_verify_a_whole_dump(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump", "verify", str(dump)]) == 0
    assert "2 requests, 12 rows in 3 records, 1 segments: whole" in capsys.readouterr().out


def test_damage_is_listed_and_fails(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = next(dump.glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    for action in ("inspect", "verify"):
        assert cli.main(["dump", action, str(dump)]) == 1
        assert segment.name in capsys.readouterr().out.split("(1):")[1]


def test_a_folder_that_is_no_dump_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dump", "verify", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"sglang-dflash: error: {tmp_path} is not a dump: it has no manifest.json.\n")


def test_train_reports_what_it_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Any] = []
    result = types.SimpleNamespace(
        steps=7,
        seconds=3.2,
        final_loss=1.25,
        drafter=Path("run/drafter"),
        seen=types.SimpleNamespace(tau=2.345),
        held_out=types.SimpleNamespace(tau=1.5),
        interrupted=False,
    )
    fake_module(
        monkeypatch, "sglang_dflash.train.config", load_config=lambda path, overrides: calls.append((path, overrides))
    )
    fake_module(monkeypatch, "sglang_dflash.train.loop", train=lambda config: result)
    assert cli.main(["train", "--config", "run.yaml", "optim.lr=3e-4", "loop.seed=1"]) == 0
    assert calls == [(Path("run.yaml"), ["optim.lr=3e-4", "loop.seed=1"])]
    out = capsys.readouterr().out
    assert "2.35 on requests seen" in out or "2.34 on requests seen" in out
    assert "1.50 on held-out" in out
    assert "run/drafter" in out
    result.held_out, result.interrupted = None, True
    assert cli.main(["train"]) == 130
    assert calls[1] == (None, [])
    out = capsys.readouterr().out
    assert "no requests were held out" in out
    assert "loop.resume=true" in out


def test_a_bad_training_setting_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "optim.speed=1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("sglang-dflash: error: The training configuration is not valid.")
    assert "optim.speed" in err
    assert "Traceback" not in err


def test_demo_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    fake_module(
        monkeypatch, "sglang_dflash.bench.demo", run_demo=lambda work_dir, *, fresh: calls.append((work_dir, fresh))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["demo"]) == 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--work-dir", "here", "--fresh"]) == 0
    assert calls == [
        (tmp_path / "sglang-dflash/demo", False),
        (Path("/home/someone/.cache/sglang-dflash/demo"), False),
        (Path("here"), True),
    ]


def test_compare_passes_its_options_and_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def run_compare(**options: Any) -> str:
        calls.append(options)
        return "| table |"

    fake_module(monkeypatch, "sglang_dflash.bench.compare", run_compare=run_compare)
    paths = {"target": tmp_path, "drafter": tmp_path, "prompts": tmp_path / "p.jsonl", "output": tmp_path / "out"}
    argv = ["bench", "compare", *(word for name, path in paths.items() for word in (f"--{name}", str(path)))]
    assert cli.main(argv) == 0
    assert cli.main([*argv, "--widths", "9", "65", "--max-new-tokens", "8", "--repetitions", "1"]) == 0
    assert calls[0] == {**paths, "widths": [5, 17, 33], "max_new_tokens": 256, "repetitions": 3}
    assert calls[1] == {**paths, "widths": [9, 65], "max_new_tokens": 8, "repetitions": 1}
    assert capsys.readouterr().out == "| table |\n| table |\n"

    argv[argv.index("--drafter") + 1] = str(tmp_path / "nowhere")
    assert cli.main(argv) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
    assert len(calls) == 2


@pytest.mark.parametrize("value", ["1", "-5", "x"])
def test_a_width_holds_a_node_at_least(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "compare", "--widths", value])
    assert caught.value.code == 2
    assert f"{value!r} is not a whole number of 2 or more" in capsys.readouterr().err


def demo_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_demo(work_dir: Path, *, fresh: bool) -> None:
        raise error

    fake_module(monkeypatch, "sglang_dflash.bench.demo", run_demo=run_demo)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad value"), "bad value"),
        (ServerStartError("ended"), "ended"),
        (FileNotFoundError(2, "No such file or directory", "a.jsonl"), "a.jsonl: No such file or directory"),
        (NotADirectoryError("x is a file"), "x is a file"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "No module named 'torch', which this command needs. Run: pip install 'sglang-dflash[demo,train]'",
        ),
    ],
)
def test_errors_of_the_user_have_no_traceback_unless_asked(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_that_raises(monkeypatch, error)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr() == ("", f"sglang-dflash: error: {message}\n")
    for argv in (["demo", "--traceback"], ["--traceback", "demo"]):
        with pytest.raises(type(error)):
            cli.main(argv)


@pytest.mark.parametrize(
    "error", [RuntimeError("from torch"), NotImplementedError(), KeyError("ours"), AssertionError()]
)
def test_defects_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_that_raises(monkeypatch, error)
    with pytest.raises(type(error)):
        cli.main(["demo"])


def test_an_interruption_has_the_shells_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_that_raises(monkeypatch, KeyboardInterrupt())
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "sglang-dflash: interrupted\n"
