"""Profiles a training step on this machine: times of its instructions, its collectives, and of what plans
add.

Lancet's caching op profiler and communication cost model (section 3). Times are stored in a JSON file, which
rank 0 reads and writes for all ranks. What a partitioned graph adds is measured later than the rest, so its
times are scaled (`speed_then`). Instructions with the same op, shapes and attributes share one time, their
median; those whose number of rows routing decides have their own: of two parts, the first sends more where
its tokens take the capacity.
"""

from __future__ import annotations

import logging
import math
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lancet_kernels.files import CacheFile, cache_folder
from lancet_kernels.graph.costs.clusters import CommunicationModel
from lancet_kernels.graph.costs.costs import MeasuredCosts, collective_of
from lancet_kernels.graph.costs.measure import (
    NodeTimes,
    beyond_roofline,
    measure_communication,
    measure_nodes,
    median_ms,
    run_as_a_whole,
)
from lancet_kernels.graph.costs.measure_device import (
    cuts_to_measure,
    measure_copies,
    measure_counting,
    measure_launch,
    measure_parts,
)
from lancet_kernels.graph.costs.part_instruction import DeviceCosts, DeviceCostsFile
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, Kind, Program, TensorSpec, fingerprint
from lancet_kernels.ops.comm.groups import Groups, Value, from_first_rank, group_rank, group_size
from lancet_kernels.ops.comm.link import link

_log = logging.getLogger(__name__)
FORMAT, VERSION = "lancet-measured-times", 1
DEVICE_COSTS = "device_costs.json"
"""The file of device costs, in the same folder as that of the measured times."""
OUTLIER = 1.5
"""From this ratio of a step's time to that of its ops, or to its earlier time, its ops count as timed beside
other load."""
SHARED = 0.25
"""Least share of a step whose earlier times tell the speed of the machine."""


def measurement_key(instruction: Instruction, tensors: Mapping[str, TensorSpec], where: str) -> str:
    """Op, shapes and dtypes of all operands, where it was measured, and attributes, as one readable line.

    Example: `aten.mm (4x8:float16, 8x2:float16) -> (4x2:float16) on V100 []`.
    """

    def side(names: tuple[str, ...]) -> str:
        specs = [tensors[t] for t in names]
        return ", ".join(f"{'x'.join(map(str, s.shape)) or 'scalar'}:{s.dtype}" for s in specs)

    operands = f"({side(instruction.inputs)}) -> ({side(instruction.outputs)})"
    attributes = ", ".join(f"{k}={v}" for k, v in sorted(instruction.attributes.items()))
    return f"{instruction.op} {operands} on {where} [{attributes}]"


def _times_from_json(times: Any) -> dict[str, float]:
    if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in times.values()):
        raise ValueError("a time that is not a number >= 0")
    return {str(k): float(v) for k, v in times.items()}


