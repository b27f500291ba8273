"""Fused passes of random routings, sizes and delays: do all finish, with every row where it belongs?

    TRITON_INTERPRET=1 python -m tests.lancet_kernels.kernels.fuzz_routings --ranks 2 --passes 1000

A pass is wrong if a row is missing, if anything was written behind the last one or beside a buffer, or if
out, dx or the gradient of a weight differ in a bit from what one PE with all experts makes. Naps fall before
launches and between tasks.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace

import torch

from lancet_kernels.kernels.overlap_config import OverlapConfig
from tests.lancet_kernels.kernels.overlap_cases import Case, make_routing
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    Layer,
    alone,
    make_layer,
    poisoned_buffers,
    same_bits,
)
from tests.lancet_kernels.kernels.test_overlap_protocol import delays
from tests.ranks import RankPool

LARGEST = Case(tokens=24, choices=2, local=2, capacity=24, width=16, hidden=16, bias=False)


def random_case(seed: int, world: int) -> Case:
    """Even, skewed, empty or all to one expert; other numbers of tokens on every rank."""
    chance = random.Random(seed)
    choose = chance.choice(("random", "few", "one"))
    capacity = chance.choice((1, 4, LARGEST.tokens))
    return replace(
        LARGEST, world=world, choose=choose, capacity=capacity, seed=seed, uneven=chance.random() < 0.2
    )


def random_routing(layer: Layer, case: Case) -> None:
    """Give the layer a rank's tokens and routing of the case, fewer tokens than the case has."""
    chance = random.Random(1000 * case.seed + layer.rank)
    layer.load(case)
    tokens = chance.randint(0, case.tokens_of(layer.rank))
    layer.x, layer.dy = layer.x[:tokens].contiguous(), layer.dy[:tokens].contiguous()
    routing = layer.routing
    expert, weight = routing.expert[:tokens].contiguous(), routing.weight[:tokens].contiguous()
    if chance.random() < 0.2:
        expert = expert.new_full(expert.shape, chance.randrange(case.experts))
        expert[:, 1:] = (expert[:, 1:] + 1) % case.experts
    slot, used = torch.zeros_like(expert), torch.zeros(case.experts, dtype=torch.int64)
    for t in range(tokens):
        for k in range(case.choices):
            slot[t, k] = used[expert[t, k]]
            used[expert[t, k]] += 1
    layer.routing = make_routing(expert, slot, weight, used, case.capacity)


def fuzz_on_rank(first: int, passes: int, nap_s: float) -> int:
    """-> how many tasks were launched. Raises for the first pass that is wrong or does not finish."""
    tasks = 0
    with GuardedMemory(timeout_s=120) as memory:
        world = memory.world
        case = replace(LARGEST, world=world)
        layer = make_layer(memory, "layer", case)
        layer.forward.timeout_s = layer.backward.timeout_s = 60.0
        one = alone(case, memory.rank)
        chance = random.Random(17 * first + memory.rank)
        for seed in range(first, first + passes):
            case = random_case(seed, world)
            random_routing(layer, case)
            split = seed % 3 == 0
            layer.config = config_of(layer.config, split, seed)
            for exchange in (layer.forward, layer.backward):
                exchange.rows.local.fill_(float("nan"))
            # Nobody puts before all have poisoned their rows.
            memory.barrier()
            time.sleep(nap_s * chance.random())
            with poisoned_buffers():
                if nap_s and seed % 20 == 0:
                    with delays(seed + memory.rank, nap_s / 20) as kernel:
                        answer = layer.run()
                        tasks += kernel.tasks
                else:
                    answer = layer.run()
            layer.check()
            memory.check_guards()
            check_received(layer, seed)
            one.x, one.dy, one.routing = layer.x, layer.dy, layer.routing
            expected = one.run()
            for name in ("out", "dx", "dweight"):
                same = same_bits(getattr(answer, name), getattr(expected, name))
                assert same, f"{case} of seed {seed}, rank {memory.rank}: {name} differs"
        memory.barrier()
    return tasks


def config_of(config: OverlapConfig, split: bool, seed: int) -> OverlapConfig:
    """Grids of one and of several programs, of which some or all put."""
    programs = 1 + seed % 5
    return replace(config, split=split, programs=programs, comm_programs=1 + seed // 5 % programs)


def check_received(layer: Layer, seed: int) -> None:
    """As many rows as the counts that the peers put were written, the first ones, and no other."""
    forward = layer.forward
    bank = int(forward._epoch) % forward.banks
    mine = slice(layer.rank * forward.local_experts, (layer.rank + 1) * forward.local_experts)
    count = int(forward.counts.local[bank][:, mine].sum())
    for exchange in (forward, layer.backward):
        rows = exchange.rows.local[int(exchange._epoch) % exchange.banks]
        assert rows[:count].isfinite().all(), f"seed {seed}: a row is missing in {exchange.name}"
        assert rows[count:].isnan().all(), f"seed {seed}: written behind the {count} rows of {exchange.name}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nap-ms", type=float, default=5.0)
    given = parser.parse_args()
    pool = RankPool()
    done = 0
    while done < given.passes:
        now = min(10, given.passes - done)
        pool.run(fuzz_on_rank, given.first + done, now, given.nap_ms / 1e3, ranks=given.ranks, timeout_s=900)
        done += now
        print(f"{done} passes on {given.ranks} ranks: all finished, no bit wrong", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
