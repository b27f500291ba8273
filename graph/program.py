"""A training step as plain data: an ordered, valid sequence of instructions over named tensors.

Lancet (section 4) writes an instruction as I_n = (x_n, y_n, f_n): its inputs, outputs and operator. Schedules
work on Programs only, so they need no torch, can be tested with synthetic programs, and can plan for clusters
that are not available. `graph.from_fx` makes a Program of an fx graph; read `graph.rules.rules` next.

The descendants of an instruction are a bitset, a Python int: those of 10,000 instructions take about 25 MB
and well under a second.

A plan, say, is saved as JSON with the fingerprint of its Program, and applies to no other.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.files import file_errors, write_json_atomically


def bitset(positions: Iterable[int]) -> int:
    """The int with exactly these bits set; each is given once."""
    return sum(1 << p for p in positions)


ITEM_BYTES = {
    dtype: size
    for size, dtypes in {
        16: "complex128",
        8: "complex64 float64 uint64 int64",
        4: "float32 int32 uint32",
        2: "float16 bfloat16 int16 uint16",
        1: "float8_e4m3fn float8_e5m2 int8 uint8 bool",
    }.items()
    for dtype in dtypes.split()
}


class Kind(str, Enum):
    """The resource that an instruction occupies: compute, or the link, with the kind of collective."""

    COMPUTE = "compute"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    POINT_TO_POINT = "point_to_point"
    """A shift: every rank sends to one rank and receives from one."""
    OTHER_COMMUNICATION = "other_communication"

    def __init__(self, value: str) -> None:
        self.is_communication = value != "compute"


class Phase(str, Enum):
    """The part of the training step an instruction belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. `bytes` is the memory that it allocates, by default the size of `shape` in `dtype`.

    A tensor with `alias_of` shares that tensor's storage (a view, or the result of an in-place update) and
    allocates nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    bytes: int = None  # type: ignore[assignment]  # __post_init__ fills it in
    alias_of: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.shape))
        check_name(f"dtype of tensor {self.name}", self.dtype, ITEM_BYTES, do="name it as torch does")
        if self.bytes is None:
            object.__setattr__(self, "bytes", 0 if self.alias_of else self.content_bytes)

    @property
    def content_bytes(self) -> int:
        """Bytes of the values, even if the storage is shared."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Instruction:
    """One operator applied to tensors. Costs are in `flops` and in `bytes` moved (to memory, or over the
    link).

    `milliseconds` is a measured time, which replaces every estimate, or None. `mutates` names inputs that are
    overwritten: readers of the old value stay before this instruction, readers of the new value after it.
    `after` names an earlier instruction that must have run, although nothing of it is read; "": none.
    `microbatches`: how many share the instruction, a sum that only the last of them runs; costs are the share
    of one.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    kind: Kind = Kind.COMPUTE
    phase: Phase = Phase.FORWARD
    flops: float = 0.0
    bytes: float = 0.0
    milliseconds: float | None = None
    mutates: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    after: str = ""
    microbatches: int = 1

    @property
    def is_free(self) -> bool:
        """Does it take no time? Then readers of its result may repeat it."""
        return self.kind is Kind.COMPUTE and not (self.flops or self.bytes or self.milliseconds)


_RECOMPUTED = "_recomputed"


def recomputed_name(name: str) -> str:
    """The name of the backward instruction that recomputes a forward one (`graph.capture.captured_graph`)."""
    return name + _RECOMPUTED


def original_name(name: str) -> str | None:
    """The forward instruction that the instruction of this name recomputes; None: it recomputes nothing."""
    return name.removesuffix(_RECOMPUTED) if name.endswith(_RECOMPUTED) else None


def whole_name(name: str) -> str:
    """The name of the instruction that a part is one of; of any other instruction, its own.

    Example: `whole_name("mm_part0")` is `mm`, and so is `whole_name("mm")`.
    """
    whole, marker, part = name.rpartition("_part")
    return whole if marker and part.isdigit() else name


