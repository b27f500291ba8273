"""Fused passes of random routings, sizes and delays: do all finish, with every row where it belongs?

    TRITON_INTERPRET=1 python -m tests.lancet_kernels.kernels.fuzz_routings --ranks 2 --passes 5000

Every pass has its own numbers of tokens on each rank (0 to 6), routing, capacity and grid; every fifth one
has a backward. Tiles have 4 rows, so that segments lie in several tiles, and tiles hold rows of several
sources; groups have 2 tiles. Up to three passes are open at once, and end in any order. Naps fall before
passes, between tasks and before releases; nothing else keeps ranks in step.

Inputs are small integers, and values before the activation multiples of 16, where gelu is exactly relu: all
sums are exact in float32 in any order, so that every result has one right value, which float64 gives.

A pass is wrong if a row is missing or differs in a bit from its source's, if anything was written where no
open pass has rows or beside a buffer, or if out or a gradient differs from the right value. Rows and results
are looked at, and poisoned, before they are given back. A pass hangs if a wait runs out of time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.overlap import moe_backward, moe_forward
from lancet_kernels.kernels.overlap_data import Experts, Routing, SavedPass
from lancet_kernels.kernels.protocol import tasks
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.ops.moe.gates.base import slots_in_token_order
from tests.lancet_kernels.kernels.overlap_cases import make_routing
from tests.lancet_kernels.kernels.overlap_ranks import GuardedMemory, same_bits
from tests.poisoned_buffers import poisoned_buffers
from tests.ranks import RankPool

TOKENS, CHOICES, WIDTH, HIDDEN = 6, 2, 8, 8
TILE = OverlapConfig(GemmConfig(4, 8, 8, 1, 1), put_rows=2, put_block=8, reduce_tokens=4, reduce_block=8)
BACKWARD_EVERY = 5
WAIT_S = 120.0


@dataclass(frozen=True)
class Inputs:
    """What a rank brings to a pass."""

    x: Tensor
    dy: Tensor
    routing: Routing


def small_integers(chance: random.Random, most: int, *shape: int) -> Tensor:
    """float32 integers from -most to most."""
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def experts_of_all(experts: int) -> Experts:
    """All experts of all ranks."""
    chance = random.Random(1)
    w1, w2 = (
        small_integers(chance, 1, experts, WIDTH, HIDDEN),
        small_integers(chance, 1, experts, HIDDEN, WIDTH),
    )
    return Experts(w1, None, w2, None, "gelu")


def inputs_of(seed: int, rank: int, experts: int) -> Inputs:
    """Inputs of one rank in pass `seed`: any rank can recompute them."""
    shared = random.Random(seed)
    kind, capacity = shared.choice(("even", "few", "one")), shared.choice((1, 3, TOKENS, TOKENS))
    nobody = shared.random() < 0.03
    favourite = shared.randrange(experts)
    chance = random.Random(f"{seed} {rank}")
    tokens = 0 if nobody else chance.randint(0, TOKENS)
    pools = {"even": range(experts), "few": range(favourite % 2, experts, 2)}
    expert = torch.tensor(
        [
            [favourite, (favourite + 1) % experts] if kind == "one" else chance.sample(pools[kind], CHOICES)
            for _ in range(tokens)
        ],
        dtype=torch.int64,
    ).view(tokens, CHOICES)
    slot, used = slots_in_token_order(expert, torch.zeros(experts, dtype=torch.int64))
    weight = small_integers(chance, 3, tokens, CHOICES)
    x, dy = 16 * small_integers(chance, 16, tokens, WIDTH), small_integers(chance, 4, tokens, WIDTH)
    return Inputs(x, dy, make_routing(expert, slot, weight, used, capacity))


def rows_for(rank: int, inputs: list[Inputs], local: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a rank receives in that pass, in order: rows of x, of dy, their weights, and local experts."""
    x, dy = [torch.empty(0, WIDTH)], [torch.empty(0, WIDTH)]
    weights, experts = [torch.empty(0)], [torch.empty(0, dtype=torch.int64)]
    for e in range(rank * local, (rank + 1) * local):
        for source in inputs:
            routing = source.routing
            first = int(routing.count[:e].sum())
            choice = routing.choice[first : first + int(routing.count[e])].long()
            token = choice // CHOICES
            x.append(source.x[token])
            dy.append(source.dy[token])
            weights.append(routing.weight.view(-1)[choice])
            experts.append(torch.full((len(choice),), e - rank * local))
    return torch.cat(x), torch.cat(dy), torch.cat(weights), torch.cat(experts)


def expert_gradient(dy: Tensor, pre: Tensor, w2: Tensor) -> Tensor:
    """Gradient of the value before the activation, row by row: gelu' of a multiple of 16 is 0, 1/2 or 1."""
    slope = (pre > 0).double() + 0.5 * (pre == 0).double()
    return torch.einsum("nd,nfd->nf", dy, w2) * slope


