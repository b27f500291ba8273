"""A kernel of nothing but the shim (`device.py`): proves that a put and its signal reach a peer.

It is the smallest kernel that uses every word of the shim, so the compile checks look at the shim itself
here, with both transports.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.specimens import Specimen


@triton.jit
def ping(
    source_ptr, row_ptr, stage_ptr,  # [rows, D], int32 [ROWS], [ROWS, D]
    region_ptr, peers_ptr,  # [>= ROWS, D] on every PE, int64 [W]
    signals_ptr, signal_peers_ptr, index,  # int64 on every PE, int64 [W]
    out_ptr, report_ptr,  # [ROWS, D], int64 [8]
    to, origin, rank, num_rows, epoch, timeout_us,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TMA: tl.constexpr, NVSHMEM: tl.constexpr,
):  # fmt: skip
    """Put rows to PE `to`, signal, wait for PE `origin`'s signal, copy what has arrived to out.

    The rows are source[row[i]] for i < num_rows.
    Grid: (1,). Word `index` of the signals becomes `epoch << 32 | num_rows`; rows beyond the num_rows that
    travelled with the signal are zero in out.
    Floor: no FLOPs; 2 * num_rows * D elements put, as many copied.

    Example: W = 2, row = [3, 1], num_rows = 2: PE 0 puts source[3], source[1] into rows 0 and 1 of PE 1's
    region, waits for the two rows of PE 1, and out holds PE 1's source[3], source[1].
    """
    device.put_rows(
        region_ptr, peers_ptr, to, tl.cast(0, tl.int64), source_ptr, row_ptr, num_rows, D, stage_ptr,
        tl.cast(0, tl.int64), NVSHMEM, ROWS, BLOCK,
    )  # fmt: skip
    device.put_signal(signals_ptr, signal_peers_ptr, to, index, device.word(epoch, num_rows), NVSHMEM)
    seen = device.wait(
        signals_ptr + index, device.word(epoch, 0), timeout_us, report_ptr, rank, origin, 0, index, NVSHMEM
    )
    device.fence_tma(TMA)
    arrived = tl.where(device.failed(report_ptr), 0, (seen & 0xFFFFFFFF).to(tl.int32))
    # [ROWS, D]
    i_row, i_d = tl.arange(0, ROWS), tl.arange(0, D)
    if TMA:
        rows = tl.make_tensor_descriptor(region_ptr, [arrived, D], [D, 1], [ROWS, D])
        b_x = rows.load([0, 0])
    else:
        b_x = tl.load(
            region_ptr + i_row[:, None] * D + i_d[None, :], mask=(i_row < arrived)[:, None], other=0.0
        )
    tl.store(out_ptr + i_row[:, None] * D + i_d[None, :], b_x)
    device.quiet(NVSHMEM)


def arguments_of(region: Tensor, signals: Tensor, row: list[int], **others: Any) -> dict[str, Any]:
    """Arguments of ping by name: rows [ROWS, D] from PE 0 to itself in epoch 1, or as `others` say.

    Its tables are zero: no pointer reaches it, and NVSHMEM's functions carry rows and signal.
    """
    device, (num_rows, width) = region.device, region.shape
    # Beyond num_rows stands a row that source does not have: nobody may look at it.
    rows = torch.full((num_rows,), 10**6, dtype=torch.int32, device=device)
    rows[: len(row)] = torch.tensor(row, dtype=torch.int32)
    nowhere, words = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 8))
    given: dict[str, Any] = {"source_ptr": torch.arange(10.0 * width, device=device).view(10, width)}
    given |= {"row_ptr": rows, "num_rows": len(row), "stage_ptr": None}
    given |= {"region_ptr": region, "peers_ptr": nowhere}
    given |= {"signals_ptr": signals, "signal_peers_ptr": nowhere, "index": 1}
    given |= {"out_ptr": torch.full_like(region, torch.nan), "report_ptr": words}
    given |= {"to": 0, "origin": 0, "rank": 0, "epoch": 1, "timeout_us": 5_000_000}
    return given | {"D": width, "ROWS": num_rows, "BLOCK": 4, "TMA": False, "NVSHMEM": True} | others


def specimens(arch: int) -> Iterator[Specimen]:
    """What the tests compile: both transports, and TMA behind the wait."""
    words = ("peers_ptr", "signals_ptr", "signal_peers_ptr", "report_ptr")
    arguments: dict[str, Any] = {name: torch.empty(0, dtype=torch.int64) for name in words}
    arguments |= dict.fromkeys(("index", "to", "origin", "rank", "num_rows", "epoch"), 3)
    arguments |= {"row_ptr": torch.empty(0, dtype=torch.int32), "timeout_us": 1 << 40}
    arguments |= {"D": 256, "ROWS": 4, "BLOCK": 256}
    variants = [("bf16", "pointers", ""), ("fp32", "pointers", ""), ("bf16", "nvshmem", "")]
    if arch >= 90:
        variants += [("bf16", "pointers", "tma"), ("bf16", "nvshmem", "tma")]
    for dtype, transport, more in variants:
        rows = torch.empty(0, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
        nvshmem = transport == "nvshmem"
        given = dict.fromkeys(("source_ptr", "region_ptr", "stage_ptr", "out_ptr"), rows)
        given |= {"TMA": more == "tma", "NVSHMEM": nvshmem}
        # Otherwise ptxas 12.9 saves registers for occupancy, down to 32, and NVSHMEM's functions spill.
        given |= {"maxnreg": 128} if nvshmem else {}
        config = f"4x256 {dtype} {transport} {more}".rstrip()
        yield Specimen("ping", config, ping, arguments | given, tma=more == "tma")
