"""How large should the buckets be in which gradients are summed? Each size is simulated.

Larger ones use the wire better, smaller ones start earlier and leave less at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lancet_kernels.graph.costs.costs import Cost, durations
from lancet_kernels.graph.program.program import Instruction, Program
from lancet_kernels.schedules.order.list_schedule import ListScheduler, Policy, Work
from lancet_kernels.schedules.time.simulate import run

SUM_OF_BUCKET = "_c10d_functional.all_reduce_coalesced"
TIMES_LARGER = (1, 4, 16, 64)
"""The sizes that are tried, in buckets of the given Program."""


def bucket_sizes_ms(program: Program, cost: Cost, bucket_bytes: int, sharing: int = 1) -> dict[int, float]:
    """Milliseconds of a step by bytes of its buckets, each size in one list schedule.

    Args: program: whose buckets have `bucket_bytes`. sharing: microbatches that share the sums.
    """
    result: dict[int, float] = {}
    numbers = set()
    for times in TIMES_LARGER:
        merged = _merged(program, cost, times * bucket_bytes, sharing)
        number = sum(i.op == SUM_OF_BUCKET for i in merged.instructions)
        if number in numbers:
            break
        numbers.add(number)
        ms = durations(merged, cost)
        order = ListScheduler(Work(merged, ms), Policy(oldest_first=True), None).schedule()
        result[times * bucket_bytes] = run(merged, ms, order).iteration_ms
    return result


def _merged(program: Program, cost: Cost, bucket_bytes: int, sharing: int) -> Program:
    """The Program with sums joined, one after the other, until they have so many bytes."""
    buckets: list[list[Instruction]] = []
    open_bucket: dict[tuple[object, str], tuple[list[Instruction], float]] = {}
    for instruction in program.instructions:
        if instruction.op != SUM_OF_BUCKET:
            continue
        key = instruction.attributes.get("group"), program.tensors[instruction.outputs[0]].dtype
        bucket, size = open_bucket.get(key, ([], bucket_bytes))
        if size >= bucket_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(instruction)
        open_bucket[key] = bucket, size + instruction.bytes
    joined = {bucket[-1].name: bucket for bucket in buckets if len(bucket) > 1}
    gone = {one.name for bucket in joined.values() for one in bucket}
    instructions = []
    for instruction in program.instructions:
        if instruction.name in joined:
            instructions.append(_joined(joined[instruction.name], program, cost, sharing))
        elif instruction.name not in gone:
            instructions.append(instruction)
    return replace(program, instructions=tuple(instructions))


def _joined(bucket: Sequence[Instruction], program: Program, cost: Cost, sharing: int) -> Instruction:
    one = replace(
        bucket[-1],
        inputs=tuple(t for each in bucket for t in each.inputs),
        outputs=tuple(t for each in bucket for t in each.outputs),
        bytes=sum(each.bytes for each in bucket),
        milliseconds=None,
    )
    return replace(one, milliseconds=cost(one, program.tensors) / sharing)
