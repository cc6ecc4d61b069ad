from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.hooks import after_spec_metrics


def metrics(verified: list[int] | None) -> dict[str, Any]:
    """What SGLang makes of 4 rounds that could have verified 32 drafts each, 12 of which were accepted."""
    meta = {"spec_num_proposed_drafts": 128, "spec_num_correct_drafts": 12, "spec_accept_rate": 12 / 128}
    after_spec_metrics(None, None, meta, SimpleNamespace(spec_num_cap_tokens=verified), 1)
    return meta


def test_proposed_drafts_are_those_that_were_verified() -> None:
    meta = metrics([5, 48])
    assert meta["spec_num_proposed_drafts"] == 48
    assert meta["spec_accept_rate"] == pytest.approx(0.25)


@pytest.mark.parametrize("verified", [None, [], [5, 0]])
def test_a_worker_that_does_not_count_keeps_sglangs_numbers(verified: list[int] | None) -> None:
    assert metrics(verified)["spec_num_proposed_drafts"] == 128


def test_a_request_without_a_round_has_no_numbers() -> None:
    meta: dict[str, Any] = {}
    after_spec_metrics(None, None, meta, SimpleNamespace(spec_num_cap_tokens=[1, 2]), 1)
    assert meta == {}
