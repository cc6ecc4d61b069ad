from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.speculative.compatibility import (
    DEFAULT_WIDTH,
    MAX_WIDTH,
    MIN_WIDTH,
    DrafterShape,
    IncompatibleError,
    TargetShape,
    check_block,
    check_drafter,
    check_memory,
    check_server,
    check_width,
    refused_request,
)

TARGET = TargetShape(hidden_size=64, num_layers=12, vocab_size=100)
DRAFTER = DrafterShape(
    path="org/draft",
    hidden_size=64,
    target_layer_ids=(1, 5, 10),
    mask_token_id=99,
    block_size=8,
    num_target_layers=12,
    fc_inputs=192,
)


def test_fitting_drafter_is_taken() -> None:
    check_drafter(DRAFTER, TARGET)


def test_what_the_checkpoint_does_not_say_is_not_judged() -> None:
    check_drafter(replace(DRAFTER, mask_token_id=None, num_target_layers=None, fc_inputs=None), TARGET)


@pytest.mark.parametrize("taps", [(0,), (10,), tuple(range(11))])
def test_every_tap_up_to_the_last_but_one_layer_is_taken(taps: tuple[int, ...]) -> None:
    check_drafter(replace(DRAFTER, target_layer_ids=taps, fc_inputs=64 * len(taps)), TARGET)


@pytest.mark.parametrize("mask", [0, 99])
def test_every_mask_token_of_the_embedding_is_taken(mask: int) -> None:
    check_drafter(replace(DRAFTER, mask_token_id=mask), TARGET)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 32}, ("hidden_size 32", "the target 64", "must be equal", "Use a drafter trained")),
        ({"target_layer_ids": None}, ("no dflash_config.target_layer_ids", "write the layers", "config.json")),
        ({"target_layer_ids": (5, 1, 10)}, ("[5, 1, 10]", "strictly ascending", "Sort them only if")),
        ({"target_layer_ids": (1, 1, 10)}, ("[1, 1, 10]", "strictly ascending")),
        ({"target_layer_ids": (-1, 5, 10)}, ("[-1, 5, 10]", "allowed are 0 to 10")),
        ({"target_layer_ids": (1, 5, 11)}, ("[1, 5, 11]", "allowed are 0 to 10", "last of 12 layers")),
        ({"target_layer_ids": (1, 5)}, ("192 inputs", "2 taps", "hidden size 64", "128", "Correct")),
        ({"fc_inputs": 191}, ("191 inputs", "3 taps", "192", "Correct dflash_config.target_layer_ids")),
        ({"num_target_layers": 13}, ("13 layers", "this target has 12", "Use a drafter trained")),
        ({"mask_token_id": 100}, ("mask_token_id 100", "allowed are 0 to 99", "Correct")),
        ({"mask_token_id": -1}, ("mask_token_id -1", "allowed are 0 to 99")),
    ],
)
def test_drafter_that_does_not_fit_is_refused(change: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(IncompatibleError) as refusal:
        check_drafter(replace(DRAFTER, **change), TARGET)
    for part in ("org/draft", *said):
        assert part in str(refusal.value)


def test_drafter_with_an_empty_list_of_taps_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="target_layer_ids"):
        check_drafter(replace(DRAFTER, target_layer_ids=(), fc_inputs=None), TARGET)


@pytest.mark.parametrize("width", [-1, 0, 1, 66])
def test_width_that_no_tree_has_is_refused(width: int) -> None:
    with pytest.raises(
        IncompatibleError, match=rf"--speculative-num-draft-tokens {width} .*allowed are 2 to 65.*17 is the default"
    ):
        check_width(width)


@pytest.mark.parametrize("width", [MIN_WIDTH, DEFAULT_WIDTH, MAX_WIDTH])
def test_width_of_a_tree_is_taken(width: int) -> None:
    check_width(width)


def test_unknown_block_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"no block_size.*Give --speculative-dflash-block-size"):
        check_block(None)


@pytest.mark.parametrize("block", [-1, 0, 1, 65])
def test_block_out_of_range_is_refused(block: int) -> None:
    with pytest.raises(IncompatibleError, match=f"block of {block} rows.*allowed are 2 to 64"):
        check_block(block)


