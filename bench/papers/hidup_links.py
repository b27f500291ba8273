"""How long do NCCL's collectives take on HiDup's machines? Formulas between machines, rates inside one.

Sizes are those of the whole tensor. Between machines (NCCL 2.10, PyTorch 1.10):
  all-gather, reduce-scatter   one ring through all GPUs: (n-1)/n of the tensor leaves every machine
  all-reduce                   a ring, twice that; between two machines a tree, which the tensor leaves once
  all-to-all                   of every GPU's slice what is for other machines, all GPUs of one by one card
So an all-reduce is faster than a reduce-scatter and an all-gather, as the paper says in section 6.10. Inside
a machine the rates are those that the paper's authors measured and published with its code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.costs.communication import POINT_BYTES, CommunicationModel

INSIDE_GB_PER_S = {
    2: {"all_gather": 22.9, "all_reduce": 17.5, "reduce_scatter": 23.1, "all_to_all": 44.7},
    4: {"all_gather": 43.0, "all_reduce": 38.9, "reduce_scatter": 50.6, "all_to_all": 111.0},
    8: {"all_gather": 48.2, "all_reduce": 50.5, "reduce_scatter": 58.3, "all_to_all": 134.8},
}
"""10^9 bytes of the whole tensor a second among so many V100 with NVLink, measured by the paper's authors."""
REACHED_AT_100_GBIT = 0.70
"""Share of a 100 Gbit/s link that the authors' collectives reached (0.65 to 0.74); of slower links, all."""


def links(cluster: Cluster, gpus: int) -> CommunicationModel:
    """Costs among `gpus` GPUs that fill the machines of a cluster one after another."""
    calculated = CommunicationModel.from_cluster(cluster, gpus)
    inside = INSIDE_GB_PER_S.get(min(gpus, cluster.gpus_per_node), {})
    machines = max(1, gpus // cluster.gpus_per_node)
    points = dict(calculated.points)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        if machines > 1 and name == "all_to_all":
            continue
        if machines == 1 and name not in inside:
            continue
        formula: Callable[[float], float]
        if machines > 1:
            formula = partial(_between_ms, cluster, machines, gpus, name, inside.get(name))
        else:
            # An all-to-all is asked for with a rank's slice.
            whole = gpus if name == "all_to_all" else 1
            latency = calculated.latency(name)
            formula = partial(_at_rate_ms, latency, inside[name] * 1e9 / whole)
        points[name, "world"] = tuple((float(b), formula(float(b))) for b in POINT_BYTES)
    return CommunicationModel(points)


def with_bandwidth(cluster: Cluster, gbit_per_s: float, gpus_per_machine: int) -> Cluster:
    """The cluster with another bandwidth between its machines."""
    reached = REACHED_AT_100_GBIT if gbit_per_s >= 100 else 1.0
    return replace(cluster, gpus_per_node=gpus_per_machine, inter_node_gb_per_s=gbit_per_s / 8 * reached)


def _at_rate_ms(latency: float, bytes_per_s: float, size: float) -> float:
    return latency + size / bytes_per_s * 1e3


def _between_ms(
    cluster: Cluster, machines: int, gpus: int, name: str, inside_gb_per_s: float | None, size: float
) -> float:
    """Inside the machines the same happens at once: the slower of the two counts."""
    leaving = size * (gpus - 1) / gpus
    if name == "all_reduce":
        leaving = min(2 * leaving, size) if machines == 2 else 2 * leaving
    outside = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    inside = size / (inside_gb_per_s * 1e9) if inside_gb_per_s else 0.0
    latency = cluster.inter_node_latency_us * (2 if name == "all_reduce" else 1)
    return latency * 1e-3 + max(outside, inside) * 1e3