class Profiler:
    """Measured costs on all ranks of `groups`. The constructor and all methods are collective.

    Args: cache: file of measured times; None: the one in the user's cache folder. others: further groups, by
        the attribute `group` of their communication.
    """

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        cache: str | Path | None = None,
        others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.groups, self.device, self._others = groups, device, others
        file = Path(cache or cache_folder() / "times.json")
        self._file = CacheFile(file, FORMAT, VERSION, "they are ignored and will be measured again")
        self.times = self._read()
        """Milliseconds by `measurement_key`. A file that cannot be read counts as empty, with one warning."""
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        threads = torch.get_num_threads()
        # Of rank 0, whose file it is: the others look for the same times, also on other devices.
        self.device_model = self._from_first(f"{device.type} {kind or platform.machine()}, {threads} threads")
        self._where = f"{self.device_model}, {_ranks(groups)}, torch {torch.__version__}"
        self._device_costs = DeviceCostsFile(file.with_name(DEVICE_COSTS))

    def program(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        program: Program | None = None,
        shares: Mapping[str, float] = MappingProxyType({}),
        again: bool = False,
        beside: fx.GraphModule | None = None,
    ) -> Program:
        """The Program of a graph; computations have their measured times, all-to-alls the bytes that are
        really sent.

        Half of the time that a collective takes on the computing thread, and on the cores that computation
        needs, is added to the computation before it, half to the one after it.

        Args: inputs: one per placeholder of the graph. program: of the graph, where that is known. shares: by
        name of a collective, of that time, if not every step has the collective. again: time all of it, also
        what is stored. beside: a graph of the same inputs that was timed before, for the speed of the machine
        then, if too few ops of this graph tell it.
        """
        program = program or program_from_fx(module)
        # In the interpreter, the times of fused launches are predicted already.
        preset = {i.name: i.milliseconds for i in program.instructions if i.milliseconds is not None}
        keys = {name: key for name, key in self._keys(program).items() if name not in preset}
        every_key = {key for key, _, _ in _quantities(program, keys)}
        cached = self._from_first({key: self.times.get(key) for key in sorted(every_key)})
        times = {key: number for key, number in cached.items() if number is not None and not again}
        if len(times) < len(cached):
            measured = self._measured(module, inputs, program)
            by_key: dict[str, list[float]] = {}
            for key, name, quantity in _quantities(program, keys):
                by_key.setdefault(key, []).append(getattr(measured[name], quantity))
            medians = {key: statistics.median(numbers) for key, numbers in by_key.items()}
            # New times as if they had been measured together with the earlier ones.
            scale = speed_then([(medians[key], times.get(key)) for key in keys.values()])
            if scale is None:
                scale = 1.0 if beside is None else self._speed_then(beside, inputs)
            times = {**medians, **{key: medians[key] * scale for key in keys.values()}, **times}
            changes = {key: (old, times[key]) for key in keys.values() if (old := cached[key]) is not None}
            if again and changes and group_rank(self.groups.world) == 0:
                _log.warning("%s", _outlier(changes))
            self._store(times)
        return self._with_times(program, keys, times, preset, shares)

    def _measured(
        self, module: fx.GraphModule, inputs: Sequence[object], program: Program
    ) -> dict[str, NodeTimes]:
        """Times of all nodes; those beyond the roofline are the shorter ones of two measurements."""
        measured = measure_nodes(module, inputs, self.groups.world)
        beyond = beyond_roofline(program, {name: times.milliseconds for name, times in measured.items()})
        if beyond:
            again = measure_nodes(module, inputs, self.groups.world)
            for name in beyond:
                measured[name] = min(measured[name], again[name], key=lambda times: times.milliseconds)
        return measured

    def _speed_then(self, module: fx.GraphModule, inputs: Sequence[object]) -> float:
        """As the function `speed_then`, by timing a graph again."""
        program = program_from_fx(module)
        now, keys = self._measured(module, inputs, program), self._keys(program)
        earlier = self._from_first({name: self.times.get(key) for name, key in keys.items()})
        return speed_then([(now[name].milliseconds, earlier[name]) for name in keys]) or 1.0

    def _keys(self, program: Program) -> dict[str, str]:
        """The cache key of each instruction's time, by name."""
        digest = fingerprint(program)[:12]
        keys = {i.name: measurement_key(i, program.tensors, self._where) for i in program.instructions}
        for instruction in program.instructions:
            rule = rule_for(instruction)
            if rule is not None and rule.count_arguments:
                # Routing decides how many rows it works on; shapes only say how many at most.
                keys[instruction.name] += f" as {instruction.name} of program {digest}"
        return keys

    def other_threads_ms(self, program: Program) -> float:
        """The part of a measured Program's computation that is CPU time of the threads that move bytes."""
        keys = self._keys(program)
        times = [self.times.get(_threads_key(keys[i.name])) for i in _collectives(program)]
        return self._from_first(sum(ms for ms in times if ms is not None))

    def _with_times(
        self,
        program: Program,
        keys: dict[str, str],
        times: dict[str, float],
        preset: dict[str, float],
        shares: Mapping[str, float],
    ) -> Program:
        """The program with measured times. Args: times: by key. preset: by name of an instruction."""
        # Views are free: in a partitioned program they are repeated, not copied.
        milliseconds = preset | {
            i.name: 0.0 if i.is_free else times[keys[i.name]]
            for i in program.instructions
            if i.kind is Kind.COMPUTE and i.name not in preset
        }
        ranks = group_size(self.groups.expert)
        sizes: dict[str, float] = {}
        for position, instruction in enumerate(program.instructions):
            if instruction.kind is Kind.COMPUTE:
                continue
            key = keys[instruction.name]
            host_ms = shares.get(instruction.name, 1.0) * (times[key] + times[_threads_key(key)])
            beside = [
                name
                for waits in (program.dependencies, program.dependents)
                if (name := _nearest_computation(program, position, waits))
            ]
            for name in beside:
                milliseconds[name] += host_ms / len(beside)
            if instruction.kind is Kind.ALL_TO_ALL:
                # The bytes of an all-to-all with evenly spread rows, as in the points of the model.
                on_wire = times[_bytes_key(key)]
                sizes[instruction.name] = on_wire * ranks / max(1, ranks - 1)
        instructions = [
            replace(i, milliseconds=milliseconds[i.name])
            if i.kind is Kind.COMPUTE
            else replace(i, bytes=sizes.get(i.name, i.bytes))
            for i in program.instructions
        ]
        return replace(program, instructions=tuple(instructions))

    def communication(self, program: Program, width: int, again: bool = False) -> CommunicationModel:
        """Measured times of the collectives of a Program, up to its largest sizes.

        Args: width: of the rows in its all-to-all buffers. again: as of `program`.
        """
        largest = {("all_to_all", "world"): 0, ("all_reduce", "world"): 0}
        for instruction in program.instructions:
            if not instruction.kind.is_communication:
                continue
            key = collective_of(instruction), instruction.attributes.get("group", "world")
            largest[key] = max(largest.get(key, 0), int(instruction.bytes))
        sizes = ", ".join(f"{' '.join(key)} {size}" for key, size in largest.items())
        prefix = f"communication up to {sizes}, rows of {width}, {self._where_with_link}: "
        times = self._from_first({key: ms for key, ms in self.times.items() if key.startswith(prefix)})
        if again or not times:
            model = measure_communication(largest, width, self.groups, self.device, others=self._others)
            times = {
                f"{prefix}{collective} {group} {size:.0f}": ms
                for (collective, group), points in model.points.items()
                for size, ms in points
            }
            self._store(times)
        samples: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for line, ms in times.items():
            collective, group, size = line.removeprefix(prefix).split()
            samples.setdefault((collective, group), []).append((float(size), ms))
        return CommunicationModel.measured(samples)

    def milliseconds_as_it_runs(
        self, module: fx.GraphModule, inputs: Sequence[object], program: Program
    ) -> tuple[float, float | None]:
        """Wall time of a step whose communication blocks: its graph, run as a whole, now and when its ops
        were timed (None: not before).

        Args: as of `program`.
        """
        key = f"step {fingerprint(program)} as it runs on {self._where_with_link}"
        earlier_ms = self._from_first(self.times.get(key))
        now_ms = median_ms(run_as_a_whole(module, inputs, self.device), self.groups.world, repeats=3)
        self._store({key: now_ms})
        return now_ms, earlier_ms

    @property
    def _where_with_link(self) -> str:
        return self._where if link.gbps is None else f"{self._where}, emulated link {link.gbps:g} Gbit/s"

    def costs(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        program: Program,
        width: int,
        again: bool = False,
    ) -> MeasuredCosts:
        """The costs of a graph's measured Program, and of what a plan adds to it.

        Args: program, again: the result and the argument of `program`. width: of the rows in its all-to-all
        buffers.
        """
        communication = self.communication(program, width, again)
        device_costs = self._of_device(module, inputs, program, again)
        return MeasuredCosts(device_costs, communication, self._where_with_link)

    def _of_device(
        self, module: fx.GraphModule, inputs: Sequence[object], program: Program, again: bool
    ) -> DeviceCosts:
        """The device costs from the cache file; missing ones are measured, or all of them again."""
        cuts = cuts_to_measure(program)
        saved = None if again else self._device_costs.get(self.device_model, torch.__version__)
        costs = self._from_first(saved)
        missing = [cut for cut in cuts if costs is None or cut.key not in costs.shares]
        if costs is not None and not missing:
            return costs
        # Every rank runs the graph, because of its collectives; the times of rank 0 count.
        if costs is None:
            device = self.device
            base = measure_launch(device), measure_copies(device), measure_counting(device)
            costs = DeviceCosts(self.device_model, torch.__version__, *base)
        shares = measure_parts(module, inputs, missing, self.device)
        costs = self._from_first(replace(costs, shares={**costs.shares, **shares}))
        if group_rank(self.groups.world) == 0:
            self._device_costs.put(costs)
        return costs

    def _from_first(self, values: Value) -> Value:
        """The value of rank 0, on every rank: all must make the same decision whether to measure."""
        return from_first_rank(values, self.groups.world, "the measured times")

    def _read(self) -> dict[str, float]:
        return self._file.section("milliseconds", "measured times", _times_from_json, {})

    def _store(self, times: dict[str, float]) -> None:
        """Add times; rank 0 writes them, atomically, and keeps what other processes have written."""
        wrong = {key: ms for key, ms in times.items() if not (math.isfinite(ms) and ms >= 0)}
        assert not wrong, wrong
        self.times |= times
        if group_rank(self.groups.world) == 0:
            with self._file.changed() as sections:
                self.times = {**self._read(), **self.times}
                sections["milliseconds"] = dict(sorted(self.times.items()))


