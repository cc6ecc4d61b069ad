"""The plugin's own options, read once from the environment.

SGLang 0.5.23 has no flag channel for plugins, so everything that no stock flag carries is an environment variable with the
prefix ``SGLANG_DFLASH_PLUGIN_``: it reaches the launcher and every subprocess alike. An unknown name under that prefix, or a
value that does not parse, is an error; nothing is ignored or corrected. Values that need the model to be judged (a width, a
layer id) are checked where the model is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PREFIX = "SGLANG_DFLASH_PLUGIN_"


class OptionError(ValueError):
    """A ``SGLANG_DFLASH_PLUGIN_*`` variable is unknown or does not parse. The message says what is allowed."""


@dataclass(frozen=True)
class Options:
    """Every option, with its default. The environment variable is ``PREFIX`` + the upper-case field name.

    Attributes:
        tree_topk: candidates per draft position that a tree may branch into; 0 takes as many as the tree has nodes.
            1 makes the tree a chain, which emits what DFLASH emits.
        budget: ``adaptive`` verifies as many nodes in each round as pays, up to the width that was asked for; ``fixed`` always
            verifies that width.
        dump_dir: directory that receives the target's hidden states; unset means no dump.
        dump_segment_mb: a dump segment file is closed and sealed at this size, in MiB.
        dump_queue_mb: host memory that rows waiting for the disk may hold, in MiB; at the limit the forward waits.
        cpu_linear: ``packed_fp16`` multiplies with FBGEMM's packed half-precision weights, ``native`` with torch's own
            kernels. Only the CPU platform reads it.
    """

    tree_topk: int = 0
    budget: str = "adaptive"
    dump_dir: Path | None = None
    dump_segment_mb: int = 256
    dump_queue_mb: int = 512
    cpu_linear: str = "packed_fp16"


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return parse


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return text

    return parse


def _directory(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # a home directory that does not exist
        path = Path(text)
    if not path.is_absolute():
        raise ValueError("an absolute path (each server process resolves a relative one from its own directory)")
    return path


_PARSERS: dict[str, Callable[[str], Any]] = {
    "tree_topk": _integer(0, 64),
    "budget": _choice("adaptive", "fixed"),
    "dump_dir": _directory,
    "dump_segment_mb": _integer(1, 65536),
    "dump_queue_mb": _integer(1, 1 << 20),
    "cpu_linear": _choice("packed_fp16", "native"),
}


def read_options(environ: Mapping[str, str] | None = None) -> Options:
    """Parse the options from ``environ`` (default: ``os.environ``).

    Raises:
        OptionError: a variable under the prefix is not an option, or its value is not allowed.
    """
    environ = os.environ if environ is None else environ
    known = {PREFIX + field.name.upper(): field.name for field in fields(Options)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise OptionError(f"{variable} is not an option of sglang-dflash; allowed: {', '.join(sorted(known))}.")
        name = known[variable]
        try:
            values[name] = _PARSERS[name](text)
        except ValueError as error:
            raise OptionError(f"{variable}={text!r} is not allowed; give {error}.") from None
    return Options(**values)
