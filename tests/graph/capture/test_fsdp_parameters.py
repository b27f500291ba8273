"""The mesh over which experts are sharded."""

from lancet_kernels import Groups
from lancet_kernels.graph.capture.fsdp_parameters import mesh_of_experts
from lancet_kernels.predict.own_step import fake_ranks


def test_experts_over_ranks_of_which_pairs_share_tokens():
    """8 ranks, 4 for each set of experts, pairs of which have the same tokens: the data group lacks half."""
    with fake_ranks(8):
        groups = Groups.of_consecutive(8, 4, 2)
        mesh = mesh_of_experts(groups, "cpu")
        assert mesh.mesh.tolist() == [0, 4]
        assert mesh._get_root_mesh().mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
