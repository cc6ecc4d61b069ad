"""Dumped rows against a reference forward in transformers, with chunked prefill, concurrency and radix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_dflash.dump.reader import DumpReader

from .conftest import LAYER_IDS, Dumped

# fp32 taps; the packed GEMM and transformers sum in different orders through 30 layers. Seen: 1.1e-6.
RELATIVE_NOISE = 2e-5


def test_every_request_is_whole(dumped: Dumped) -> None:
    report = DumpReader(dumped.folder).verify()
    assert report.ok, report.problems
    assert report.samples >= len(dumped.answers) + 4


def test_rows_equal_a_reference_forward(dumped: Dumped, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:  # the server multiplies with fp16-rounded weights
            weight.data = weight.data.half().float()
    reader = DumpReader(dumped.folder)
    refs = {ref.rid: ref for ref in reader.samples()}
    for answer in dumped.answers[:4]:
        for rid in (f"first-{answer.id}", f"again-{answer.id}"):
            sample = reader.load(refs[rid])
            ids = answer.input_ids + answer.output_ids
            assert sample.token_ids.tolist() == ids[: len(sample.token_ids)]
            assert sample.prompt_len == len(answer.input_ids)
            with torch.no_grad():
                states: Any = model(sample.token_ids[None], output_hidden_states=True).hidden_states
            wanted = torch.cat([states[layer + 1][0] for layer in LAYER_IDS], dim=-1)
            error = (wanted - sample.hidden).abs().max() / wanted.abs().max()
            assert error < RELATIVE_NOISE, f"{rid}: {error:.1e}"


def test_no_answer_is_cut_short(dumped: Dumped) -> None:
    length = {ref.rid: ref.length for ref in DumpReader(dumped.folder).samples()}
    for answer in dumped.answers:
        # The last token need not have been computed with: nothing came after it.
        assert length[f"first-{answer.id}"] >= len(answer.input_ids) + len(answer.output_ids) - 1