def speed_then(times: Sequence[tuple[float, float | None]]) -> float | None:
    """The factor that makes new times comparable with earlier ones: the speed of a machine drifts.

    Without it, a partitioned graph was predicted to compute 23 % more than the whole one, of which 4 % was
    real (`lancet bench overlap`, 2026-11-24).

    Args: times: new and earlier milliseconds of each instruction; None: it had not been measured.
    Returns: None if less than `SHARED` of the new time is of instructions with an earlier one.
    """
    shared = [(new, earlier) for new, earlier in times if earlier is not None]
    new_ms, earlier_ms = (sum(column) for column in zip(*shared, strict=True)) if shared else (0.0, 0.0)
    is_enough = new_ms > 0 and new_ms >= SHARED * sum(new for new, _ in times)
    return earlier_ms / new_ms if is_enough else None


def differ(one_ms: float, other_ms: float) -> bool:
    """Is one of two times of a step so much longer that something else ran on the machine?"""
    return max(one_ms, other_ms) > OUTLIER * min(one_ms, other_ms)


def _outlier(changes: Mapping[str, tuple[float, float]]) -> str:
    """The warning about ops that were timed again. Args: changes: milliseconds of each, before and now."""
    key = max(changes, key=lambda key: abs(changes[key][0] - changes[key][1]))
    before, now = changes[key]
    return (
        "ops were timed again, because the step takes another time than theirs together (was the machine "
        f"busy then, or is it now?); the largest change: {before:.3g} ms, now {now:.3g}, of "
        f"{shorten(key, 200, placeholder=' ...')}"
    )


