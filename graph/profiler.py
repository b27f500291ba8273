"""What do a training step's instructions cost on this machine? Measured once per op and shape, then
remembered; and what does a plan add to them?

Lancet's caching op profiler and communication cost model (section 3). Times are kept in a JSON file
(`graph.measured`); rank 0 reads and writes it, and all ranks get what it has. Instructions that look
alike share one time: the median of all of them.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from lancet_kernels.graph.communication import CommunicationModel
from lancet_kernels.graph.costs import MeasuredCosts, collective_of
from lancet_kernels.graph.device_costs import DeviceCosts, DeviceCostsFile
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.measure import measure_communication, measure_nodes
from lancet_kernels.graph.measure_device import (
    cuts_to_measure,
    measure_copies,
    measure_launch,
    measure_parts,
)
from lancet_kernels.graph.measured import MeasuredTimes, measurement_key
from lancet_kernels.graph.program import Instruction, Kind, Program
from lancet_kernels.kernels.cache_folder import cache_folder
from lancet_kernels.ops.groups import Groups, Value, from_first_rank, group_rank, group_size
from lancet_kernels.ops.link import link

DEVICE_COSTS = "device_costs.json"
"""The file of device costs, beside that of the times."""


def default_cache() -> Path:
    """Where measured times are kept unless said otherwise: the user's cache folder."""
    return cache_folder() / "times.json"


