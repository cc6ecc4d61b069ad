"""Run exported drafters through stock SGLang's ``DFlashDraftModel`` on a CPU, attention replaced by a dense one.

A script of its own, because SGLang's runtime is one per process. For each folder in the request it builds the model from
config.json, loads model.safetensors through SGLang's own loader functions, projects the context and forwards one block.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import DFlashAttention, DFlashDraftModel
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_config


def start(folder: str, scratch: Path) -> None:
    args = ServerArgs(model_path=folder, device="cpu", dtype="float32", skip_tokenizer_init=True)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
    method = f"file://{scratch / 'rendezvous'}"
    init_distributed_environment(world_size=1, rank=0, distributed_init_method=method, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")


class DenseAttention(torch.nn.Module):
    """Stands for RadixAttention: context K and V, then the block's, under the mask of the layer's own attention type."""

    def __init__(self, layer: DFlashAttention, context_TH: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        key, self.value = layer.kv_proj_only(context_TH)
        self.key = layer.apply_k_rope(torch.arange(len(context_TH)), layer.apply_k_norm(key))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Any) -> torch.Tensor:
        rows = len(query)
        block = torch.ones(rows, rows, dtype=torch.bool)
        if self.layer.attn_type == AttentionType.DECODER:
            block = block.tril()
        mask = torch.cat([torch.ones(rows, len(self.key), dtype=torch.bool), block], dim=1)
        query, key, value = (
            x.unflatten(1, (-1, self.layer.head_dim)).transpose(0, 1)
            for x in (query, torch.cat([self.key, key]), torch.cat([self.value, value]))
        )
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return output.transpose(0, 1).flatten(1)


@torch.no_grad()
def draft(folder: str, taps_TF: torch.Tensor, embedding_SH: torch.Tensor) -> dict[str, Any]:
    model = DFlashDraftModel(get_config(folder, trust_remote_code=False))
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    model.load_weights(load_file(Path(folder) / "model.safetensors").items())
    unloaded = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    context_TH = model.project_target_hidden(taps_TF)
    for layer in model.layers:
        layer.self_attn.attn = DenseAttention(layer.self_attn, context_TH)
    positions = torch.arange(len(embedding_SH)) + len(taps_TF)
    output = model(None, positions, None, input_embeds=embedding_SH.clone())
    return {
        "unloaded": unloaded,
        "hidden_SH": output.hidden_states,
        "shapes": {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        "block_size": model.block_size,
        "attn_type": model.layers[0].self_attn.attn_type.name,
    }


def main(request: Path, answer: Path) -> None:
    asked = torch.load(request)
    start(asked["folders"][0], request.parent)
    torch.save([draft(folder, asked["taps_TF"], asked["embedding_SH"]) for folder in asked["folders"]], answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
