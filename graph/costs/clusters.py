"""Descriptions of clusters: one TOML file per cluster, read into a `Cluster`.

Times of collectives are piecewise linear in bytes between measured points (Lancet, section 3), one curve for
each collective and group. One of k parts of an irregular all-to-all is priced at C/k bytes, because its true
size is unknown when planning; with this, the paper reports a 3.83 % error of the iteration time.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from lancet_kernels.errors import UserError, check_name

POINT_BYTES = tuple(1024 << n for n in range(22))
"""Sizes of the points that are calculated for a cluster: 1 KB, 2 KB, ... 2 GB."""

Points = tuple[tuple[float, float], ...]


def interpolated(points: Points, size: float) -> float:
    """Milliseconds at a size, piecewise linear: constant below the first point, with the last slope beyond
    the last point."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, size, key=lambda p: p[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if size > x1:
        slope = max(slope, 0.0)
        return y1 + slope * (size - x1)
    return y0 + slope * (size - x0)


@dataclass(frozen=True)
class CommunicationModel:
    """`points[collective, group]` are (bytes on one rank, milliseconds), sorted by bytes. inside: the
    collectives and groups whose messages stay within nodes."""

    points: Mapping[tuple[str, str], Points]
    inside: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def measured(cls, samples: Mapping[tuple[str, str], Iterable[tuple[float, float]]]) -> CommunicationModel:
        """From measured (bytes, milliseconds); several samples of one size are reduced to their median."""
        return cls({key: _sorted_points(key, points) for key, points in samples.items()})

    @classmethod
    def from_cluster(
        cls,
        cluster: Cluster,
        gpus: int,
        expert_ranks: int | None = None,
        shard_ranks: int | None = None,
        tensor_ranks: int = 1,
        context_ranks: int = 1,
    ) -> CommunicationModel:
        """Points calculated for `gpus` ranks that fill the nodes of a cluster one after another.

        Args: expert_ranks: consecutive ranks that share one set of experts (default: all). All-to-alls are
            among these; all-reduces, reduce-scatters and all-gathers of group "replica" among the
            `gpus / expert_ranks` ranks with the same. The bytes of the last two are those of the whole.
            shard_ranks: consecutive ranks over which parameters are sharded (HSDP), group "shards"; group
            "copies" are the `gpus / shard_ranks` ranks with the same shard. tensor_ranks: consecutive ranks
            with slices of the same layers, group "tensor"; group "world" are those with the same slices.
            context_ranks: those of them that share sequences, group "context", one of each tensor group.
        """
        if gpus < 1 or (gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node):
            raise UserError(
                "number of GPUs",
                got=gpus,
                expected=f"1 to {cluster.gpus_per_node}, or a multiple of {cluster.gpus_per_node}",
                do="use whole nodes",
            )
        among = expert_ranks or gpus
        # In the worst case every GPU of a node sends to another node at once.
        leaving = cluster.gpus_per_node if gpus > cluster.gpus_per_node else 0
        # Of groups that do not fill nodes, the one on most nodes.
        node = cluster.gpus_per_node
        nodes = max((i + among - 1) // node - i // node + 1 for i in range(0, gpus, among))
        placement = -(-among // nodes), nodes, 1
        points = {
            ("all_to_all", "world"): _points(lambda size: grouped_all_to_all_ms(cluster, size, *placement)),
            ("point_to_point", "world"): _points(lambda size: point_to_point_ms(cluster, size, leaving)),
        }
        sums = {"world": (gpus, tensor_ranks)}
        if tensor_ranks > 1:
            sums["tensor"] = tensor_ranks, 1
        if context_ranks > 1:
            sums["context"] = tensor_ranks * context_ranks, tensor_ranks
        if among < gpus:
            sums["replica"] = gpus, among
        if shard_ranks is not None:
            sums |= {"shards": (shard_ranks, 1), "copies": (gpus, shard_ranks)}
        inside = {("all_to_all", "world")} if nodes == 1 else set()
        for group, ranks in sums.items():
            whole = _points(partial(_all_reduce_ms, cluster, *ranks))
            # An all-reduce is a reduce-scatter and an all-gather, which take the same time.
            half = tuple((size, ms / 2) for size, ms in whole)
            for collective in ("all_reduce", "reduce_scatter", "all_gather"):
                points[collective, group] = whole if collective == "all_reduce" else half
                if _ranks_by_node(cluster, *ranks)[1] == 1:
                    inside.add((collective, group))
        if context_ranks > 1:
            local, nodes = _ranks_by_node(cluster, *sums["context"])
            placement = local, nodes, min(node, gpus) // local
            points["all_to_all", "context"] = _points(
                lambda size: grouped_all_to_all_ms(cluster, size, *placement)
            )
            inside |= {("all_to_all", "context")} if nodes == 1 else set()
        return cls(points, frozenset(inside))

    def milliseconds(self, collective: str, bytes: float, group: str = "world") -> float:
        """Time of one collective over `bytes` per rank. Below the first point it is pure latency.

        Raises: UserError: no points for this collective and group.
        """
        points = self.points.get((collective, group))
        if points is None:
            measured = ", ".join(f"{c} in {g}" for c, g in self.points) or "nothing"
            raise UserError(
                "communication cost", got=f"{collective} in {group}", expected=measured, do="measure it first"
            )
        return interpolated(points, bytes)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of JSON values, one entry per collective and group."""
        return [
            {"collective": c, "group": g, "points": [list(p) for p in points]}
            for (c, g), points in self.points.items()
        ]


def _sorted_points(key: tuple[str, str], samples: Iterable[tuple[float, float]]) -> Points:
    by_size: dict[float, list[float]] = {}
    for size, ms in samples:
        assert size >= 0, f"{key[0]}: {size} bytes"
        assert ms >= 0, f"{key[0]}: {ms} ms for {size} bytes"
        by_size.setdefault(float(size), []).append(float(ms))
    assert by_size, f"{key[0]}: no samples"
    return tuple((size, sorted(times)[len(times) // 2]) for size, times in sorted(by_size.items()))


def point_to_point_ms(cluster: Cluster, size: float, leaving: int) -> float:
    """Every GPU sends `size` bytes to another one and receives as many; `leaving` GPUs of each node send to
    other nodes, and share the node's network cards.

    Example: p3dn, 16 MB, 4 leaving: 64 MB at 10 GB/s take 6.4 ms; none leaving: 16 MB at 104 GB/s 0.15 ms.
    """
    inside = size / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    outside = leaving * size / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if leaving else cluster.intra_node_latency_us
    return latency * 1e-3 + max(inside, outside) * 1e3


def _points(formula: Callable[[float], float]) -> Points:
    return tuple((float(size), formula(size)) for size in POINT_BYTES)


def grouped_all_to_all_ms(cluster: Cluster, size: float, local: int, nodes: int, at_once: int) -> float:
    """Simultaneous all-to-alls in groups placed as for `grouped_all_reduce_ms`: every rank sends an equal
    share of its `size` bytes to each rank of its group. NVLink and network cards work in parallel: the slower
    counts.

    Example: p3dn, 16 GPUs, 16 MB: 8 ranks x 16 MB x 8/16 = 64 MB leave a node at 10 GB/s: 6.4 ms.
    """
    gpus = local * nodes
    inside = size * (local - 1) / gpus / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    leaving = at_once * local * size * (gpus - local) / gpus
    outside = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if nodes > 1 else cluster.intra_node_latency_us
    latency += cluster.per_peer_us * (gpus - 1)
    return latency * 1e-3 + max(inside, outside) * 1e3


def _all_reduce_ms(cluster: Cluster, gpus: int, apart: int, size: float) -> float:
    """All-reduces of groups of every `apart`-th rank, all at the same time (1: one group of all ranks).
    Hierarchical: reduce-scatter and all-gather inside the node, rings of equal local ranks between nodes.

    Per GPU 2 (n-1)/n of the bytes pass NVLink; per node 2 (m-1)/m of the bytes pass the network cards.
    Example: 16 GPUs, 8 per node, expert groups of 8: no two ranks of a node have the same experts, and 8
    all-reduces between the two nodes share the network cards, each with 2 * 1/2 of its bytes.
    """
    local, nodes = _ranks_by_node(cluster, gpus, apart)
    return grouped_all_reduce_ms(cluster, size, local, nodes, min(gpus, cluster.gpus_per_node) // local)


def _ranks_by_node(cluster: Cluster, gpus: int, apart: int) -> tuple[int, int]:
    """Ranks of such a group on a node, and number of nodes."""
    node = min(gpus, cluster.gpus_per_node)
    return max(1, node // apart), max(1, gpus // max(node, apart))


def grouped_all_reduce_ms(cluster: Cluster, size: float, local: int, nodes: int, at_once: int) -> float:
    """Simultaneous all-reduces; each group has `local` GPUs on each of `nodes` nodes, and `at_once` groups
    share the network cards of a node."""
    inside = 2 * size * (local - 1) / local / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    leaving = 2 * at_once * size * (nodes - 1) / nodes
    outside = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if nodes > 1 else cluster.intra_node_latency_us
    return 2 * latency * 1e-3 + (inside + outside) * 1e3


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_FOLDER = resources.files("lancet_kernels.graph.costs") / "clusters"
_TABLES = ("peak_tflops", "compute_efficiency")


@dataclass(frozen=True)
class Kernels:
    """Efficiencies of kernels, as fractions of the peak, where a file has more than one number for all.

    A GEMM reaches `dense` or `grouped` of the peak, less what the last wave of its tiles leaves idle on
    `multiprocessors`, less `k_overhead` elements of the contraction for the begin and end of each tile.
    `*_half_rows`: rows per group at which a grouped GEMM reaches half of that. `attention_*`: of causal
    attention, without the masked half. `recurrence`: of scans and delta rules by chunks, with the FLOPs of
    `lancet_kernels.predict.recurrence`; by default as measured on H200. `permute`: of the memory bandwidth,
    when rows are permuted. `kernel_us`: launch, ramp-up and tail of a kernel in the middle of a step.
    `host_us`: of the host, to launch a kernel of a framework that runs op by op. `message_beside`: slowdown
    of a message beside computation.
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
    recurrence: float = 0.078


@dataclass(frozen=True)
class Attention:
    """Efficiency of a causal attention kernel, without the masked half, by width of a head.

    widths: of queries. window_keys: forward and backward, how many keys beyond its window a query pays for:
    kernels compute whole tiles, and short rows of them slowly.
    """

    widths: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    window_keys: tuple[int, int]

    def efficiency(self, width: int, sequence: int, window: int, is_backward: bool) -> float:
        """The fraction of the peak for a window in tokens (0: none), relative to the FLOPs inside it.

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
    """A library that carries rows to experts and back, and its bandwidths.

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
        """The algorithm bandwidth in GB/s for a number of ranks; that of the nearest measured number.

        Raises: UserError if the cluster file has none.
        """
        if not self.ranks:
            raise UserError(
                "dispatcher between nodes", got="no ranks in its file", expected="bandwidths by ranks",
                do="add ranks and between_gb_per_s",
            )  # fmt: skip
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


_MAY_BE_ZERO = ("_us", "_passes", "_keys", "sms")
_NAMED = {"dispatchers": Dispatcher, "attention": Attention}
"""Tables of tables, by name."""


def cluster_names() -> list[str]:
    """Names of the clusters that the library includes."""
    return sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml"))


def load_cluster(name: str | Path | Cluster) -> Cluster:
    """A cluster by its name, or from your own TOML file (a path that ends in `.toml`); a Cluster as it is.

    Raises: UserError: no such cluster or file, a key is missing or unknown, or a number is not positive.
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
        for dtype, value in data[table].items():
            _check_number(f"{table}.{dtype}", value, f"cluster file {source}")
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
    types = {f.name: f.type for f in fields(kind)}
    for key, value in table.items():  # in the order of the file
        of = types[key]
        if of == "str" and not isinstance(value, str):
            raise UserError(f"{key} in {where}", got=value, expected="text", do="put it in quotes")
        is_list, pair = of.startswith("tuple"), "..." not in of
        is_empty = value == [] and key in needed
        if is_list and (not isinstance(value, list) or is_empty or (pair and len(value) != 2)):
            expected = "a list of two numbers" if pair else "a list of numbers"
            raise UserError(f"{key} in {where}", got=value, expected=expected, do="correct it")
        if of.startswith(("int", "float", "tuple")):
            for number in value if is_list else [value]:
                _check_number(key, number, where, whole="int" in of)
    result = kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in table.items()})
    lengths = {name: len(getattr(result, name)) for name, of in types.items() if of.endswith("...]")}
    if len({*lengths.values()}) > 1:
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise UserError(where, got=got, expected="as many of each", do="correct the lists")
    if isinstance(result, Dispatcher):
        check_name(f"sends in {where}", result.sends, ("rows", "tokens"))
    return result


def _check_number(key: str, value: Any, where: str, whole: bool = False) -> None:
    """Raise UserError unless it is a positive number; some may be zero."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_zero = value == 0 and not key.endswith(_MAY_BE_ZERO)
    if not is_number or not 0 <= value < math.inf or is_zero or (whole and value % 1):
        expected = f"a positive {'whole ' if whole else ''}number"
        raise UserError(f"{key} in {where}", got=value, expected=expected, do="correct it")
