"""What cutting a batch into parts needs: slots that start at zero in every part, and whole buffers out
of parts again.

    T  tokens of this part      E = W * L  experts      C  capacity of the whole batch
    K  choices per token        P  parts                c  capacity of a part's buffer

A part sends anything from 0 to C rows to an expert (Lancet, section 2.3), and its buffers hold those
rows at the front, as every buffer does. So its slots are renumbered (`local_slots`), and where the
backward wants the whole batch's buffer, the parts' rows are put one after the other (`merge_parts`), and
the slots say so (`merge_slots`). For gates with token-order priority the merged slots are the very slots
of the uncut batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancet_kernels.ops.gates.slots import slots_in_token_order
from lancet_kernels.ops.rows import blocks, compact, expand, real_rows_by_rank


@torch.library.custom_op("lancet::local_slots", mutates_args=())
def local_slots(
    expert_TK: Tensor, slot_TK: Tensor, num_experts: int, capacity: int, part_capacity: int
) -> tuple[Tensor, Tensor]:
    """Renumber the kept choices of a part from zero, in token order.

    Example: C = 3, expert = [[0], [0], [1]], slot = [[2], [3], [0]] -> slot = [[0], [c], [0]], counts =
    [1, 1].

    Args: slot_TK: slots in the whole batch. part_capacity: c, at least the most rows one expert gets here.
    Returns: local slot_TK (c: dropped), counts_E; int64.
    """
    kept_TK = slot_TK < capacity
    # Dropped choices go to an expert that does not exist, so that they take nobody's place.
    target_TK = torch.where(kept_TK, expert_TK, num_experts)
    local_TK, count_E1 = slots_in_token_order(target_TK, expert_TK.new_zeros(num_experts + 1))
    return torch.where(kept_TK, local_TK, part_capacity), count_E1[:-1].contiguous()


@local_slots.register_fake
def _(expert_TK, slot_TK, num_experts, capacity, part_capacity):
    return torch.empty_like(slot_TK), slot_TK.new_empty(num_experts)


@torch.library.custom_op("lancet::merge_parts", mutates_args=())
def merge_parts(buffers: list[Tensor], counts: list[Tensor], capacity: int) -> Tensor:
    """The whole batch's buffer [W, L, C, D]: of each (rank, expert), the rows of part 0, then of part 1, ...

    Args: buffers: P of [W, L, c, D]; counts: P of [W, L], the real rows of each.
    """
    ranks, local_experts = counts[0].shape
    if buffers[0].device.type == "cpu":
        return _merge_blocks(buffers, counts, capacity)
    rows, places = [], []
    before_WL1 = torch.zeros(ranks, local_experts, 1, dtype=torch.int64, device=buffers[0].device)
    base_WL1 = torch.arange(ranks * local_experts, device=before_WL1.device).view(ranks, local_experts, 1)
    for buffer_WLcD, count_WL in zip(buffers, counts, strict=True):
        part_capacity = buffer_WLcD.shape[2]
        row_R = real_rows_by_rank(count_WL, part_capacity)
        slot_c = torch.arange(part_capacity, device=before_WL1.device)
        place_WLc = base_WL1 * capacity + before_WL1 + slot_c
        rows.append(compact(buffer_WLcD, row_R))
        places.append(place_WLc.view(-1)[row_R])
        before_WL1 = before_WL1 + count_WL[..., None]
    return expand(torch.cat(rows), torch.cat(places), (ranks, local_experts, capacity))


def _merge_blocks(buffers: list[Tensor], counts: list[Tensor], capacity: int) -> Tensor:
    """The same block by block."""
    ranks, local_experts = counts[0].shape
    merged_WLCD = buffers[0].new_empty(ranks, local_experts, capacity, buffers[0].shape[3])
    filled = [[0] * local_experts for _ in range(ranks)]
    for buffer_WLcD, count_WL in zip(buffers, counts, strict=True):
        for w, e, n in blocks(count_WL):
            begin = filled[w][e]
            merged_WLCD[w, e, begin : begin + n] = buffer_WLcD[w, e, :n]
            filled[w][e] += n
    for w in range(ranks):
        for e in range(local_experts):
            merged_WLCD[w, e, filled[w][e] :].zero_()
    return merged_WLCD


@merge_parts.register_fake
def _(buffers, counts, capacity):
    ranks, local_experts, _, width = buffers[0].shape
    return buffers[0].new_empty(ranks, local_experts, capacity, width)


@torch.library.custom_op("lancet::merge_slots", mutates_args=())
def merge_slots(experts: list[Tensor], slots: list[Tensor], counts: list[Tensor], capacity: int) -> Tensor:
    """The slots of all tokens in the merged buffer; [T, K] of the whole batch, C where dropped.

    Args: experts, slots: P of [T_p, K], slots local; counts: P of [E].
    """
    before_E = torch.zeros_like(counts[0].view(-1))
    merged = []
    for expert_TK, slot_TK, count in zip(experts, slots, counts, strict=True):
        count_E = count.view(-1)
        kept_TK = slot_TK < count_E[expert_TK]
        merged.append(torch.where(kept_TK, slot_TK + before_E[expert_TK], capacity))
        before_E = before_E + count_E
    return torch.cat(merged)


@merge_slots.register_fake
def _(experts, slots, counts, capacity):
    return slots[0].new_empty(sum(s.shape[0] for s in slots), slots[0].shape[1])
