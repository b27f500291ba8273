"""Groups of ranks that share experts, and groups that sum gradients.

Groups go by name, because an op's arguments are plain data. The empty name means "one rank": no
torch.distributed needed.

    N = 4 ranks, expert groups of W = 2:      experts 0 1   2 3        expert group    (0, 1) (2, 3)
                                              rank    0     1          replica group   (0, 2) (1, 3)
                                              rank    2     3          data group      (0, 1, 2, 3)

All-to-alls run in the expert group. Gradients of experts are summed over the replica group, all others over
the data group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.waiting import waiting

AnyGroups: TypeAlias = "Groups | DeviceMesh | dist.ProcessGroup"
"""What `groups=` takes everywhere: all groups of a job; a DeviceMesh with a dimension "expert" (and
"replica", along which ranks hold the same experts), or of one dimension; or the process group of the ranks
that share experts, or one model."""


EXPERT_GROUP = "lancet_expert_group"
"""Attribute of a module that is no `MoELayer`, but whose parameters are experts: its expert group."""
FORWARD_OF = "lancet_forward_of"
"""Attribute of a module whose forward is a closure: gives the forward of another module with the same
parameters."""


@dataclass(frozen=True)
class Groups:
    """The groups of one model on this rank, as names; "" is a group of one rank.

    Replica and data groups have communicators of their own, so that an all-reduce never blocks an all-to-all
    in the same queue.
    """

    expert: str = ""
    """W ranks that share one set of experts: the all-to-alls."""
    replica: str = ""
    """N / W ranks that hold the same experts: their gradients are summed here."""
    data: str = ""
    """N ranks with different tokens: all other gradients are summed here."""
    world: str = ""
    """All ranks that run this model, tensor-parallel ones included: they agree on one plan."""

    @classmethod
    def of(cls, groups: AnyGroups | None) -> Groups:
        """All groups of a job: of a process group as by `around`, of a mesh as by `from_mesh`.

        Collective over all ranks of the job, unless they are `Groups`.
        """
        given = without_mesh(groups)
        return given if isinstance(given, Groups) else cls.around(given)

    @classmethod
    def around(cls, expert_group: dist.ProcessGroup | str | None = None) -> Groups:
        """Derive all groups from the expert groups, for a job in which every rank sees different tokens.

        Collective over all ranks of the job; each gives its own expert group, or the name of it (None: one
        group of all ranks). A second call with the same group returns the same communicators.
        Raises: UserError on every rank, unless all expert groups have one size and every rank is in one.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        expert = expert_group if isinstance(expert_group, str) else group_name(expert_group)
        own = group_ranks(expert)
        expert_groups = groups_of_all_ranks(own)
        ranks = sorted(rank for group in expert_groups for rank in group)
        all_ranks = list(range(dist.get_world_size()))
        if len({len(group) for group in expert_groups}) != 1 or ranks != all_ranks:
            raise UserError(
                "expert groups",
                got=", ".join(map(str, expert_groups)),
                expected=f"groups of one size that hold each of the {len(all_ranks)} ranks once",
                do="make the groups alike, or use Groups.from_mesh",
            )
        remembered = _AROUND.setdefault(_world(), {})
        if expert not in remembered:
            place = own.index(dist.get_rank())
            replicas = [group[place] for group in expert_groups]
            remembered[expert] = cls._with_communicators(expert, replicas, all_ranks, all_ranks)
        return remembered[expert]

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, expert: str, replica: str | None = None) -> Groups:
        """The groups of a DeviceMesh, by the names of its dimensions. Collective over all ranks of the job.

        Args: expert: the dimension along which ranks hold different experts. replica: the dimension along
            which ranks hold the same experts and see different tokens; None: no such dimension. Along all
            other dimensions (tensor parallel) ranks see the same tokens; use `set_gradient_group` for
            parameters that are sharded along them.
        Raises: UserError for a dimension that the mesh does not have.
        """
        names = mesh.mesh_dim_names or ()
        for name in (expert, replica):
            if name is not None and name not in names:
                raise UserError(
                    "dimension of the mesh",
                    got=repr(name),
                    expected=f"one of {', '.join(names) or 'its names, of which it has none'}",
                    do="name the mesh's dimensions with mesh_dim_names",
                )
        different_tokens = tuple(name for name in names if name in (expert, replica))
        data = mesh[different_tokens].mesh.flatten().tolist()
        expert_name = group_name(mesh[expert].get_group())
        own = group_ranks(expert_name)
        # By its place in the group, which torch sorts: ranks of a mesh may stand in any order.
        place, all_data = own.index(dist.get_rank()), {*data}
        replicas = [group[place] for group in groups_of_all_ranks(own) if all_data.issuperset(group)]
        return cls._with_communicators(expert_name, replicas, data, mesh.mesh.flatten().tolist())

    @classmethod
    def of_consecutive(cls, ranks: int, expert_ranks: int, tensor_ranks: int = 1) -> Groups:
        """The groups of the first of `ranks` ranks, the first `expert_ranks` of which share one set of
        experts, and the first `tensor_ranks` the same tokens. Collective over all ranks of the job, which
        are alike (`stand_in`)."""
        everyone = list(range(ranks))
        expert = group_name(None) if expert_ranks == ranks else _new_group(everyone[:expert_ranks])
        data = everyone[::tensor_ranks]
        return cls._with_communicators(expert, everyone[::expert_ranks], data, everyone)

    @classmethod
    def of_ranks(cls, group: str) -> Groups:
        """For ranks that hold different slices of one model (`parallelize`): the group for its collectives,
        one of the same ranks for gradients, and no replicas. Collective over all ranks of the job."""
        ranks = group_ranks(group)
        return cls._with_communicators(group, [dist.get_rank()], ranks, ranks)

    @classmethod
    def _with_communicators(
        cls, expert: str, replica: list[int], data: list[int], world: list[int]
    ) -> Groups:
        """Args: the ranks of this rank's groups. Collective over all ranks of the job."""
        expert_ranks = group_ranks(expert)
        counts = _new_group(expert_ranks)
        # torch sorts the ranks of a new group; in a group that is not sorted, positions would differ.
        if expert and expert_ranks == sorted(expert_ranks):
            _COUNTS[group_of(expert)] = counts
        data_name = _new_group(data)
        # With one rank per expert group, experts are replicated like everything else.
        replica_name = data_name if sorted(replica) == sorted(data) else _new_group(replica)
        all_ranks = len(world) == dist.get_world_size()
        return cls(expert, replica_name, data_name, group_name(None) if all_ranks else _new_group(world))


