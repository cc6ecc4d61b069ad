from __future__ import annotations

import pytest
import torch

from sglang_dflash.kernels.packed_linear import HALF_MAX, PackedWeight, packed_linear_reference


def random_inputs(rows: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + in_features + out_features)
    return (
        torch.randn(rows, in_features, generator=generator),
        torch.randn(out_features, in_features, generator=generator),
        torch.randn(out_features, generator=generator),
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"), [(1, 1, 1), (3, 5, 7), (8, 64, 48), (17, 33, 65), (65, 129, 31)]
)
def test_product_equals_the_reference(rows: int, in_features: int, out_features: int, with_bias: bool) -> None:
    input_TI, weight_OI, bias_O = random_inputs(rows, in_features, out_features)
    bias = bias_O if with_bias else None
    packed = PackedWeight(weight_OI)
    assert (packed.out_features, packed.in_features) == (out_features, in_features)
    # Two orders of an fp32 sum of `in_features` terms of size about 1.
    tolerance = 1e-6 * in_features
    torch.testing.assert_close(
        packed(input_TI, bias), packed_linear_reference(input_TI, weight_OI, bias), rtol=1e-5, atol=tolerance
    )


def test_weight_is_rounded_to_fp16_and_products_are_not() -> None:
    """Shows that the reference is the tight oracle: the unrounded product is farther away."""
    input_TI, weight_OI, _ = random_inputs(9, 256, 40)
    output_TO = PackedWeight(weight_OI)(input_TI)
    to_rounded = (output_TO - packed_linear_reference(input_TI, weight_OI)).abs().max()
    to_exact = (output_TO.double() - input_TI.double() @ weight_OI.double().T).abs().max()
    assert float(to_rounded) < float(to_exact) / 20


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (5,), (2, 3, 5), (1, 2, 3, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_leading_dimensions_are_kept(shape: tuple[int, ...], with_bias: bool) -> None:
    _, weight_OI, bias_O = random_inputs(1, 5, 7)
    bias = bias_O if with_bias else None
    input_I = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    output_O = PackedWeight(weight_OI)(input_I, bias)
    assert output_O.shape == (*shape[:-1], 7)
    torch.testing.assert_close(output_O, packed_linear_reference(input_I, weight_OI, bias), rtol=1e-5, atol=1e-5)


def test_strided_input_and_weight() -> None:
    input_TI, weight_OI, _ = random_inputs(12, 10, 6)
    packed = PackedWeight(weight_OI.T.contiguous().T)
    torch.testing.assert_close(
        packed(input_TI[::3]), packed_linear_reference(input_TI[::3], weight_OI), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_has_the_input_dtype(dtype: torch.dtype) -> None:
    input_TI, weight_OI, bias_O = random_inputs(4, 16, 8)
    output_TO = PackedWeight(weight_OI)(input_TI.to(dtype), bias_O)
    assert output_TO.dtype == dtype
    # One rounding of the last fp32 sum may fall to either side.
    torch.testing.assert_close(output_TO, packed_linear_reference(input_TI.to(dtype), weight_OI, bias_O))


def test_weight_beyond_fp16_is_refused_with_its_count_and_the_remedy() -> None:
    weight_OI = torch.zeros(3, 4)
    weight_OI[0, 1], weight_OI[2, 2], weight_OI[1, 1] = 2 * HALF_MAX, float("-inf"), HALF_MAX
    with pytest.raises(ValueError, match=r"2 of 12 weights exceed fp16's range \(65504\).*CPU_LINEAR=native"):
        PackedWeight(weight_OI)


def test_largest_fp16_weight_is_kept() -> None:
    assert float(PackedWeight(torch.full((1, 1), HALF_MAX))(torch.ones(1, 1))) == HALF_MAX


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_weight_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be a matrix; got shape"):
        PackedWeight(torch.zeros(shape))


def test_input_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError):
        PackedWeight(torch.zeros(3, 4))(torch.zeros(4, 3))
