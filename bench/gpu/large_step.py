"""A step with products so long that the host is ahead of the GPU, for `lancet bench FILE.py:FUNCTION`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig, TrainingStep

# 8 sequences of 2,048 tokens; two of the four blocks have experts, two for each of the ranks.
LARGE = ModelConfig(
    "large", layers=4, width=4096, heads=32, sequence=2048, vocab=32000, top_k=2, gate="random"
)
SMALL = ModelConfig("small", layers=4, width=64, heads=2, sequence=64, vocab=256, top_k=2, gate="random")


def large_step() -> tuple[TrainingStep, tuple[torch.Tensor, torch.Tensor]]:
    """The step and its inputs of one rank: large on a GPU, small on a CPU."""
    on_gpu = torch.cuda.is_available()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    config = LARGE if on_gpu else SMALL
    with torch.device("cuda" if on_gpu else "cpu"):
        model = GPT2MoE(replace(config, num_experts=2 * ranks))
        tokens = torch.randint(config.vocab, (2, 8 if on_gpu else 2, config.sequence))
    return TrainingStep(model, ranks, autocast=torch.bfloat16 if on_gpu else None), (tokens[0], tokens[1])
