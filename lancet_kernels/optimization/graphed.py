"""A whole training step, forward and backward, as one CUDA graph: the host launches no kernels.

    step = lancet_kernels.optimize(TrainingStep(model, ranks), inputs, backend="fused", lowering="fused")
    graphed = GraphedStep(step, inputs)
    for tokens, targets in batches:
        result = graphed(tokens, targets)      # replays; parameters' .grad are filled
        optimizer.step()

Fused MoE layers read sizes and count their passes on the device, so that a replay is a further pass. Layers
on streams cannot be captured on more than one rank: their all-to-alls need sizes on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.paired import loss_of

# As torch demands before a capture, for everything that is created on first use.
WARMUP_STEPS = 3


class GraphedStep:
    """A captured step. A call copies the inputs into the graph and replays it.

    Args:
        step: from `optimize`, on a CUDA device; its loss is the result, or the first number of it that
            requires a gradient. inputs: with the shapes and dtypes of every later call.
    Collective: all ranks create and call it together. The constructor runs the step `WARMUP_STEPS` times and
    clears its gradients; no forward of the step may wait for its backward then.
    Raises: UserError for another device, or if an instruction would make the host wait for the device.
    """

    def __init__(self, step: OptimizedModule, inputs: Sequence[object]) -> None:
        check_capturable(step)
        name = class_name(step.module)
        self.step = step
        self._inputs = pytree.tree_map_only(Tensor, torch.clone, tuple(inputs))
        self._device = next(step.module.parameters()).device
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                loss_of(step(*self._inputs), name).backward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # Gradients that the capture makes live in the graph's memory, and every replay overwrites them.
        step.module.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            result = step(*self._inputs)
            loss_of(result, name).backward()
        self._result = pytree.tree_map_only(Tensor, Tensor.detach, result)

    def __call__(self, *inputs: object) -> object:
        """Forward and backward. -> what the step returns, valid until the next call; gradients in `.grad`.

        Raises: UserError for inputs of other shapes, CommunicationError for a peer that stayed away in this
        step or in one before.
        """
        targets, sources = pytree.tree_leaves(self._inputs), pytree.tree_leaves(tuple(inputs))
        if _shapes(targets) != _shapes(sources):
            raise UserError(
                "inputs of a captured step",
                got=_shapes(sources),
                expected=_shapes(targets),
                do="give inputs of the captured shapes, or call the step itself",
            )
        for target, source in zip(targets, sources, strict=True):
            if isinstance(target, Tensor):
                target.copy_(source, non_blocking=True)
        self._graph.replay()
        for layer in self.step.fused_layers:
            layer.watch()
        return self._result


def check_capturable(step: OptimizedModule) -> None:
    """Raise UserError unless a CUDA graph can capture the step."""
    if not hasattr(step, "host_waits"):
        raise UserError(
            "step to capture", got=class_name(step), expected="one of optimize()", do="call it first"
        )
    device = next(step.module.parameters()).device
    if device.type != "cuda":
        raise UserError("device of a captured step", got=device, expected="a CUDA device", do="call the step")
    if step.host_waits:
        more = f" and {len(step.host_waits) - 3} more" if len(step.host_waits) > 3 else ""
        raise UserError(
            "step to capture",
            got=f"instructions that make the host wait: {', '.join(step.host_waits[:3])}{more}",
            expected="none",
            do="optimize(..., backend='fused', lowering='fused'), or call the step itself",
        )


def _shapes(leaves: Sequence[object]) -> list[object]:
    return [(list(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
