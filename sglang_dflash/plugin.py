"""The two entry points: SGLang calls ``register`` in every process, and ``activate_cpu_platform`` to find the platform.

Registers the algorithm, the attention backend and the hooks that ``contract.py`` lists, and nothing else. SGLang logs a
plugin's exception and goes on, so a bad option ends the process here, and a broken contract makes the algorithm's own
validation fail with the report.
"""

from __future__ import annotations

import logging
import pkgutil
from typing import Any

from sglang_dflash import contract
from sglang_dflash.options import OptionError, Options, read_options

logger = logging.getLogger(__name__)


def activate_cpu_platform() -> str | None:
    """Name the CPU platform's class where torch sees no CUDA device; None leaves the choice to SGLang."""
    import torch

    if torch.cuda.is_available() or torch.version.hip or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return None
    return "sglang_dflash.platform.torch_cpu:TorchCpuPlatform"


def register() -> None:
    """Register DDTREE, the backend and the hooks.

    Raises:
        SystemExit: a ``SGLANG_DFLASH_PLUGIN_*`` variable is unknown or malformed.
    """
    try:
        options = read_options()
    except OptionError as error:
        raise SystemExit(f"sglang-dflash: {error}") from error
    report = contract.check()
    _register_algorithm(report)
    if not report.ok:
        logger.error("sglang-dflash registers no hooks: %s", report)
        return
    _register_backend()
    _register_hooks(options)
    logger.info("sglang-dflash registered for SGLang %s: %s", report.sglang_version, options)


def _register_algorithm(report: contract.Report) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def validate(server_args: Any) -> None:
        if not report.ok:
            raise contract.ContractError(str(report))

    spec_class: dict[str, Any] = {}
    if report.ok:
        from sglang_dflash.speculative.algorithm import DDTreeAlgorithm

        spec_class = {"spec_class": DDTreeAlgorithm}

    @SpeculativeAlgorithm.register("DDTREE", supports_overlap=True, validate_server_args=validate, **spec_class)
    def make_worker(server_args: Any) -> type:
        from sglang_dflash.speculative.worker import TreeWorker

        return TreeWorker


def _register_backend() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices, add_draft_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash.attention import BACKEND_NAME
    from sglang_dflash.attention.torch_backend import TorchAttentionBackend

    add_attention_backend_choices([BACKEND_NAME])
    add_draft_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(TorchAttentionBackend)


def _register_hooks(options: Options) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = {"always": True, "cpu": activate_cpu_platform() is not None, "dump": options.dump_dir is not None}
    for hook in contract.HOOKS:
        if wanted[hook.when]:
            HookRegistry.register(hook.symbol.path, pkgutil.resolve_name(hook.implementation), HookType(hook.kind))
