"""The fused kernels on virtual PEs: several at once on one GPU; in the interpreter one without peers."""

import time
from dataclasses import replace

import pytest
import torch

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.overlap import warming_up
from lancet_kernels.kernels.runtime import recorded
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case, check_accuracy
from tests.lancet_kernels.kernels.overlap_ranks import check_dense, check_same, same_bits
from tests.lancet_kernels.kernels.test_overlap_kernel import SMALL
from tests.lancet_kernels.kernels.virtual_pass import VirtualPass
from tests.lancet_kernels.kernels.virtual_pes import launched_without_tasks

HALF, BRAIN = torch.float16, torch.bfloat16
WORLDS = [1, 2, 4]
# Beyond what runs between processes in the interpreter: TMA, several chunks of rows and tiles per expert,
# more experts than PEs, all tokens to one.
LARGE = {
    "gelu": Case(tokens=700, capacity=300, width=256, hidden=192, dtype=BRAIN),
    "swiglu": Case(tokens=513, capacity=400, width=320, hidden=136, activation="swiglu", dtype=BRAIN),
    "many experts": Case(local=16, tokens=300, choices=4, capacity=40, width=128, hidden=64, dtype=HALF),
    "one expert": Case(tokens=600, choices=1, capacity=450, width=128, hidden=256, choose="one", dtype=BRAIN),
    "float32": Case(tokens=200, capacity=130, width=96, hidden=72, activation="silu", bias=False),
}
# (case, options of VirtualPass)
WORK = [
    (case, {name: True for name in ("dense",) if options.get(name)})
    for cases in SMALL.values()
    for case, options in cases
]
WORK += [(replace(case, world=world), {}) for case in LARGE.values() for world in WORLDS]
WORK += [(replace(LARGE["gelu"], world=world), {"dense": True}) for world in WORLDS]
GELU, ODD = LARGE["gelu"], Case()
# The Hopper kernel: tiles that end before a tile's columns do, several tiles of an expert, tiles of several
# sources. Compiling takes most of the time that the first run on a GPU has, so that the others are long.
HOPPER_WORK = few_of(
    [
        pytest.param((GELU, {}), id="gelu"),
        pytest.param((replace(LARGE["swiglu"], hidden=192), {}), id="swiglu"),
        pytest.param((GELU, {"dense": True}), id="independent GEMMs"),
        pytest.param((replace(GELU, world=1), {}), id="gelu, 1 PE"),
        pytest.param((replace(GELU, world=4), {}), id="gelu, 4 PEs"),
        pytest.param((Case(tokens=300, capacity=300, width=512, hidden=576, activation="silu", bias=False,
                           dtype=HALF), {}), id="silu, no bias"),
        pytest.param((LARGE["many experts"], {}), id="many experts"),
        pytest.param((LARGE["one expert"], {}), id="one expert"),
    ],
    0, 1, 2,
)  # fmt: skip
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is for compute capability 9.0",
)