class Profiler:
    """Measured costs on all ranks of `groups`. All methods are collective.

    Args: cache: file of remembered times; None: the user's cache folder.
    """

    def __init__(self, groups: Groups, device: torch.device, cache: str | Path | None = None) -> None:
        self.groups, self.device = groups, device
        file = Path(cache or default_cache())
        self.times = MeasuredTimes(file)
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        threads = torch.get_num_threads()
        self.device_model = f"{device.type} {kind or platform.machine()}, {threads} threads"
        self._where = f"{self.device_model}, {_ranks(groups)}, torch {torch.__version__}"
        self._device_costs = DeviceCostsFile(file.with_name(DEVICE_COSTS))

    def program(self, module: fx.GraphModule, inputs: Sequence[object]) -> Program:
        """The Program of a graph, each computation with its measured time, each all-to-all with the bytes
        that really travel.

        What a collective costs the computing thread is added to the instruction that makes its input and to
        the one that reads its result.

        Args: inputs: one per placeholder of the graph.
        """
        program = program_from_fx(module)
        # Fused launches say themselves what they take: alone, without peers at work, they cannot be timed.
        given = {i.name: i.milliseconds for i in program.instructions if i.milliseconds is not None}
        keys = {i.name: self._key(i, program) for i in program.instructions if i.name not in given}
        wanted = {*keys.values(), *(_bytes_key(keys[i.name]) for i in _all_to_alls(program))}
        known = self._from_first({key: self.times.get(key) for key in sorted(wanted)})
        if any(number is None for number in known.values()):
            return self._with_times(program, keys, self._measure(module, inputs, program, keys), given)
        times = {key: number for key, number in known.items() if number is not None}
        return self._with_times(program, keys, times, given)

    def _measure(
        self, module: fx.GraphModule, inputs: Sequence[object], program: Program, keys: dict[str, str]
    ) -> dict[str, float]:
        measured = measure_nodes(module, inputs, self.groups.world)
        by_key: dict[str, list[float]] = {}
        for name, key in keys.items():
            by_key.setdefault(key, []).append(measured[name].milliseconds)
        for instruction in _all_to_alls(program):
            key = _bytes_key(keys[instruction.name])
            by_key.setdefault(key, []).append(measured[instruction.name].wire_bytes)
        found = {key: statistics.median(numbers) for key, numbers in by_key.items()}
        self._remember(found)
        return found

    def _with_times(
        self, program: Program, keys: dict[str, str], known: dict[str, float], given: dict[str, float]
    ) -> Program:
        """Costs of a measured program."""
        # A view stays free: whoever cuts a program makes it again instead of copying.
        milliseconds = given | {
            i.name: 0.0 if _is_view(i) else known[keys[i.name]]
            for i in program.instructions
            if i.kind is Kind.COMPUTE and i.name not in given
        }
        ranks = group_size(self.groups.expert)
        instructions = list(program.instructions)
        for position, instruction in enumerate(instructions):
            if instruction.kind is Kind.COMPUTE:
                continue
            host_ms = known[keys[instruction.name]]
            beside = [
                name
                for waits in (program.dependencies, program.dependents)
                if (name := _nearest_computation(program, position, waits))
            ]
            for name in beside:
                milliseconds[name] += host_ms / len(beside)
            if instruction.kind is Kind.ALL_TO_ALL:
                # As if rows were spread evenly: the model's points are of such all-to-alls.
                size = known[_bytes_key(keys[instruction.name])] * ranks / max(1, ranks - 1)
                instructions[position] = replace(instruction, bytes=size)
        return replace(
            program,
            instructions=tuple(
                replace(i, milliseconds=milliseconds[i.name]) if i.kind is Kind.COMPUTE else i
                for i in instructions
            ),
        )

    def communication(self, program: Program, width: int) -> CommunicationModel:
        """Measured times of the collectives of a Program, up to the sizes it has.

        Args: width: of the rows of its all-to-all buffers.
        """
        largest = {("all_to_all", "world"): 0, ("all_reduce", "world"): 0}
        for instruction in program.instructions:
            if not instruction.kind.is_communication:
                continue
            key = collective_of(instruction), instruction.attributes.get("group", "world")
            largest[key] = max(largest.get(key, 0), int(instruction.bytes))
        wire = "" if link.gbps is None else f", emulated link {link.gbps:g} Gbit/s"
        sizes = ", ".join(f"{' '.join(key)} {size}" for key, size in largest.items())
        prefix = f"communication up to {sizes}, rows of {width}, {self._where}{wire}: "
        known = self._from_first({key: ms for key, ms in self.times.items() if key.startswith(prefix)})
        if not known:
            model = measure_communication(largest, width, self.groups, self.device)
            known = {
                f"{prefix}{collective} {group} {size:.0f}": ms
                for (collective, group), points in model.points.items()
                for size, ms in points
            }
            self._remember(known)
        samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line, ms in known.items():
            collective, group, size = line.removeprefix(prefix).split()
            samples.setdefault((collective, group), []).append((float(size), ms))
        return CommunicationModel.measured(samples)

    @property
    def _where_with_link(self) -> str:
        return self._where if link.gbps is None else f"{self._where}, emulated link {link.gbps:g} Gbit/s"

    def costs(
        self, module: fx.GraphModule, inputs: Sequence[object], program: Program, width: int
    ) -> MeasuredCosts:
        """What the measured Program of a graph costs, and what a plan adds to it.

        Args: program: of `program`. width: of the rows of its all-to-all buffers.
        """
        communication = self.communication(program, width)
        return MeasuredCosts(self._of_device(module, inputs, program), communication, self._where_with_link)

    def _of_device(self, module: fx.GraphModule, inputs: Sequence[object], program: Program) -> DeviceCosts:
        """As remembered; what is missing is measured."""
        wanted = cuts_to_measure(program)
        known = self._from_first(self._device_costs.get(self.device_model, torch.__version__))
        missing = [cut for cut in wanted if known is None or cut.key not in known.shares]
        if known is not None and not missing:
            return known
        # Every rank runs the graph, for the sake of its collectives; what counts is what rank 0 measured.
        if known is None:
            base = measure_launch(self.device), measure_copies(self.device)
            known = DeviceCosts(self.device_model, torch.__version__, *base)
        shares = measure_parts(module, inputs, missing, self.device)
        known = self._from_first(replace(known, shares={**known.shares, **shares}))
        if group_rank(self.groups.world) == 0:
            self._device_costs.put(known)
        return known

    def _key(self, instruction: Instruction, program: Program) -> str:
        attributes = ", ".join(f"{k}={v}" for k, v in sorted(instruction.attributes.items()))
        return f"{measurement_key(instruction, program.tensors, self._where)} [{attributes}]"

    def _from_first(self, values: Value) -> Value:
        """What rank 0 knows, on every rank: all must decide alike whether to measure."""
        return from_first_rank(values, self.groups.world, "the measured times")

    def _remember(self, times: dict[str, float]) -> None:
        for key, milliseconds in times.items():
            self.times.put(key, milliseconds)
        if group_rank(self.groups.world) == 0:
            self.times.save()


def _ranks(groups: Groups) -> str:
    """Example: `4 ranks`, or `4 ranks, experts over 2`."""
    world, expert = group_size(groups.world), group_size(groups.expert)
    return f"{world} ranks" if world == expert else f"{world} ranks, experts over {expert}"


def _all_to_alls(program: Program) -> list[Instruction]:
    return [i for i in program.instructions if i.kind is Kind.ALL_TO_ALL]


def _is_view(instruction: Instruction) -> bool:
    return instruction.kind is Kind.COMPUTE and instruction.flops == 0 and instruction.bytes == 0


def _nearest_computation(program: Program, position: int, waits: Sequence[Sequence[int]]) -> str | None:
    """The instruction, views left out, that comes last before a position or first behind it."""
    closest = max if waits is program.dependencies else min
    frontier, seen = set(waits[position]), set()
    found: set[int] = set()
    while frontier:
        i = frontier.pop()
        seen.add(i)
        if _is_view(program.instructions[i]):
            frontier |= set(waits[i]) - seen
        elif program.instructions[i].kind is Kind.COMPUTE:
            found.add(i)
    return program.instructions[closest(found)].name if found else None


def _bytes_key(key: str) -> str:
    return f"bytes on the wire: {key}"