Value = TypeVar("Value")
# By group, which they do not keep alive.
_AROUND: WeakKeyDictionary[dist.ProcessGroup, dict[str, Groups]] = WeakKeyDictionary()
"""For the group of all ranks: groups by name of the expert group."""
_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, Groups]] = WeakKeyDictionary()
"""For the group of all ranks."""
_COUNTS: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_SUBGROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[object, str]] = WeakKeyDictionary()


def groups_of_all_ranks(ranks: list[int], what: str = "process groups") -> list[list[int]]:
    """The distinct groups that the ranks name. Collective over all ranks of the job.

    With a fake backend: groups of the same shape. Example: [0, 2] of four ranks: [[0, 2], [1, 3]].
    """
    world = dist.get_world_size()
    if dist.get_backend() == "fake":
        groups, placed = list[list[int]](), set[int]()
        for rank in range(world):
            if rank not in placed:
                groups.append([r + rank - ranks[0] for r in ranks])
                placed.update(groups[-1])
        return sorted(groups)
    gathered: list[list[int]] = [[]] * world
    with waiting(f"comparison of the {what}"):
        dist.all_gather_object(gathered, ranks)
    return [list(group) for group in sorted(set(map(tuple, gathered)))]


def _new_group(ranks: Sequence[int]) -> str:
    """A new communicator for these ranks; "" for one rank. Collective over all ranks of the job.

    Every rank takes part in making all groups, in one order: torch counts them to give them names, and
    ranks that had counted differently would wait for each other for ever.
    """
    own = ""
    for group in groups_of_all_ranks(sorted(ranks)):
        if len(group) > 1:
            with waiting("making of the process groups"):
                # torch's own default is 30 minutes.
                timeout = timedelta(seconds=group_timeout_s(_world()))
                process_group = dist.new_group(group, timeout=timeout)
            if group == sorted(ranks):
                own = process_group.group_name
    return own


def subgroup(places: Sequence[int], group: str, backend: str | None = None) -> str:
    """The communicator of some places of a group, this rank's among them; a second call gives the same one.

    Collective over these ranks alone, all of which ask for their subgroups in the same order.
    """
    whole = group_of(group)
    names = _SUBGROUPS.setdefault(whole, {})
    if (key := (tuple(places), backend)) not in names:
        ranks = [dist.get_global_rank(whole, place) for place in places]
        with waiting("making of a process group", whole, peers=[p for p in places if p != whole.rank()]):
            process_group = dist.new_group(
                ranks,
                timeout=timedelta(seconds=group_timeout_s(whole)),
                backend=backend,
                use_local_synchronization=True,
            )
        names[key] = process_group.group_name
    return names[key]


def is_of_processes(group: dist.ProcessGroup) -> bool:
    """Is every rank of the group a process, and is it no wrapper of another group? Not so of a stand-in, a
    fake or a link group."""
    return type(group) is dist.ProcessGroup and dist.get_backend(group) != "fake"


