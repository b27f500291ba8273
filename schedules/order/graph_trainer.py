"""The order of torchtitan's GraphTrainer (`ep_overlap_pass`) for a step on two halves of the batch, as a
baseline: layer by layer, the two exchanges of each kind as a pair.

    half 0 computes  A0    s0    E0                 A, E: what the dispatch and the combine need
    half 1 computes     A1    s1    E1              s: a shared expert, which waits for no exchange
    exchanges          d0 d1       c0 c1

What an exchange needs is computed, then it is sent, for half 0 and then for half 1 (in a backward for 1 and
then for 0). Behind a pair comes all else of the layer that is ready without waiting: shared experts, weight
gradients. The rest of a layer comes last, before the next one begins: so the last exchange of a layer travels
beside nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lancet_kernels.graph.program import Kind, Phase, Program, whole_name

_Layer = tuple[str, Phase]


def order_by_layers(program: Program, layers: Mapping[str, str]) -> list[int]:
    """Positions of a Program cut into two halves (`cut.duplex`) in this order.

    Args: layers: by name of an uncut instruction, the layer that it is in; "": none.
    """
    names = [instruction.name for instruction in program.instructions]
    half = [name.removeprefix(f"{whole_name(name)}_part") for name in names]
    own: dict[_Layer, list[int]] = {}
    outside = []
    for i, instruction in enumerate(program.instructions):
        layer = layers.get(whole_name(instruction.name), "")
        if layer and half[i] in ("0", "1"):
            own.setdefault((layer, instruction.phase), []).append(i)
        else:
            outside.append(i)
    order = _Order(program)
    for (_, phase), positions in own.items():
        halves = [[i for i in positions if half[i] == n] for n in ("0", "1")]
        if phase is Phase.BACKWARD:
            halves.reverse()
        exchanges = ([i for i in one if program.instructions[i].kind is Kind.ALL_TO_ALL] for one in halves)
        for pair in zip(*exchanges, strict=True):
            for exchange in pair:
                order.add(exchange)
            order.fill([i for one in halves for i in one], waits=False)
        for one in halves:
            order.fill(one, waits=True)
        order.fill(outside, waits=True)
    order.fill(range(len(program)), waits=True)
    return order.positions


class _Order:
    """positions: of instructions, each behind what it needs."""

    def __init__(self, program: Program) -> None:
        self.positions: list[int] = []
        self._dependencies: Sequence[Sequence[int]] = program.dependencies
        self._communicates = [i.kind.is_communication for i in program.instructions]
        self._is_in = [False] * len(program)
        self._awaited: set[int] = set()
        """Messages that something in the order has waited for."""

    def add(self, i: int) -> None:
        """An instruction behind all that it still needs."""
        pending = [i]
        while pending:
            missing = [j for j in self._dependencies[pending[-1]] if not self._is_in[j]]
            if missing:
                pending += reversed(missing)
            elif not self._is_in[i := pending.pop()]:
                self._is_in[i] = True
                self.positions.append(i)
                self._awaited.update(self._dependencies[i])

    def fill(self, candidates: Iterable[int], waits: bool) -> None:
        """Add those that are ready, or become ready by that. Args: waits: also messages, and what waits for
        one that nothing has waited for."""
        candidates, before = [*candidates], -1
        while len(self.positions) > before:
            before = len(self.positions)
            candidates = [i for i in candidates if not self._is_in[i]]
            for i in candidates:
                if all(self._is_in[j] for j in self._dependencies[i]) and (waits or not self._waits(i)):
                    self.add(i)

    def _waits(self, i: int) -> bool:
        return self._communicates[i] or any(
            self._communicates[j] and j not in self._awaited for j in self._dependencies[i]
        )