def _ranks(groups: Groups) -> str:
    """Example: `4 ranks`, or `4 ranks, experts over 2`."""
    world, expert = group_size(groups.world), group_size(groups.expert)
    return f"{world} ranks" if world == expert else f"{world} ranks, experts over {expert}"


def _collectives(program: Program) -> list[Instruction]:
    return [i for i in program.instructions if i.kind is not Kind.COMPUTE]


def _quantities(program: Program, keys: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Measurements of a program: (cache key, instruction, field of `NodeTimes`)."""
    for name, key in keys.items():
        yield key, name, "milliseconds"
    for i in _collectives(program):
        yield _threads_key(keys[i.name]), i.name, "other_threads_ms"
        if i.kind is Kind.ALL_TO_ALL:
            yield _bytes_key(keys[i.name]), i.name, "wire_bytes"


def _nearest_computation(program: Program, position: int, waits: Sequence[Sequence[int]]) -> str | None:
    """Name of the last computation that a position depends on, or the first that depends on it; not a view.

    Args: waits: `program.dependencies` or `program.dependents`.
    """
    closest = max if waits is program.dependencies else min
    frontier, seen = set(waits[position]), set()
    computations: set[int] = set()
    while frontier:
        i = frontier.pop()
        seen.add(i)
        if program.instructions[i].is_free:
            frontier |= set(waits[i]) - seen
        elif program.instructions[i].kind is Kind.COMPUTE:
            computations.add(i)
    return program.instructions[closest(computations)].name if computations else None


def _bytes_key(key: str) -> str:
    return f"bytes on the wire: {key}"


def _threads_key(key: str) -> str:
    return f"other threads: {key}"