def name_of(work: tuple[Case, dict]) -> str:
    return "-".join([str(work[0]), *work[1]])


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of the chosen tests, compiled side by side: one after the other would take minutes."""
    if not torch.cuda.is_available():
        return
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    with warming_up():
        for params in chosen:
            if work := params.get("work") or params.get("hopper_work"):
                case, options = work
                for bodies in ("triton", "gluon") if "hopper_work" in params else ("triton",):
                    run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
                    run.pes.each(run.play)
        torch.cuda.synchronize()


@pytest.mark.parametrize("work", few_of(map(pytest.param, WORK)), ids=name_of)
def test_forward_and_backward(compiled: None, device: torch.device, work: tuple[Case, dict]) -> None:
    case, options = work
    if device.type == "cpu" and (case.world > 1 or case.tokens > 100):
        pytest.skip("the interpreter runs one small PE")
    run = VirtualPass(case, device, **options)
    run.pes.warm_up(run.play)
    for _ in range(3 if device.type == "cuda" else 1):
        answers = run.pes.each(run.play)
        run.check()
        check_accuracy(answers, case)
        for layer in run.layers:
            check_dense(layer.dense)
        del answers


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("hopper_work", HOPPER_WORK)
def test_the_hopper_kernel_is_as_the_plain_one(compiled: None, hopper_work: tuple[Case, dict]) -> None:
    """Its numbers as right, its rows bit for bit."""
    case, options = hopper_work
    rows = []
    for bodies in ("triton", "gluon"):
        run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
        run.pes.warm_up(run.play)
        for _ in range(3):
            answers = run.pes.each(run.play)
            run.check()
            check_accuracy(answers, case)
            for layer in run.layers:
                check_dense(layer.dense)
        rows.append([exchange.rows.local.clone() for exchange in run.exchanges])
    for plain, hopper in zip(*rows, strict=True):
        assert same_bits(plain, hopper), "rows, their places, or what lies beside them"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "bodies"),
    [(1, "triton"), (2, "triton"), (4, "triton"), pytest.param(2, "gluon", marks=on_hopper)],
)
def test_many_passes_without_a_pause(compiled: None, world: int, bodies: str) -> None:
    """Nothing waits for the device between passes: PEs run ahead of one another. The same bits each time."""
    case = replace(GELU, world=world)
    run = VirtualPass(case, torch.device("cuda"), bodies=bodies)
    run.pes.warm_up(run.play)
    first = run.pes.each(run.play)
    run.check()
    check_accuracy(first, case)

    def often(rank):
        return [run.play(rank) for _ in range(20)]

    run.pes.warm_up(often)
    for mine, once in zip(run.pes.each(often), first, strict=True):
        for again in mine:
            check_same(again, once, f"{case} {bodies}")
    run.check()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_a_cuda_graph_is_replayed_with_changing_data(compiled, world):
    """A graph for each PE, replayed 50 times: epochs and rows taken go on inside it."""
    case = replace(ODD, world=world, width=32, hidden=32)
    run = VirtualPass(case, torch.device("cuda"))
    run.pes.warm_up(run.play)
    run.pes.each(run.play)
    run.check()
    graphs, answers = [], []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with run.pes.on(rank), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            answers.append(run.play(rank))
        graphs.append(graph)
    for seed in range(1, 51):
        run.load(replace(case, seed=seed))
        run.pes.each(lambda rank: graphs[rank].replay())
        torch.cuda.synchronize()
        run.check()
        check_accuracy(answers, replace(case, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize("bodies", ["triton", pytest.param("gluon", marks=on_hopper)])
def test_a_pe_that_never_comes(compiled: None, bodies: str) -> None:
    """The launch of the other one ends, says whom it waited for, and leaves the GPU free."""
    run = VirtualPass(GELU, torch.device("cuda"), bodies=bodies, timeout_s=0.5)
    run.pes.warm_up(run.play)
    begin = time.monotonic()
    with run.pes.on(0):
        out, _saved = run.layers[0].run_forward()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 30
    with pytest.raises(CommunicationError, match="forward: PE 0 waited for PE 1"):
        run.layers[0].forward.check()
    assert out.isnan().any(), "results without their rows"
    later = torch.ones(1 << 20, device="cuda")
    assert float(later.sum()) == 1 << 20


@pytest.mark.gpu
def test_a_warm_up_sends_nothing(compiled):
    run = VirtualPass(ODD, torch.device("cuda"))
    run.pes.warm_up(run.play)
    assert_skipped(run, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_launches_without_tasks_send_nothing_and_wait_for_nobody(device: torch.device, world: int) -> None:
    case = replace(ODD, world=world)
    run = VirtualPass(case, device)
    with launched_without_tasks():
        for _ in range(3):
            run.pes.each(run.play)
    assert_skipped(run, 3)
    if world == 1:
        check_accuracy(run.pes.each(run.play), case)
    run.check()


def assert_skipped(run: VirtualPass, passes: int) -> None:
    """Nothing came, and no rows are occupied, as after so many passes."""
    for exchange in run.exchanges:
        assert exchange.rows.local.isnan().all()
        assert not exchange.arrived.local.any()
        assert not exchange.occupied.any()
    for layer in run.layers:
        assert layer.backward.released.local.max() >> 32 == passes, "the skipped passes are released"


@pytest.mark.parametrize(("world", "programs"), [(1, 4 * 66), (2, 66)])
def test_combine_leaves_room_for_the_launches_of_other_pes(world: int, programs: int) -> None:
    run = VirtualPass(replace(ODD, world=world), torch.device("cpu"))
    layer = replace(run.layers[0], config=replace(run.layers[0].config, programs=66))
    with recorded() as launches:
        layer.run_forward()
    assert [noted.grid for noted in launches[-2:]] == [(66,), (programs,)]