@pytest.mark.parametrize("block", [2, 16, 64])
def test_block_in_range_is_returned(block: int) -> None:
    assert check_block(block) == block


def server(**change: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "speculative_draft_window_size": None,
            "pp_size": 1,
            "enable_dp_attention": False,
            "enable_mixed_chunk": False,
            "enable_deterministic_inference": False,
            "kv_cache_dtype": "auto",
            "disaggregation_mode": "null",
            **change,
        }
    )


def test_plain_memory_is_taken() -> None:
    check_memory(TARGET)


@pytest.mark.parametrize(
    ("field", "word"), [("has_recurrent_state", "recurrent state"), ("has_window_pool", "pool of")]
)
def test_memory_that_no_tree_may_touch_is_refused_with_the_way_out(field: str, word: str) -> None:
    with pytest.raises(IncompatibleError, match=word) as refusal:
        check_memory(replace(TARGET, **{field: True}))
    assert "--speculative-algorithm DFLASH" in str(refusal.value)


@pytest.mark.parametrize("change", [{}, {"disaggregation_mode": None}, {"kv_cache_dtype": "bf16"}])
def test_servable_flags_are_taken(change: dict[str, Any]) -> None:
    check_server(server(**change), backends=("ours", "ours"), allowed=("ours",))


@pytest.mark.parametrize(
    ("field", "value", "flag", "remedy"),
    [
        ("speculative_draft_window_size", 512, "--speculative-draft-window-size 512", "remove the flag"),
        ("pp_size", 2, "--pp-size 2", "set --pp-size 1"),
        ("enable_dp_attention", True, "--enable-dp-attention True", "remove the flag"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk True", "remove the flag"),
        ("enable_deterministic_inference", True, "--enable-deterministic-inference True", "seeds are then ignored"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype fp8_e4m3", "remove the flag"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode prefill", "serve prefill and decode in one server"),
    ],
)
def test_flag_that_cannot_be_served_is_refused(field: str, value: Any, flag: str, remedy: str) -> None:
    with pytest.raises(IncompatibleError) as refusal:
        check_server(server(**{field: value}), backends=("ours", "ours"), allowed=("ours",))
    assert str(refusal.value).startswith(f"{flag} does not work with this worker: ")
    assert remedy in str(refusal.value)


@pytest.mark.parametrize("backends", [("fa3", "fa3"), ("ours", "fa3"), ("fa3", "other"), (None, "ours")])
def test_backend_without_a_tree_mask_is_refused(backends: tuple[str | None, ...]) -> None:
    with pytest.raises(IncompatibleError) as refusal:
        check_server(server(), backends=backends, allowed=("ours", "other"))
    assert str(refusal.value).startswith(
        f"--attention-backend {backends[0] if backends[0] != 'ours' else backends[1]} does"
    )
    assert "set --attention-backend ours or other" in str(refusal.value)


def sampling(**change: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.1,
            "logit_bias": {"5": 1.0},
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            "min_new_tokens": 4,
            "regex": "a+",
            "watermark": None,
            "beam_width": None,
            "sampling_seed": 3,
            **change,
        }
    )


def test_exact_request_is_served() -> None:
    assert refused_request(sampling()) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermark", "on"),
        ("beam_width", 2),
    ],
)
def test_request_field_that_cannot_be_exact_is_refused(field: str, value: Any) -> None:
    message = refused_request(sampling(**{field: value}))
    assert message is not None
    assert message.startswith(f"{field}={value!r} is not served")
    assert "remove it, or serve without --speculative-algorithm" in message


def test_processor_and_hidden_states_are_refused_and_all_reasons_are_named() -> None:
    assert "custom_logit_processor is" in str(refused_request(sampling(), custom_logit_processor="f"))
    assert "return_hidden_states is" in str(refused_request(sampling(), return_hidden_states=True))
    message = refused_request(sampling(watermark="on", beam_width=2), custom_logit_processor="f")
    assert message is not None
    for part in ("watermark='on'", "beam_width=2", "custom_logit_processor"):
        assert part in message
