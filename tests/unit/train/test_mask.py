from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.train.mask import block_attention_mask, block_attention_mask_reference


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_vectorised_equals_reference(data: st.DataObject) -> None:
    context = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(1, 4))
    causal = data.draw(st.booleans())
    count = data.draw(st.integers(1, 4))
    anchors = data.draw(
        st.lists(st.lists(st.integers(0, context), min_size=count, max_size=count), min_size=1, max_size=3)
    )
    mask = block_attention_mask(torch.tensor(anchors), context, size, causal=causal)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [block_attention_mask_reference(row, context, size, causal=causal) for row in anchors]


def test_context_ends_before_the_anchor() -> None:
    mask = block_attention_mask(torch.tensor([[0, 3]]), 5, 2, causal=False)[0]
    assert mask[:2, :5].sum() == 0, "an anchor at position 0 has no context"
    assert mask[2:, :5].tolist() == [[True, True, True, False, False]] * 2, (
        "position 3, the anchor's own, is not context"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_see_themselves_only(causal: bool) -> None:
    size = 3
    mask = block_attention_mask(torch.tensor([[4, 5]]), 8, size, causal=causal)[0, :, 8:]
    assert not mask[:size, size:].any() and not mask[size:, :size].any(), "also when the blocks' positions overlap"
    inside = mask[:size, :size]
    assert torch.equal(inside, torch.ones(size, size).tril().bool() if causal else torch.ones(size, size).bool())
    assert torch.equal(mask[size:, size:], inside)


def test_no_row_is_blind() -> None:
    """A row that attends nothing would be NaN; padding anchors (position 0) attend their own block."""
    mask = block_attention_mask(torch.tensor([[6, 0, 0]]), 7, 4, causal=True)
    assert bool(mask.any(dim=-1).all())
