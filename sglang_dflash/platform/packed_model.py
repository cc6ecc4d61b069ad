"""Routes a loaded model's unquantised linear layers through the packed fp16 GEMM.

SGLang's layers delegate to a ``quant_method``; replacing that object keeps loading, tensor-parallel slicing and weight
tying as they are. The original weight stays: embeddings read it, weight updates write it and drafters borrow it (an update
must be followed by ``pack_linears`` again).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch.nn import functional

from sglang_dflash.kernels.packed_linear import PackedWeight

logger = logging.getLogger(__name__)


class PackedLinearMethod:
    """Stands in for SGLang's unquantised linear and embedding methods of one layer."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        self._weight = PackedWeight(weight_OI)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._weight(x, bias)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        return functional.embedding(input_, layer.weight)


def pack_linears(model: torch.nn.Module) -> int:
    """Pack every unquantised linear layer and head of ``model`` in place; returns how many.

    Raises:
        ValueError: a weight has values that fp16 cannot hold; the message names the layer.
    """
    packed = 0
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, PackedLinearMethod):
            continue
        try:
            module.quant_method = PackedLinearMethod(module.weight)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        packed += 1
    logger.info("Packed %s linear layers of %s as fp16.", packed, type(model).__name__)
    return packed