def right_values(rank: int, inputs: list[Inputs], all_experts: Experts, local: int) -> dict[str, Tensor]:
    """out, dx, dweight of this rank's tokens, and the gradients of its experts, in float64."""
    w1, w2 = all_experts.w1.double(), all_experts.w2.double()
    own, routing = inputs[rank], inputs[rank].routing
    kept = (routing.row >= 0).view(-1)
    expert, weight = routing.expert.view(-1)[kept], routing.weight.view(-1)[kept].double()
    token = (torch.arange(kept.numel()) // CHOICES)[kept]
    x, dy = own.x.double()[token], own.dy.double()[token]
    pre = torch.einsum("nd,ndf->nf", x, w1[expert])
    y = torch.einsum("nf,nfd->nd", pre.relu(), w2[expert])
    dh = expert_gradient(dy * weight[:, None], pre, w2[expert])
    zeros = torch.zeros_like(own.x, dtype=torch.float64)
    dweight = torch.zeros(kept.numel(), dtype=torch.float64)
    dweight[kept] = (dy * y).sum(1)
    rows, dy_rows, weights, of = rows_for(rank, inputs, local)
    rows, dy_rows, mine = rows.double(), dy_rows.double() * weights[:, None], of + rank * local
    pre_rows = torch.einsum("nd,ndf->nf", rows, w1[mine])
    dh_rows = expert_gradient(dy_rows, pre_rows, w2[mine])
    one_hot = torch.nn.functional.one_hot(of, local).double()
    return {
        "out": zeros.index_add(0, token, y * weight[:, None]),
        "dx": zeros.index_add(0, token, torch.einsum("nf,ndf->nd", dh, w1[expert])),
        "dweight": dweight.view(-1, CHOICES),
        "dw1": torch.einsum("ne,nd,nf->edf", one_hot, rows, dh_rows),
        "dw2": torch.einsum("ne,nf,nd->efd", one_hot, pre_rows.relu(), dy_rows),
    }


class Fuzz:
    """The passes of one rank through one pair of exchanges."""

    def __init__(
        self,
        memory: GuardedMemory,
        local: int,
        passes: int,
        nap_s: float,
        seed: int,
    ) -> None:
        self.memory, self.local, self.rank, self.world = memory, local, memory.rank, memory.world
        self.experts = self.world * local
        self.all_experts = experts_of_all(self.experts)
        mine = slice(self.rank * local, (self.rank + 1) * local)
        self.own_experts = Experts(self.all_experts.w1[mine], None, self.all_experts.w2[mine], None, "gelu")
        self.chance, self.nap_s = random.Random(f"{seed} {self.rank}"), nap_s
        # Room for one more whatever the others take and wherever they lie.
        most = self.world * TOKENS * min(CHOICES, local)
        sizes = {
            "local_experts": local, "send_rows": TOKENS * CHOICES, "width": WIDTH, "dtype": torch.float32,
            "receive_rows": most, "chunk_rows": TILE.gemm.block_m, "timeout_s": WAIT_S, "passes": passes,
            "room": (2 * passes - 1) * most,
        }  # fmt: skip
        self.forward, self.backward = (Exchange(memory, f"{way}{seed}", **sizes) for way in ("x", "dy"))
        for exchange in (self.forward, self.backward):
            for region in (exchange.rows, exchange.results):
                region.local.fill_(float("nan"))
        memory.barrier()
        # By exchange and epoch.
        self.expected_rows: dict[tuple[int, int], Tensor] = {}
        self.expected_weights: Tensor | None = None
        self.open: list[tuple[int, SavedPass]] = []
        self.tasks = 0

    def nap(self, chance: float) -> None:
        if self.nap_s and self.chance.random() < chance:
            time.sleep(self.nap_s * self.chance.random())

    def run(self, seed: int) -> None:
        """Forward `seed`, and the end of some that are open. The ranks end the same ones.

        Raises AssertionError if it is wrong, CommunicationError if a wait ran out of time.
        """
        self.seed = seed
        inputs, config = self.inputs(seed), replace(TILE, programs=1 + seed % 5)
        own = inputs[self.rank]
        self.expect(self.forward, rows_for(self.rank, inputs, self.local)[0])
        self.nap(0.5)
        with poisoned_buffers():
            out, saved = moe_forward(self.forward, own.x, own.routing, self.own_experts, config)
            self.forward.check()
        self.memory.check_guards()
        self.compare(seed, {"out": out})
        self.open.append((seed, saved))
        shared = random.Random(f"{seed} ends")
        for _ in range(max(len(self.open) + 1 - self.forward.passes, shared.randint(0, len(self.open)))):
            self.end(*self.open.pop(shared.randrange(len(self.open))))

    def end(self, seed: int, saved: SavedPass) -> None:
        """Every fifth pass has a backward."""
        self.seed = seed
        if seed % BACKWARD_EVERY == 0:
            inputs, config = self.inputs(seed), replace(TILE, programs=1 + seed % 5)
            own = inputs[self.rank]
            _, dy_rows, self.expected_weights, _ = rows_for(self.rank, inputs, self.local)
            self.expect(self.backward, dy_rows)
            self.nap(0.5)
            with poisoned_buffers():
                gradients = moe_backward(
                    self.forward, saved, self.backward, own.dy, own.routing, self.own_experts, config
                )
                self.backward.check()
            self.compare(seed, {name: getattr(gradients, name) for name in ("dx", "dweight", "dw1", "dw2")})
        self.forward.release(saved.opened)
        self.memory.check_guards()

    def inputs(self, seed: int) -> list[Inputs]:
        return [inputs_of(seed, rank, self.experts) for rank in range(self.world)]

    def expect(self, exchange: Exchange, rows: Tensor) -> None:
        """Note which rows the next pass brings."""
        self.expected_rows[id(exchange), exchange.begun + 1] = rows

    def compare(self, seed: int, answers: dict[str, Tensor]) -> None:
        right = right_values(self.rank, self.inputs(seed), self.all_experts, self.local)
        for name, answer in answers.items():
            assert torch.equal(answer.double(), right[name]), self.say(f"{name} is wrong")

    def say(self, what: str) -> str:
        return f"pass {self.seed}, {self.world} ranks, {self.local} experts each, rank {self.rank}: {what}"

    def look_and_poison(self, exchange: Exchange, place: int, words: Tensor, backward: bool) -> None:
        """Before rows are given back: they are the sources' rows, and nothing is where no pass has any."""
        expected = self.expected_rows.pop((id(exchange), int(words[0])))
        begin, end = (0, len(expected)) if backward else exchange.occupied[place].tolist()
        rows = exchange.rows.local
        if backward:
            got = exchange.row_weights.local[: len(expected)]
            assert same_bits(got, self.expected_weights), self.say(f"weights of {exchange.name}")
        assert same_bits(rows[begin:end], expected), self.say(f"rows of {exchange.name}")
        rows[begin:end] = float("nan")
        for kept in exchange._kept.values():
            kept[begin:end] = float("nan")
        free = torch.ones(len(rows), dtype=torch.bool)
        for first, last in exchange.occupied.tolist():
            free[first:last] = False
        assert rows[free].isnan().all(), self.say(f"written where no pass of {exchange.name} has rows")
        exchange.results.local.fill_(float("nan"))
        self.nap(0.3)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, releases and tasks go through this object."""
        give_back, find_task = Exchange._give_back, tasks.gemm_task

        def look_and_give(exchange: Exchange, place: int, words: Tensor, *, backward: bool) -> None:
            self.look_and_poison(exchange, place, words, backward)
            give_back(exchange, place, words, backward=backward)

        def nap_and_find(*given):
            self.tasks += 1
            self.nap(0.05)
            return find_task(*given)

        nap_and_find.__triton_builtin__ = True
        # Indices of these sizes cannot overflow; looking for it takes half of the interpreter's time.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        with (
            mock.patch.object(Exchange, "_give_back", look_and_give),
            mock.patch.object(tasks, "gemm_task", nap_and_find),
            # An expert here has not 8 tiles, but several groups of 2.
            mock.patch.object(tasks, "GROUP", tl.constexpr(2)),
            mock.patch.object(interpreter.interpreter_builder, "options", options),
        ):
            yield


def fuzz_on_rank(first: int, passes: int, nap_s: float) -> int:
    """-> how many tasks were launched. Raises for the first pass that is wrong or does not finish."""
    with GuardedMemory(timeout_s=WAIT_S) as memory:
        local = 1 + first // passes % 2 if memory.world > 2 else 2
        fuzz = Fuzz(memory, local, passes=1 + first // passes % 3, nap_s=nap_s, seed=first)
        with fuzz.watched():
            for seed in range(first, first + passes):
                fuzz.run(seed)
            for held in fuzz.open:
                fuzz.end(*held)
        memory.barrier()
    return fuzz.tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first pass")
    parser.add_argument("--at-once", type=int, default=50, help="passes through one pair of exchanges")
    parser.add_argument("--nap-ms", type=float, default=5.0, help="longest nap")
    given = parser.parse_args()
    pool = RankPool(given.ranks)
    done = tasks = 0
    begin = time.monotonic()
    while done < given.passes:
        first = given.first + done
        results = pool.run(
            fuzz_on_rank, first, given.at_once, given.nap_ms / 1e3,
            ranks=given.ranks, timeout_s=WAIT_S * given.at_once, collective_timeout_s=WAIT_S,
        )  # fmt: skip
        done, tasks = done + given.at_once, tasks + sum(results)
        print(
            f"{done} passes on {given.ranks} ranks, {tasks} tasks, {time.monotonic() - begin:.0f} s: "
            "none hung, nothing wrong",
            flush=True,
        )
    pool.close()


if __name__ == "__main__":
    main()
