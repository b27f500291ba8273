"""The whole MoE layer on one GPU (EP=1), forward, and with backward, against the fastest peer at hand.

Gate, dispatch, experts, combine; no communication. Ours is `MoELayer(backend="fused")`; peers are those of
`peers.py` that can be had, our unfused layer among them: which is the fastest is decided by the medians of
the same rounds. Nobody drops a token. Parameters are random, so loads are near balance.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from bench.gpu.gpu_report import letters, ratio, spread
from bench.peers import OURS, PEERS, Absent, make_layer
from lancet_kernels.measuring.timing import Clock, in_turn
from lancet_kernels.tuning.workloads import Workload

US = "ours, fused"
PASSES = ("forward", "forward and backward")
GOAL = 1.0


class Layers:
    """Every layer of a workload that can be had here, and why the others cannot."""

    def __init__(self, workload: Workload, device: torch.device, dtype: torch.dtype) -> None:
        self.workload = workload
        shape = workload.tokens, workload.width
        self.x, self.dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        self.layers: dict[str, nn.Module] = {}
        self.absent: dict[str, str] = {}
        for name in (*OURS, *PEERS):
            try:
                self.layers[name] = make_layer(name, workload, dtype, device)
            except Absent as error:
                self.absent[name] = str(error)

    def _forward(self, layer: nn.Module) -> None:
        with torch.no_grad():
            layer(self.x)

    def _both(self, layer: nn.Module) -> None:
        layer(self.x.requires_grad_()).backward(self.dy)

    def _clear(self) -> None:
        """Else the next backward would add to the gradients that are there."""
        self.x.grad = None
        for layer in self.layers.values():
            layer.zero_grad(set_to_none=True)

    def rounds(self, clock: Clock, passes: str, rounds: int, warmup: int) -> dict[str, list[float]]:
        """All contenders in turn, without gradients of earlier calls. -> ms of each."""
        run = self._forward if passes == "forward" else self._both

        def once(name: str) -> float:
            elapsed_ms = clock.once(partial(run, self.layers[name]))
            self._clear()
            return elapsed_ms

        return in_turn(self.layers, once, rounds, warmup)

    def rehearse(self) -> None:
        """Each once: what fails here takes no part. Backward in this thread, where compiling is shared."""
        for name in list(self.layers):
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    self._forward(self.layers[name])
                    self._both(self.layers[name])
            except Exception as error:
                if name == US:
                    raise
                self.absent[name] = f"failed: {type(error).__name__}: {error}"
                del self.layers[name]
            self._clear()


def measure(clock: Clock, layers: Layers, rounds: int, warmup: int) -> Iterator[dict]:
    layers.rehearse()
    w = layers.workload
    rows_flops = 2.0 * w.tokens * w.choices * w.width * (w.wide + w.hidden)
    for passes in PASSES:
        ms = layers.rounds(clock, passes, rounds, warmup)
        flops = rows_flops * (1 if passes == "forward" else 3)
        fastest = min((who for who in ms if who != US), key=lambda who: spread(ms[who])["median"])
        yield {
            "figure": f"MoE layer EP=1, {passes}",
            "sizes": {**letters(w), "activation": w.activation},
            "name": w.name,
            "ms": {who: spread(values) for who, values in ms.items()},
            "tflops": {who: flops / spread(values)["median"] * 1e-9 for who, values in ms.items()},
            "absent": layers.absent,
            "ratios": [ratio(f"rate over {fastest}", ms[US], ms[fastest], GOAL)],
        }