@dataclass(frozen=True)
class Program:
    """An ordered, valid sequence of instructions with its tensors, inputs and outputs.

    `parameters` are the inputs that are weights: every part of a partitioned instruction uses all of them.

    Raises: UserError: a name is used twice, or a tensor has no spec, two producers, or a reader before its
        producer.
    """

    name: str
    instructions: tuple[Instruction, ...]
    tensors: Mapping[str, TensorSpec]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    _dependencies: list[tuple[int, ...]] | None = field(default=None, init=False, repr=False, compare=False)
    """The dependencies of a reordered program, which are those of the original."""

    def __post_init__(self):
        available = set(self.inputs)
        names: set[str] = set()
        for t, spec in self.tensors.items():
            if spec.name != t or (spec.alias_of is not None and spec.alias_of not in self.tensors):
                self._refuse(
                    f"{t} with the spec of {spec.name}, alias of {spec.alias_of}",
                    "its own spec, an existing alias",
                )
        for instruction in self.instructions:
            if instruction.name in names:
                self._refuse(f"two instructions named {instruction.name}", "every name once")
            names.add(instruction.name)
            for t in (*instruction.inputs, *instruction.mutates):
                if t not in available:
                    self._refuse(
                        f"{instruction.name} reads {t}", "tensors that are computed before they are read"
                    )
            if instruction.after and instruction.after not in names:
                self._refuse(f"{instruction.name} after {instruction.after}", "an earlier instruction")
            for t in instruction.outputs:
                if t in available:
                    self._refuse(f"{instruction.name} computes {t} again", "one producer for every tensor")
                available.add(t)
        if not set(self.parameters) <= set(self.inputs):
            others = sorted(set(self.parameters) - set(self.inputs))
            self._refuse(f"parameters {', '.join(others)}", "parameters that are inputs")
        for t in (*available, *self.outputs):
            if t not in self.tensors or t not in available:
                self._refuse(f"tensor {t}", "tensors with a spec and a producer")

    def __len__(self) -> int:
        return len(self.instructions)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each instruction by name."""
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def producer(self) -> dict[str, int]:
        """Tensor -> position of the instruction that computes it; program inputs have none."""
        return {t: i for i, instruction in enumerate(self.instructions) for t in instruction.outputs}

    @cached_property
    def consumers(self) -> dict[str, list[int]]:
        """Positions of the instructions that read each tensor, in order."""
        readers: dict[str, list[int]] = {t: [] for t in self.tensors}
        for i, instruction in enumerate(self.instructions):
            for t in dict.fromkeys(instruction.inputs):
                readers[t].append(i)
        return readers

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches share the sums of gradients."""
        return max((instruction.microbatches for instruction in self.instructions), default=1)

    @cached_property
    def parameter_set(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @cached_property
    def output_set(self) -> frozenset[str]:
        return frozenset(self.outputs)

    @cached_property
    def storage(self) -> dict[str, str]:
        """The tensor that owns the memory of each tensor: itself, or the end of its `alias_of` chain."""
        owner: dict[str, str] = {}
        for name in self.tensors:
            root = name
            while (storage := self.tensors[root].alias_of) is not None:
                root = storage
            owner[name] = root
        return owner

    @cached_property
    def dependencies(self) -> list[tuple[int, ...]]:
        """For each instruction, the positions that must come before it: the producers of its inputs; for a
        storage that is overwritten also its last writer, and before a writer all readers so far; and `after`.

        Forward and backward run one after the other: the first instructions of the backward depend on the
        last ones of the forward, even if they do not read their results.
        """
        if self._dependencies is not None:
            return self._dependencies
        mutated = {self.storage[t] for i in self.instructions for t in i.mutates}
        readers: dict[str, list[int]] = {s: [] for s in mutated}
        writer: dict[str, int] = {}
        result = []
        for i, instruction in enumerate(self.instructions):
            before = {self.producer[t] for t in instruction.inputs if t in self.producer}
            if instruction.after:
                before.add(self.index[instruction.after])
            touched = {self.storage[t] for t in (*instruction.inputs, *instruction.outputs)} & mutated
            written = {self.storage[t] for t in instruction.mutates}
            for s in touched | written:
                if s in writer:
                    before.add(writer[s])
                if s in written:
                    before.update(readers[s])
                    readers[s], writer[s] = [], i
                else:
                    readers[s].append(i)
            before.discard(i)
            result.append(tuple(sorted(before)))
        phases = [instruction.phase for instruction in self.instructions]
        read_in_forward = {j for i, phase in enumerate(phases) if phase is Phase.FORWARD for j in result[i]}
        ends = [i for i, phase in enumerate(phases) if phase is Phase.FORWARD and i not in read_in_forward]
        for i, earlier in enumerate(result):
            begins = phases[i] is Phase.BACKWARD and not any(phases[j] is Phase.BACKWARD for j in earlier)
            if begins:
                result[i] = tuple(sorted({*earlier, *(j for j in ends if j < i)}))
        return result

    @cached_property
    def awaited(self) -> list[tuple[int, ...]]:
        """For each instruction, the messages among its dependencies. A computation waits for these alone:
        computations run one after the other."""
        communicates = [instruction.kind.is_communication for instruction in self.instructions]
        return [tuple(i for i in before if communicates[i]) for before in self.dependencies]

    @cached_property
    def waits(self) -> list[bool]:
        """For each instruction: is it a message, or may it wait for one?"""
        return [
            i.kind.is_communication or bool(messages)
            for i, messages in zip(self.instructions, self.awaited, strict=True)
        ]

    @cached_property
    def dependents(self) -> list[tuple[int, ...]]:
        """For each instruction, the positions that depend on it."""
        after: list[list[int]] = [[] for _ in self.instructions]
        for i, before in enumerate(self.dependencies):
            for j in before:
                after[j].append(i)
        return [tuple(a) for a in after]

    @cached_property
    def descendants(self) -> list[int]:
        """For each instruction, the bitset of those that a directed path leads to."""
        descendants = [0] * len(self)
        for i in reversed(range(len(self))):
            for j in self.dependents[i]:
                descendants[i] |= descendants[j] | 1 << j
        return descendants

    def is_view(self, instruction: Instruction) -> bool:
        """Do its results share the storage of other tensors?"""
        outputs = instruction.outputs
        return bool(outputs) and all(self.tensors[t].alias_of is not None for t in outputs)

    def positions(self, kind: Kind) -> list[int]:
        """Positions of all instructions of one kind, in order."""
        return [i for i, instruction in enumerate(self.instructions) if instruction.kind is kind]

    def reordered(self, order: Sequence[str] | Sequence[int]) -> Program:
        """The same instructions in another order, as names or as positions.

        Raises: UserError: `order` is no permutation, or has an instruction before one it depends on.
        """
        positions = [self.index.get(o, -1) if isinstance(o, str) else int(o) for o in order]
        if sorted(positions) != list(range(len(self))):
            missing = [i.name for k, i in enumerate(self.instructions) if k not in set(positions)]
            raise UserError(
                f"order for program {self.name}",
                got=f"{len(positions)} entries, without {', '.join(missing[:3]) or 'any missing'}",
                expected=f"each of the {len(self)} instructions exactly once",
                do="plan again for this program",
            )
        place = {p: k for k, p in enumerate(positions)}
        for i, before in enumerate(self.dependencies):
            for j in before:
                if place[j] > place[i]:
                    early, late = self.instructions[i].name, self.instructions[j].name
                    raise UserError(
                        f"order for program {self.name}",
                        got=f"{early} before {late}",
                        expected=f"{late} first, because {early} depends on it",
                        do="fix the schedule that asked for this order",
                    )
        result = replace(self, instructions=tuple(self.instructions[p] for p in positions))
        moved = [tuple(sorted([place[j] for j in self.dependencies[p]])) for p in positions]
        object.__setattr__(result, "_dependencies", moved)
        return result

    def _refuse(self, got: str, expected: str) -> None:
        raise UserError(f"program {self.name}", got=got, expected=expected, do="correct the instruction list")


Saved = TypeVar("Saved", bound="SavedJson")


def fingerprint(program: Program) -> str:
    """64 hex digits that depend on the structure (names, ops, shapes, order, attributes), never on costs.

    Ranks that captured the same model get the same fingerprint, even if they measured different times.
    """
    structure = {
        "format": "lancet-program",
        "version": 1,
        "name": program.name,
        "tensors": [[t.name, list(t.shape), t.dtype, t.bytes, t.alias_of] for t in program.tensors.values()],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "parameters": list(program.parameters),
        "instructions": [
            {
                "name": i.name,
                "op": i.op,
                "inputs": list(i.inputs),
                "outputs": list(i.outputs),
                "kind": i.kind.value,
                "phase": i.phase.value,
                "mutates": list(i.mutates),
                "attributes": {k: v for k, v in i.attributes.items() if k != "link"},
                **({"after": i.after} if i.after else {}),
            }
            for i in program.instructions
        ],
    }
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class SavedJson(ABC):
    """Belongs to one Program, and can be saved to a file.

    Class attributes, also for messages: KIND, VERSION: of the JSON. AGAIN: what to do for another one: "plan
    again". WHAT, MADE: "plan for" a program, for which it was "made".
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    AGAIN: ClassVar[str]
    WHAT: ClassVar[str]
    MADE: ClassVar[str]
    program: str
    program_fingerprint: str

    @abstractmethod
    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""

    @classmethod
    @abstractmethod
    def from_fields(cls: type[Saved], fields: dict[str, Any]) -> Saved:
        """The object with the fields that `fields_to_json` gave."""

    def check(self, program: Program) -> None:
        """Raise UserError unless it belongs to this program."""
        actual, expected = fingerprint(program), self.program_fingerprint
        if actual != expected:
            raise UserError(
                f"{self.WHAT} {self.program}",
                got=f"program {program.name} ({actual[:12]})",
                expected=f"the program it was {self.MADE} for ({expected[:12]})",
                do=self.AGAIN,
            )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        return {"format": f"lancet-{self.KIND}", "version": self.VERSION, **self.fields_to_json()}

    @classmethod
    def from_json(cls: type[Saved], data: Any) -> Saved:
        """The object that `to_json` wrote. Raises: UserError: not of this kind and version."""
        return cls._parsed(f"{cls.KIND} JSON", data)

    @classmethod
    def _parsed(cls: type[Saved], what: str, data: Any) -> Saved:
        actual = (data.get("format"), data.get("version")) if isinstance(data, dict) else type(data).__name__
        if actual != (expected := (f"lancet-{cls.KIND}", cls.VERSION)):
            raise UserError(what, got=actual, expected=expected, do=cls.AGAIN)
        try:
            return cls.from_fields({k: v for k, v in data.items() if k not in ("format", "version")})
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                what, got=repr(error), expected="every field of its version", do=cls.AGAIN
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically. Raises: UserError if the file cannot be written."""
        with file_errors(path):
            write_json_atomically(path, self.to_json())

    @classmethod
    def load(cls: type[Saved], path: str | Path, program: Program | None = None) -> Saved:
        """Read it; with `program`, refuse one that belongs to another program.

        Raises: UserError: the file is not readable as this kind of JSON, or belongs to another program.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{cls.KIND} file", got=f"{path} ({error})", expected=f"a saved {cls.KIND}", do=cls.AGAIN
            ) from error
        saved = cls._parsed(f"{cls.KIND} file {path}", data)
        if program is not None:
            saved.check(program)
        return saved