def host_group(name: str) -> str:
    """A communicator of the same ranks for messages that wait for no GPU; "" where they are no processes.

    Collective over these ranks, as `subgroup`.
    """
    there = bool(name) and is_of_processes(group_of(name))
    return subgroup(range(group_size(name)), name, "gloo") if there else ""


def counts_group(name: str) -> str:
    """The communicator on which the counts of an expert group are exchanged.

    On that of the rows, the counts of one part of a batch would queue behind the rows of the part before
    it. Without `Groups`, which create the second one, nothing is cut into parts, and the first one does.
    """
    return _COUNTS.get(group_of(name), name) if name else ""


def group_name(group: dist.ProcessGroup | None) -> str:
    """The name to hand to the ops. None means all ranks, or the one rank there is."""
    if not dist.is_available() or not dist.is_initialized():
        return ""
    group = group or _world()
    return group.group_name if group.size() > 1 else ""


def expert_group_name(groups: AnyGroups | None) -> str:
    """The name of the ranks that share experts, or one model; None: all ranks."""
    given = without_mesh(groups)
    return given.expert if isinstance(given, Groups) else group_name(given)


def data_group_name(groups: AnyGroups | None) -> str:
    """The name of the ranks with different tokens: of these groups, or this very group (None: all ranks)."""
    given = without_mesh(groups)
    return given.data if isinstance(given, Groups) else group_name(given)


def without_mesh(groups: AnyGroups | None) -> Groups | dist.ProcessGroup | None:
    """A mesh as `Groups`, one object for each mesh, or as its process group."""
    if not isinstance(groups, DeviceMesh):
        return groups
    names = groups.mesh_dim_names or ()
    if groups.ndim == 1 and "expert" not in names:
        return groups.get_group()
    meshes = _MESHES.setdefault(_world(), {})
    if groups not in meshes:
        meshes[groups] = Groups.from_mesh(groups, "expert", "replica" if "replica" in names else None)
    return meshes[groups]


def _world() -> dist.ProcessGroup:
    """All ranks, where torch.distributed is initialized."""
    world = dist.group.WORLD
    assert world is not None
    return world


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of a name from `group_name` (not of the empty one)."""
    return _resolve_process_group(cast(Any, name))  # of a type of torch's own, which older ones lack


def from_rank(rank: int, value: Value, group: str, what: str) -> Value:
    """The value of one of the group's ranks, on every rank; `value` where there is no group. Collective.

    Args: rank: in the group. what: is sent, for the message if a rank stays away.
    """
    if not group:
        return value
    process_group, box = group_of(group), [value]
    with waiting(f"broadcast of {what}", process_group):
        dist.broadcast_object_list(box, src=dist.get_global_rank(process_group, rank), group=process_group)
    return box[0]


def from_first_rank(value: Value, group: str, what: str) -> Value:
    """`from_rank` of the group's first rank."""
    return from_rank(0, value, group, what)


def values_of_ranks(value: Value, group: str, what: str) -> list[Value]:
    """The values of all ranks of the group; only this one where there is no group. Collective.

    Args: what: is done with them, for the message if a rank stays away.
    """
    values = [value] * group_size(group)
    if group:
        with waiting(what, group_of(group)):
            dist.all_gather_object(values, value, group=group_of(group))
    return values


def over_ranks(figures: Tensor, group: str, reduction: str, what: str = "all_reduce of times") -> Tensor:
    """The "mean", "min" or "max" of figures over the ranks, float64 on the CPU. Collective.

    Args: what: is done with them, for the message if a rank stays away.
    """
    values = figures.to(torch.float64, copy=True)
    if group:
        values = values.to(group_device(group))
        operation = {"mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[reduction]
        with waiting(what, group_of(group)):
            dist.all_reduce(values, operation, group=group_of(group))
    values = values.cpu()
    return values / group_size(group) if reduction == "mean" else values


def group_ranks(name: str) -> list[int]:
    """The ranks of the group, as numbers of the whole job; only this one for the empty name."""
    return dist.get_process_group_ranks(group_of(name)) if name else [dist.get_rank()]


def group_size(name: str) -> int:
    """The number of ranks; 1 for the empty name."""
    return group_of(name).size() if name else 1


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The timeout of the group's collectives."""
    device = next(iter(group._device_types))
    return group._get_backend(device).options._timeout.total_seconds()


def group_rank(name: str) -> int:
    """This rank's place in the group; 0 for the empty name."""
    return group_of(name).rank() if name else 0


def group_device(name: str) -> torch.device:
    """The device of tensors for the group's collectives: the CPU if its backend takes that, else the GPU."""
    kinds = {device.type for device in group_of(name)._device_types}
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())
