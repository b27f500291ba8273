"""What do a training step's instructions cost on this machine? Measured once per op and shape, then
remembered.

Lancet's caching op profiler and communication cost model (section 3). Times are kept in a JSON file
(`graph.measured`); rank 0 reads and writes it, and all ranks get what it has. Instructions that look
alike share one time: the median of all of them.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from lancet_kernels.graph.communication import CommunicationModel
from lancet_kernels.graph.from_fx import is_collective, is_instruction
from lancet_kernels.graph.measure import measure_communication, measure_nodes
from lancet_kernels.graph.measured import MeasuredTimes, measurement_key
from lancet_kernels.graph.program import Instruction, Kind, Program
from lancet_kernels.kernels.tuning import cache_folder
from lancet_kernels.ops.groups import group_of, group_rank, group_size
from lancet_kernels.ops.link import link


def default_cache() -> Path:
    """Where measured times are kept unless said otherwise: the user's cache folder."""
    return cache_folder() / "times.json"


class Profiler:
    """Measured costs on the ranks of `group`. All methods are collective.

    Args: cache: file of remembered times; None: the user's cache folder.
    """

    def __init__(self, group: str, device: torch.device, cache: str | Path | None = None) -> None:
        self.group = group
        self.times = MeasuredTimes(cache or default_cache())
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        threads = torch.get_num_threads()
        self._where = (
            f"{device.type} {kind or platform.machine()}, {threads} threads, "
            f"{group_size(group)} ranks, torch {torch.__version__}"
        )

    def program(self, module: fx.GraphModule, inputs: Sequence[object]) -> Program:
        """The Program of a graph, each computation with its measured time.

        Args: inputs: one per placeholder of the graph.
        """
        program = Program.from_fx(module)
        # Fused launches say themselves what they take: alone, without peers at work, they cannot be timed.
        given = {node.name for node in module.graph.nodes if "milliseconds" in node.meta}
        keys = {
            i.name: self._key(i, program)
            for i in program.instructions
            if i.kind is Kind.COMPUTE and i.name not in given
        }
        known = self._from_first({key: self.times.get(key) for key in keys.values()})
        if any(milliseconds is None for milliseconds in known.values()):
            known = self._measure(module, inputs, keys)
        return Program.from_fx(module, lambda node: _cost(node, keys, known))

    def _measure(
        self, module: fx.GraphModule, inputs: Sequence[object], keys: dict[str, str]
    ) -> dict[str, float]:
        measured = measure_nodes(module, inputs, self.group)
        by_key: dict[str, list[float]] = {}
        for name, key in keys.items():
            by_key.setdefault(key, []).append(measured[name])
        found = {key: statistics.median(times) for key, times in by_key.items()}
        self._remember(found)
        return found

    def communication(self, program: Program, width: int) -> CommunicationModel:
        """Measured times of the collectives of a Program, up to the sizes it has.

        Args: width: of the rows of its all-to-all buffers.
        """
        largest = {
            kind.value: max((int(program.instructions[i].bytes) for i in program.positions(kind)), default=0)
            for kind in (Kind.ALL_TO_ALL, Kind.ALL_REDUCE)
        }
        wire = "" if link.gbps is None else f", emulated link {link.gbps:g} Gbit/s"
        prefix = f"communication up to {largest}, rows of {width}, {self._where}{wire}: "
        known = self._from_first({key: ms for key, ms in self.times.items() if key.startswith(prefix)})
        if not known:
            model = measure_communication(largest, width, self.group)
            known = {
                f"{prefix}{collective} {size:.0f}": ms
                for (collective, _), points in model.points.items()
                for size, ms in points
            }
            self._remember(known)
        samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for key, ms in known.items():
            collective, size = key.removeprefix(prefix).split()
            samples.setdefault((collective, "world"), []).append((float(size), ms))
        return CommunicationModel.measured(samples)

    def _key(self, instruction: Instruction, program: Program) -> str:
        attributes = ", ".join(f"{k}={v}" for k, v in sorted(instruction.attributes.items()))
        return f"{measurement_key(instruction, program.tensors, self._where)} [{attributes}]"

    def _from_first(self, values: dict[str, float | None]) -> dict[str, float | None]:
        """What rank 0 knows, on every rank: all must decide alike whether to measure."""
        if not self.group:
            return values
        process_group = group_of(self.group)
        box = [values if group_rank(self.group) == 0 else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(process_group, 0), group=process_group)
        return box[0]

    def _remember(self, times: dict[str, float]) -> None:
        for key, milliseconds in times.items():
            self.times.put(key, milliseconds)
        if group_rank(self.group) == 0:
            self.times.save()


def _cost(node: fx.Node, keys: dict[str, str], known: dict[str, float]) -> float | None:
    if not is_instruction(node) or is_collective(node):
        return None
    return node.meta["milliseconds"] if "milliseconds" in node.meta else known[keys[node.name]]
