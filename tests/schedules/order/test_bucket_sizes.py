"""Buckets are as large as the link wants them, unless the last one then ends the step alone."""

from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.schedules.order.bucket_sizes import SUM_OF_BUCKET, bucket_sizes_ms

KB = 1024


def backward(buckets: int, ms: float) -> Program:
    """Weight gradients of 1 KB, one after the other, each summed in a bucket of its own."""
    tensors = {"in": TensorSpec("in", (1,), "int8", 0)}
    instructions = []
    for n in range(buckets):
        for name, shape in ((f"g{n}", (256,)), (f"s{n}.0", (256,))):
            tensors[name] = TensorSpec(name, shape, "float32")
        before = (f"g{n - 1}",) if n else ("in",)
        made = Instruction(f"g{n}", "made.up", before, (f"g{n}",), phase=Phase.BACKWARD, milliseconds=ms)
        summed = Instruction(
            f"s{n}", SUM_OF_BUCKET, (f"g{n}",), (f"s{n}.0",), Kind.ALL_REDUCE, Phase.BACKWARD, bytes=KB
        )
        instructions += [made, summed]
    ends = tuple(f"s{n}.0" for n in range(buckets))
    return Program("made", tuple(instructions), tensors, ("in",), ends)


def link(latency_ms: float):
    """A cost model: a latency, and 1 ms for each KB."""

    def cost(instruction, _tensors) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        return latency_ms + instruction.bytes / KB

    return cost


def test_a_dear_message_wants_large_buckets() -> None:
    sizes = bucket_sizes_ms(backward(16, 1.0), link(10.0), KB)
    assert [*sizes] == [KB, 4 * KB, 16 * KB], "64 KB would be the same as 16"
    assert sizes[16 * KB] == 16 + 10 + 16
    assert sizes[KB] == 1 + 16 * 11
    assert min(sizes, key=sizes.__getitem__) == 16 * KB


def test_the_end_of_the_step_wants_small_ones() -> None:
    sizes = bucket_sizes_ms(backward(16, 2.0), link(0.1), KB)
    assert sizes[KB] < sizes[4 * KB] < sizes[16 * KB]


def test_microbatches_share_the_sums() -> None:
    one, four = (bucket_sizes_ms(backward(16, 1.0), link(10.0), KB, sharing) for sharing in (1, 4))
    assert four[16 * KB] == 16 + (one[16 * KB] - 16) / 4
