"""Fits the constants of a cluster file on Megatron-LM's rows: `python -m bench.published.fit`.

Least squares of the relative errors of the layers' forward and backward times, by Gauss-Newton steps in the
logarithms of the constants. Only rows with `fitted = true` are read. What is printed stands in the cluster
file. `--gemm FILE MULTIPROCESSORS` fits those of dense GEMMs to a table of measured ones (SimuMax's
`configs/system/*.json`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from bench.published.layers import predicted_layer
from bench.published.rows import Row, load_rows
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster

PRIOR = 0.04
"""Weight of a constant's distance from its start: the test tolerates 2 % of a time, and a start value is
known to half an e-fold, so 0.02 / 0.5."""
START = {
    "grouped": 0.60,
    "kernel_us": 7.0,
    "all-to-all inside_gb_per_s": 340.0,
    "deepep inside_gb_per_s": 300.0,
    "hybridep inside_gb_per_s": 300.0,
    "all-to-all overhead_us": 50.0,
    "deepep overhead_us": 50.0,
    "hybridep overhead_us": 50.0,
}


def with_constants(cluster: Cluster, constants: dict[str, float]) -> Cluster:
    """The cluster with fitted constants."""
    assert cluster.kernels is not None
    grouped = constants["grouped"]
    kernels = replace(
        cluster.kernels,
        dense=grouped,
        grouped=grouped,
        grouped_wgrad=grouped,
        kernel_us=constants["kernel_us"],
    )
    dispatchers = {
        name: replace(
            one,
            inside_gb_per_s=constants[f"{name} inside_gb_per_s"],
            overhead_us=constants[f"{name} overhead_us"],
        )
        for name, one in cluster.dispatchers.items()
        if f"{name} overhead_us" in constants
    }
    return replace(cluster, kernels=kernels, dispatchers={**cluster.dispatchers, **dispatchers})


def errors(rows: list[Row], cluster: Cluster) -> np.ndarray:
    """Relative error of each row."""
    return np.array([predicted_layer(r.configuration, cluster)[r.quantity] / r.measured - 1 for r in rows])


def fit(steps: int = 12) -> tuple[dict[str, float], np.ndarray]:
    """The constants, and the errors that remain."""
    rows = [row for row in load_rows() if row.fitted]
    cluster = load_cluster("dgx-h100")
    names = list(START)
    origin = np.log([START[name] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(x), strict=True))
        return np.concatenate([errors(rows, with_constants(cluster, constants)), PRIOR * (x - origin)])

    x = origin.copy()
    for _ in range(steps):
        now = residuals(x)
        slopes = np.stack([(residuals(x + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(x))], axis=1)
        x = x - np.linalg.lstsq(slopes, now, rcond=None)[0]
    return dict(zip(names, np.exp(x), strict=True)), residuals(x)[: len(rows)]


def fit_gemms(file: str, multiprocessors: int) -> dict[str, float]:
    """Constants of dense GEMMs, by trying tiles and overheads: the least mean absolute error."""
    ops = json.loads(Path(file).read_text())["accelerator"]["op"]
    table = ops["matmul"]["accurate_efficient_factor"]
    shapes = [dict(part.strip().split("=") for part in key.split(",")) for key in table]
    m, n, k = (np.array([float(shape[name]) for shape in shapes]) for name in "mnk")
    measured = np.array(list(table.values()))
    best: dict[str, float] = {"error": np.inf}
    for rows, columns, overhead in product((128, 256), (128, 256), (0, 64, 128, 256, 512)):
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        waves = np.ceil(tiles / multiprocessors)
        busy = m * n / (rows * columns * waves * multiprocessors) * k / (k + overhead)
        for dense in np.arange(0.3, 1.0, 0.01):
            error = float(np.abs(dense * busy / measured - 1).mean())
            if error < best["error"]:
                best = {
                    "dense": float(dense), "tile_rows": rows, "tile_columns": columns,
                    "k_overhead": overhead, "error": error,
                }  # fmt: skip
    return best


def main() -> None:
    """Fit and print."""
    if sys.argv[1:2] == ["--gemm"]:
        for name, value in fit_gemms(sys.argv[2], int(sys.argv[3])).items():
            print(f"{name} = {value:.4g}")
        return
    constants, remaining = fit()
    for name, value in constants.items():
        print(f"{name} = {value:.4g}")
    print(f"errors: {', '.join(f'{error:+.1%}' for error in remaining)}")
    print(f"mean absolute error {np.abs(remaining).mean():.1%}")


if __name__ == "__main__":
    main()
