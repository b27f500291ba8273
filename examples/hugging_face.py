"""A Hugging Face MoE model, converted and trained with a plan.

    torchrun --nproc-per-node 2 examples/hugging_face.py
    lancet bench examples/hugging_face.py:make_step --stands-for 8 --share 0.4    # one process instead of 8

A tiny OLMoE with random weights on random tokens, so that nothing is downloaded; with `from_pretrained` the
other lines stay the same. On CPU ranks; on GPUs move model and batch to the rank's device before `optimize`.
"""

import torch
import torch.distributed as dist
from transformers import OlmoeConfig, OlmoeForCausalLM

from lancet_kernels import CausalLMStep, convert, export_state_dict, optimize

STEPS = 20

CONFIG = OlmoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, output_router_logits=True, pad_token_id=0,
    eos_token_id=None,
)  # fmt: skip


def make_batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Tokens that count upwards: something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, CONFIG.vocab_size, (8, 1), generator=generator)
    ids = (first + torch.arange(16)) % CONFIG.vocab_size
    return {"input_ids": ids, "labels": ids}


def make_step() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """What to plan on a rank: the step and a batch of it."""
    model = OlmoeForCausalLM(CONFIG)
    convert(model)
    return CausalLMStep(model), make_batch(0, dist.get_rank())


def main() -> list[float]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = OlmoeForCausalLM(CONFIG)
    report = convert(model)  # in place, before the optimizer: each rank keeps its experts
    step = optimize(CausalLMStep(model), make_batch(0, rank))  # ranks measure and plan together
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if rank == 0:
        print(report, step.plan.explain(), sep="\n")
    losses = []
    for number in range(STEPS):
        loss = step(**make_batch(number, rank))
        loss.backward()  # gradients of the mean loss of all ranks, summed as part of the plan
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss) / ranks)
    state = export_state_dict(model)  # on every rank; the names and layouts of the original
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {len(state)} tensors to save")
        # model.save_pretrained("trained", state_dict=state)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
