"""Descriptions of clusters: one TOML file per cluster, read into a `Cluster`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lancet_kernels.errors import UserError, check_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_FOLDER = resources.files("lancet_kernels.graph.costs") / "clusters"
_TABLES = ("peak_tflops", "compute_efficiency")


@dataclass(frozen=True)
class Kernels:
    """What kernels reach, as fractions of the peak, where a file has more than one number for all of them.

    A GEMM reaches `dense` or `grouped` of the peak, less what the last wave of its tiles leaves idle on
    `multiprocessors`, less `k_overhead` elements of the contraction for the begin and end of each tile.
    `*_half_rows`: rows per group at which a grouped GEMM reaches half of that. `attention_*`: of causal
    attention, without the masked half. `permute`: of the memory bandwidth, when rows are permuted.
    `kernel_us`: launch, ramp-up and tail of a kernel in the middle of a step.
    `host_us`: what the host needs to launch a kernel of a framework that runs op by op. `message_beside`: how
    many times as long a message takes while computation runs beside it.
    """

    dense: float
    multiprocessors: int
    tile_rows: int
    tile_columns: int
    k_overhead: float
    grouped: float
    grouped_half_rows: float
    grouped_wgrad: float
    grouped_wgrad_half_rows: float
    attention_forward: float
    attention_backward: float
    permute: float
    kernel_us: float
    host_us: float
    message_beside: float


@dataclass(frozen=True)
class Attention:
    """What an attention kernel reaches of the peak, causal, without the masked half, by width of a head.

    widths: of queries. window_keys: forward and backward, how many more keys than those of its window a query
    takes the time of: kernels compute whole tiles, and short rows of them slowly.
    """

    widths: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    window_keys: tuple[int, int]

    def efficiency(self, width: int, sequence: int, window: int, is_backward: bool) -> float:
        """The fraction for a window of so many tokens (0: none), relative to the FLOPs inside it.

        Example: 0.28 without a window, 438 more keys, a window of 128 of 4,096 tokens: 0.28 * 128 / 566.
        """
        nearest = min(range(len(self.widths)), key=lambda n: abs(math.log(self.widths[n] / width)))
        whole = (self.backward if is_backward else self.forward)[nearest]
        if not 0 < window < sequence:
            return whole
        read = min(window + self.window_keys[is_backward], sequence / 2)  # never slower than without a window
        return whole * min(1.0, window / read)


@dataclass(frozen=True)
class Dispatcher:
    """Who carries rows to experts and back, and at which bandwidth.

    sends: "rows" (each choice of a token travels: torch.distributed), or "tokens" (a token travels once to
    each rank, and between nodes once to each node).
    inside_gb_per_s: per GPU within a node. ranks, between_gb_per_s: algorithm bandwidths by number of ranks
    that span nodes, counting a token once for each node that it goes to, its own included; for "rows" none:
    they follow from the links.
    send_passes, receive_passes: passes over the rows in memory, on the side of the tokens and of the experts.
    overhead_us: of each message: counts, layout, synchronization. sms: multiprocessors that it takes from
    computation while it runs.
    """

    sends: str
    inside_gb_per_s: float
    send_passes: float
    receive_passes: float
    overhead_us: float
    sms: int
    ranks: tuple[int, ...] = ()
    between_gb_per_s: tuple[float, ...] = ()

    def between(self, ranks: int) -> float:
        """The algorithm bandwidth in GB/s for a number of ranks; that of the nearest measured number."""
        nearest = min(range(len(self.ranks)), key=lambda n: abs(math.log(self.ranks[n] / ranks)))
        return self.between_gb_per_s[nearest]


@dataclass(frozen=True)
class Cluster:
    """Peak numbers from the vendor, each with an efficiency: the fraction of it that real code reaches.

    Units: TFLOP/s, 10^9 bytes, 10^9 bytes per second in one direction, microseconds.
    """

    name: str
    description: str
    device: str
    gpus_per_node: int
    peak_tflops: Mapping[str, float]
    compute_efficiency: Mapping[str, float]
    memory_gb: float
    memory_gb_per_s: float
    memory_efficiency: float
    launch_us: float
    """Fixed cost of one kernel: launch, ramp-up and tail. It limits how finely partitioning pays off."""
    intra_node_gb_per_s: float
    """Per GPU, to the other GPUs of its node together."""
    inter_node_gb_per_s: float
    """Per node, all its network cards together."""
    link_efficiency: float
    intra_node_latency_us: float
    inter_node_latency_us: float
    per_peer_us: float
    """The time that an all-to-all takes for each further rank, independent of the message size."""
    kernels: Kernels | None = None
    dispatchers: Mapping[str, Dispatcher] = field(default_factory=dict)
    attention: Mapping[str, Attention] = field(default_factory=dict)

    def tflops(self, dtype: str) -> float:
        """The TFLOP/s that real code reaches in a dtype; a dtype that is not in the file counts as
        float32."""
        named = dtype if dtype in self.peak_tflops else "float32"
        return self.peak_tflops[named] * self.compute_efficiency[named]


_NAMED = {"dispatchers": Dispatcher, "attention": Attention}
"""Tables of tables, by name."""


def cluster_names() -> list[str]:
    """Names of the clusters that the library includes."""
    return sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """A cluster by its name, or from your own TOML file (a path that ends in `.toml`); a Cluster as it is.

    Raises:
        UserError: no such cluster or file, a key is missing or unknown, or a number is not positive.
    """
    if isinstance(name, Cluster):
        return name
    own = str(name).endswith(".toml")
    if not own:
        check_name("cluster", name, cluster_names(), do="or give a .toml file")
    source = Path(name) if own else _FOLDER / f"{name}.toml"
    try:
        data = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            "cluster file", got=f"{source} ({error})", expected="a readable TOML file", do="correct the file"
        ) from error
    return _cluster(data, str(source))


def _cluster(data: dict[str, Any], source: str) -> Cluster:
    keys = {f.name for f in fields(Cluster)}
    tables = {table: data.get(table) for table in (*_TABLES, "kernels")}
    for group in _NAMED:
        named = data.get(group, {})
        if not isinstance(named, dict):
            raise UserError(
                f"{group} in cluster file {source}", got=repr(named), expected=f"tables [{group}.NAME]",
                do="write its keys below such a heading",
            )  # fmt: skip
        tables |= {f"{group}.{name}": table for name, table in named.items()}
    # In TOML, what follows a table's heading belongs to the table.
    strays = [
        f"{key} inside [{table}]"
        for table, values in tables.items()
        for key in (values if isinstance(values, dict) else ())
        if key in keys
    ]
    if strays:
        raise UserError(
            f"cluster file {source}", got=f"key {', '.join(strays)}", expected="it above the first table",
            do="move it up",
        )  # fmt: skip
    cluster: Cluster = _from_table(Cluster, data, f"cluster file {source}")
    numbers = {f.name: data[f.name] for f in fields(Cluster) if f.type in ("int", "float")}
    for table in _TABLES:
        if not isinstance(data[table], dict) or "float32" not in data[table]:
            raise UserError(
                f"{table} in {source}", got=data[table], expected="a table with float32", do="add float32"
            )
        if set(data[table]) != set(data["peak_tflops"]):
            raise UserError(
                f"dtypes of {table} in {source}",
                got=sorted(data[table]),
                expected=sorted(data["peak_tflops"]),
                do="name the same dtypes in both tables",
            )
        numbers |= {f"{table}.{dtype}": value for dtype, value in data[table].items()}
    for key, value in numbers.items():
        latency = key.endswith("_us")
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or value < 0 or (value == 0 and not latency):
            raise UserError(
                f"{key} in cluster file {source}", got=value, expected="a positive number", do="correct it"
            )
    if "kernels" in data:
        kernels = _from_table(Kernels, data["kernels"], f"[kernels] in cluster file {source}")
        cluster = replace(cluster, kernels=kernels)
    named = {
        group: {
            name: _from_table(kind, table, f"[{group}.{name}] in cluster file {source}")
            for name, table in data.get(group, {}).items()
        }
        for group, kind in _NAMED.items()
    }
    return replace(cluster, **named)


def _from_table(kind: type, table: object, where: str) -> Any:
    """A dataclass from a table. Raises: UserError unless the table has its keys."""
    if not isinstance(table, dict):
        raise UserError(where, got=repr(table), expected="a table", do="write its keys below its heading")
    keys = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for what, names, expected, do in (
        ("unknown", set(table) - keys, f"keys among {', '.join(sorted(keys))}", "correct or remove it"),
        ("missing", needed - set(table), "a value for it", "compare with the files of the library"),
    ):
        if names:
            raise UserError(where, got=f"{what} key {', '.join(sorted(names))}", expected=expected, do=do)
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in table.items()})
