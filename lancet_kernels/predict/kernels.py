"""Time and memory of a captured step's Program with the fused kernels of a compiler.

All instructions stay, so that ranges of its graph can be cut; fusion changes bytes only:

- A group of element-wise ops is one pass over memory. Its last member has the bytes that the group reads from
  outside and writes for others; the others cost a launch, and tensors inside the group take no memory.
- A dispatcher sorts received rows by expert, and back: `SORTS` is the operand of the product before or behind
  that sort.
- A dispatcher that sends tokens reads them in place, and returns each token once.
- Routing weights are applied inside the experts, where their gradients cost next to nothing
  (`model_step.weights_inside_experts`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lancet_kernels.graph.costs.clusters import Dispatcher
from lancet_kernels.graph.costs.costs import LAUNCHES, SORTS, works_on_received_rows
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program import Instruction, Kind, Program, whole_name
from lancet_kernels.predict.recomputation import fused_groups, without_views


@dataclass(frozen=True)
class Kernels:
    """Changes of a step's Program by a dispatcher and fused kernels.

    carrier: the dispatcher. top_k: experts per token. inside: tensors that no fused kernel writes to memory.
    busiest: rows of the busiest rank, relative to those of the Program. eager: no element-wise op is fused.
    """

    carrier: Dispatcher
    top_k: int
    inside: Collection[str] = ()
    busiest: float = 1.0
    eager: bool = False

    def of(self, program: Program) -> tuple[Program, Kernels]:
        """The Program of a whole step as kernels, and these with the tensors `inside` them."""
        viewless = without_views(program)
        changed = {i.name: i for i in program.instructions}
        inside: set[str] = set()
        for members in () if self.eager else fused_groups(viewless):
            own = {t for i in members for t in i.outputs}
            names = {i.name for i in members}
            read = {t for i in members for t in i.inputs if t not in own}
            written = {
                t
                for t in own
                if t in viewless.output_set
                or any(viewless.instructions[c].name not in names for c in viewless.consumers[t])
            }
            inside |= own - written
            moved = float(sum(viewless.tensors[t].content_bytes for t in read | written))
            for i in members:
                last = i is members[-1]
                attributes = {**i.attributes, LAUNCHES: not last}
                changed[i.name] = replace(
                    changed[i.name], bytes=moved if last else 0.0, attributes=attributes
                )
        for i in viewless.instructions:
            if i.op == "lancet.combine_dweight":
                size = float(viewless.tensors[i.outputs[0]].content_bytes)
                changed[i.name] = replace(changed[i.name], bytes=size)
            if i.kind is Kind.ALL_TO_ALL:
                name, tensor = self._sorting(viewless, i)
                if name:
                    one = changed[name]
                    operands = [program.storage[t] for t in (*one.inputs, *one.outputs)]
                    changed[name] = replace(one, attributes={**one.attributes, SORTS: operands.index(tensor)})
        kernels = replace(self, inside=frozenset(inside))
        return kernels.in_memory(replace(program, instructions=tuple(changed.values()))), kernels

    @staticmethod
    def _sorting(program: Program, message: Instruction) -> tuple[str, str]:
        """The first reader of received rows, or the producer of returned ones, and the tensor."""
        if message.attributes.get("to_experts"):
            tensor = message.outputs[0]
            readers = (program.instructions[i] for i in sorted(program.consumers[tensor]))
            others = [i for i in readers if i.kind is Kind.COMPUTE]
        else:
            tensor = message.inputs[0]
            others = [program.instructions[program.producer[tensor]]] if tensor in program.producer else []
        return (others[0].name, tensor) if others else ("", "")

    def in_memory(self, program: Program) -> Program:
        """The Program, cut or not, with the sizes of tensors that kernels store."""
        tensors = dict(program.tensors)
        for t, spec in tensors.items():
            if spec.bytes and whole_name(t) in self.inside:
                tensors[t] = replace(spec, bytes=0)
        for i in program.instructions:
            has_received_rows = i.attributes.get("to_experts") or (
                works_on_received_rows(i) and facts(i.op).grouped_gemm != "weight"
            )
            if has_received_rows:
                for t in i.outputs:
                    if tensors[t].bytes:
                        tensors[t] = replace(tensors[t], bytes=int(tensors[t].content_bytes * self.busiest))
            if self.carrier.sends == "rows":
                continue
            if i.op == "lancet.dispatch":
                tensors |= {t: replace(tensors[t], bytes=0) for t in i.outputs}
            elif i.kind is Kind.ALL_TO_ALL and not i.attributes.get("to_experts"):
                size = tensors[i.outputs[0]].content_bytes // self.top_k
                tensors |= {t: replace(tensors[t], bytes=size) for t in i.outputs}
        return replace(program, tensors=tensors)

    def with_copies(self, program: Program) -> Program:
        """The Program with the second copy of rows that are sorted after an exchange, or back before it."""
        if self.carrier.sends == "tokens" or not self.carrier.receive_passes:
            return program
        tensors = dict(program.tensors)
        read: dict[str, tuple[str, ...]] = {}
        written: dict[str, tuple[str, ...]] = {}
        for i in program.instructions:
            if i.kind is Kind.ALL_TO_ALL:
                to_experts = i.attributes.get("to_experts")
                name, tensor = self._sorting(program, i)
                copy = f"{tensor} unsorted"
                if name and copy not in tensors:
                    tensors[copy] = replace(tensors[tensor], name=copy, alias_of=None)
                    written[i.name if to_experts else name] = read[name if to_experts else i.name] = (copy,)
        instructions = []
        for i in program.instructions:
            inputs, outputs = (*i.inputs, *read.get(i.name, ())), (*i.outputs, *written.get(i.name, ()))
            instructions.append(replace(i, inputs=inputs, outputs=outputs))
        return replace(program, instructions=tuple(instructions), tensors=tensors)
