from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.attention.torch_backend import TorchAttentionBackend, attend, block_mask

# fp32 softmax and sums over at most 40 keys against fp64.
RTOL, ATOL = 1e-5, 2e-6
SCALE = 0.3


def naive(
    query_RHD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGE: torch.Tensor,
    visible_RS: torch.Tensor,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attention in fp64, head by head and row by row."""
    rows, heads, _ = query_RHD.shape
    group = heads // key_SGD.shape[1]
    output_RHE = torch.empty(rows, heads, value_SGE.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            seen = visible_RS[row].nonzero()[:, 0]
            score_S = key_SGD[seen, head // group].double() @ query_RHD[row, head].double() * SCALE
            if logit_cap:
                score_S = logit_cap * torch.tanh(score_S / logit_cap)
            output_RHE[row, head] = score_S.softmax(0) @ value_SGE[seen, head // group].double()
    return output_RHE.float()


def visible(context: int, rows: int, *, causal: bool = True, window: int = -1) -> torch.Tensor:
    """Spelled out per pair: the whole context, then the block's own rule, then the window over absolute positions."""
    mask_RS = torch.zeros(rows, context + rows, dtype=torch.bool)
    for row in range(rows):
        for key in range(context + rows):
            near = window < 0 or key >= context + row - window
            mask_RS[row, key] = near and (key <= context + row or not causal)
    return mask_RS


class FakePool:
    """One layer's KV. Slots that nobody wrote hold NaN, so that reading one shows."""

    def __init__(self, size: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
        self.key_PGD = torch.full((size, kv_heads, key_dim), float("nan"))
        self.value_PGE = torch.full((size, kv_heads, value_dim), float("nan"))

    def set_kv_buffer(self, layer: Any, where: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key_PGD[where.loc] = key
        self.value_PGE[where.loc] = value

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.key_PGD

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.value_PGE


class Serving:
    """A runner with requests of ``context`` written tokens, about to run ``rows`` more each, slots scattered."""

    def __init__(
        self, context: list[int], rows: list[int], *, heads: int = 4, kv_heads: int = 2, key_dim: int = 8, value_dim: int = 6
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(sum(context) + sum(rows))
        self.context, self.rows = context, rows
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        totals = [c + r for c, r in zip(context, rows, strict=True)]
        size = sum(totals) + 5
        slots = torch.randperm(size, generator=generator)[: sum(totals)].split(totals)
        # Pool rows in reverse, so that a request's index is not its row.
        self.row_of_request = torch.arange(len(context)).flip(0) + 1
        req_to_token = torch.zeros(len(context) + 2, max(totals, default=0) + 3, dtype=torch.int32)
        self.pool = FakePool(size, kv_heads, key_dim, value_dim)
        self.keys = [torch.randn(total, kv_heads, key_dim, generator=generator) for total in totals]
        self.values = [torch.randn(total, kv_heads, value_dim, generator=generator) for total in totals]
        for request, slot in enumerate(slots):
            req_to_token[self.row_of_request[request], : len(slot)] = slot.int()
            written = slot[: context[request]]
            self.pool.key_PGD[written] = self.keys[request][: context[request]]
            self.pool.value_PGE[written] = self.values[request][: context[request]]
        self.queries = [torch.randn(count, heads, key_dim, generator=generator) for count in rows]
        self.out_cache_loc = torch.cat([slot[c:] for slot, c in zip(slots, context, strict=True)])
        self.backend = TorchAttentionBackend(
            SimpleNamespace(
                device="cpu",
                req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
                token_to_kv_pool=self.pool,
            )
        )

    def layer(self, **change: Any) -> Any:
        return SimpleNamespace(
            **{
                "layer_id": 0,
                "tp_q_head_num": self.heads,
                "qk_head_dim": self.key_dim,
                "v_head_dim": self.value_dim,
                "scaling": SCALE,
                "logit_cap": 0.0,
                "sliding_window_size": None,
                "attn_type": AttentionType.DECODER,
                "is_cross_attention": False,
                **change,
            }
        )

    def batch(self, mode: ForwardMode, spec_info: Any = None) -> Any:
        """``seq_lens`` as SGLang has it: with the new rows for decode and extend, without for a verify."""
        counted = [0 if mode.is_target_verify() else count for count in self.rows]
        return SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.tensor([c + r for c, r in zip(self.context, counted, strict=True)]),
            extend_seq_lens=torch.tensor(self.rows),
            req_pool_indices=self.row_of_request,
            out_cache_loc=self.out_cache_loc,
            spec_info=spec_info,
        )

    def forward(self, forward_batch: Any, layer: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Output per request, ``[rows, heads, value_dim]``."""
        self.backend.init_forward_metadata(forward_batch)
        return self.run_layer(forward_batch, layer, **kwargs)

    def run_layer(self, forward_batch: Any, layer: Any, **kwargs: Any) -> list[torch.Tensor]:
        """One layer of a forward that has begun."""
        new = [(k[c:], v[c:]) for k, v, c in zip(self.keys, self.values, self.context, strict=True)]
        output = self.backend.forward_extend(
            torch.cat(self.queries).reshape(-1, self.heads * self.key_dim),
            torch.cat([key for key, _ in new]),
            torch.cat([value for _, value in new]),
            layer,
            forward_batch,
            **kwargs,
        )
        assert output.shape == (sum(self.rows), self.heads * self.value_dim)
        return list(output.view(-1, self.heads, self.value_dim).split(self.rows))

    def expect(self, outputs: list[torch.Tensor], masks: list[torch.Tensor], logit_cap: float = 0.0) -> None:
        for request, (output, mask) in enumerate(zip(outputs, masks, strict=True)):
            expected = naive(self.queries[request], self.keys[request], self.values[request], mask, logit_cap)
            torch.testing.assert_close(output, expected, rtol=RTOL, atol=ATOL)

    def masks(self, **rule: Any) -> list[torch.Tensor]:
        return [visible(c, r, **rule) for c, r in zip(self.context, self.rows, strict=True)]


def verify_info(width: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(draft_token_num=width, **more)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_decode_sees_the_whole_sequence(heads: int, kv_heads: int) -> None:
    serving = Serving([0, 7, 33], [1, 1, 1], heads=heads, kv_heads=kv_heads)
    serving.expect(serving.forward(serving.batch(ForwardMode.DECODE), serving.layer()), serving.masks())


def test_decode_entry_point_is_the_same_path() -> None:
    assert TorchAttentionBackend.forward_decode is TorchAttentionBackend.forward_extend


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_ragged_extend_is_causal_after_its_prefix(heads: int, kv_heads: int) -> None:
    serving = Serving([0, 5, 17], [9, 1, 6], heads=heads, kv_heads=kv_heads)
    serving.expect(serving.forward(serving.batch(ForwardMode.EXTEND), serving.layer()), serving.masks())


def test_requests_of_one_shape_share_a_mask_and_nothing_else() -> None:
    serving = Serving([4, 4, 4], [3, 3, 3])
    serving.expect(serving.forward(serving.batch(ForwardMode.EXTEND), serving.layer()), serving.masks())


def test_chain_verify_is_causal() -> None:
    serving = Serving([0, 3, 20], [5, 5, 5])
    batch = serving.batch(ForwardMode.TARGET_VERIFY, verify_info(5))
    serving.expect(serving.forward(batch, serving.layer()), serving.masks())


def test_draft_block_is_bidirectional() -> None:
    serving = Serving([2, 11], [4, 4])
    batch = serving.batch(ForwardMode.TARGET_VERIFY, verify_info(4))
    layer = serving.layer(attn_type=AttentionType.ENCODER_ONLY)
    serving.expect(serving.forward(batch, layer), serving.masks(causal=False))


def test_causal_and_bidirectional_layers_of_one_forward_keep_their_masks() -> None:
    serving = Serving([2, 11], [4, 4])
    batch = serving.batch(ForwardMode.TARGET_VERIFY, verify_info(4))
    serving.backend.init_forward_metadata(batch)
    for causal, kind in ((True, AttentionType.DECODER), (False, AttentionType.ENCODER_ONLY)) * 2:
        serving.expect(serving.run_layer(batch, serving.layer(attn_type=kind)), serving.masks(causal=causal))


@pytest.mark.parametrize("logit_cap", [0.0, 1.5])
def test_tree_verify_sees_the_context_and_its_own_mask(logit_cap: float) -> None:
    serving = Serving([0, 6, 19], [5, 5, 5])
    generator = torch.Generator().manual_seed(0)
    tree_mask_BWW = torch.rand(3, 5, 5, generator=generator) < 0.4
    tree_mask_BWW |= torch.eye(5, dtype=torch.bool)
    batch = serving.batch(ForwardMode.TARGET_VERIFY, verify_info(5, tree_mask_BWW=tree_mask_BWW))
    masks = serving.masks(causal=False)
    for mask_RS, tree_mask_WW in zip(masks, tree_mask_BWW, strict=True):
        mask_RS[:, -5:] = tree_mask_WW
    serving.expect(serving.forward(batch, serving.layer(logit_cap=logit_cap)), masks, logit_cap)


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_sliding_window_counts_earlier_keys(window: int, mode: ForwardMode) -> None:
    serving = Serving([0, 6, 19], [3, 3, 3])
    batch = serving.batch(mode, verify_info(3) if mode.is_target_verify() else None)
    layer = serving.layer(sliding_window_size=window)
    serving.expect(serving.forward(batch, layer), serving.masks(window=window))


@pytest.mark.parametrize("window", [0, 3])
def test_sliding_window_of_a_decode(window: int) -> None:
    serving = Serving([0, 6, 19], [1, 1, 1])
    layer = serving.layer(sliding_window_size=window)
    serving.expect(serving.forward(serving.batch(ForwardMode.DECODE), layer), serving.masks(window=window))


def test_tree_with_a_sliding_window_is_refused() -> None:
    serving = Serving([4], [2])
    info = verify_info(2, tree_mask_BWW=torch.ones(1, 2, 2, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="no tree mask with a sliding window"):
        serving.forward(serving.batch(ForwardMode.TARGET_VERIFY, info), serving.layer(sliding_window_size=8))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_logit_cap(heads: int, kv_heads: int) -> None:
    serving = Serving([0, 5], [4, 2], heads=heads, kv_heads=kv_heads)
    layer = serving.layer(logit_cap=1.5)
    serving.expect(serving.forward(serving.batch(ForwardMode.EXTEND), layer), serving.masks(), logit_cap=1.5)


def test_keys_are_not_written_where_the_layer_shares_a_cache() -> None:
    serving = Serving([3], [2])
    slots = serving.out_cache_loc
    serving.forward(serving.batch(ForwardMode.EXTEND), serving.layer(), save_kv_cache=False)
    assert bool(serving.pool.key_PGD[slots].isnan().all())
    serving.forward(serving.batch(ForwardMode.EXTEND), serving.layer())
    assert torch.equal(serving.pool.key_PGD[slots], serving.keys[0][3:])


def test_idle_forward_has_no_rows() -> None:
    serving = Serving([3], [2])
    serving.backend.init_forward_metadata(serving.batch(ForwardMode.EXTEND))
    serving.backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    nothing: Any = None
    output = serving.backend.forward_extend(torch.zeros(0, 32), nothing, nothing, serving.layer(), nothing)
    assert output.shape == (0, 24)


def test_attend_takes_a_cache_of_another_dtype() -> None:
    serving = Serving([5], [3])
    key, value = serving.keys[0].bfloat16(), serving.values[0].bfloat16()
    mask = visible(5, 3)
    output = attend(serving.queries[0], key, value, scale=SCALE, mask_RS=mask)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, naive(serving.queries[0], key, value, mask), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 2])
@pytest.mark.parametrize(("context", "rows"), [(0, 1), (5, 1), (0, 4), (5, 4)])
def test_block_mask(context: int, rows: int, causal: bool, window: int) -> None:
    mask_RS = block_mask(context + rows, rows, causal=causal, window=window, device=torch.device("cpu"))
    expected_RS = visible(context, rows, causal=causal, window=window)
    if mask_RS is None:
        assert bool(expected_RS.all()), "no mask means that all is visible"
    else:
        assert torch.equal(mask_RS, expected_RS)
