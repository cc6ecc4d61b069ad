"""Linear layers through FBGEMM's packed half-precision GEMM, for CPUs without AMX.

The weight is stored in fp16 in FBGEMM's blocked layout and every product is accumulated in fp32, so the result differs from
an fp32 GEMM over the same fp16-rounded weight only by the order of the sums. torch's own CPU GEMMs are tuned for one row or
for hundreds; a speculative verify has 8 to 65, where the packed form is many times faster (LOG.md has the measurement).
The reference is a plain matmul over the same rounded weight. Biases are added here; quantised weights are left to others.
"""

from __future__ import annotations

import torch

HALF_MAX = torch.finfo(torch.float16).max


class PackedWeight:
    """A ``[out_features, in_features]`` weight in FBGEMM's packed fp16 form.

    Raises:
        ValueError: the weight is not a matrix, or has values that fp16 cannot hold (their count is given).
    """

    def __init__(self, weight_OI: torch.Tensor) -> None:
        if weight_OI.ndim != 2:
            raise ValueError(f"A packed weight must be a matrix; got shape {tuple(weight_OI.shape)}.")
        outside = int((weight_OI.abs() > HALF_MAX).sum())
        if outside:
            raise ValueError(
                f"{outside} of {weight_OI.numel()} weights exceed fp16's range ({HALF_MAX:g}); serve this model with "
                "SGLANG_DFLASH_PLUGIN_CPU_LINEAR=native."
            )
        self.out_features, self.in_features = weight_OI.shape
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.detach().float().contiguous(), None)

    def __call__(self, input_TI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        """``input_TI @ weight.T + bias`` in fp32, returned in the input's dtype; leading dimensions are kept."""
        flat_TI = input_TI.reshape(-1, self.in_features)
        if flat_TI.shape[0] == 0:
            output_TO = flat_TI.new_empty((0, self.out_features))
        else:
            output_TO = torch.ops.quantized.linear_dynamic_fp16(flat_TI.float().contiguous(), self._packed)
        if bias_O is not None:
            output_TO = output_TO + bias_O
        return output_TO.to(input_TI.dtype).reshape(*input_TI.shape[:-1], self.out_features)


def packed_linear_reference(
    input_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """What ``PackedWeight(weight_OI)(input_TI, bias_O)`` computes: fp32 products over the fp16-rounded weight."""
    output_TO = input_TI.float() @ weight_OI.to(torch.float16).float().T
    if bias_O is not None:
        output_TO = output_TO + bias_O
    return output_TO.to(input_TI.dtype)
