"""LoRA by PEFT on converted models: adapters of attention, of experts, of both, with their base frozen.

Gradients on two ranks, with a plan and without, beside those of one process that has all experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lancet_kernels import (
    CausalLMStep,
    Groups,
    convert,
    ddp,
    expert_parameters,
    export_state_dict,
    fsdp,
    prepare_data_parallel,
    save_safetensors,
)
from tests import transformers_families
from tests.grids import few_of
from tests.optimized import optimized
from tests.refusals import refusal
from tests.setups import refused
from tests.transformers_models import BOUND, LORA, LORA_WAYS, check_equal, distance, tiny_batch, tiny_model

pytest.importorskip("peft")

RANK, EXPERTS = 2, 8
CHECKPOINTING = ("reentrant", "", "not reentrant")


def adapted(
    family: str, targets: str, checkpointing: str, groups: Groups | None, unconverted: str = ""
) -> nn.Module:
    """With the adapters that all experts have in one process, those of this rank.

    Args: unconverted: the `experts_implementation` of a model that is not converted.
    """
    model = tiny_model(family)
    if unconverted:
        model.set_experts_implementation(unconverted)
    else:
        convert(model, groups)
    return with_adapters(model, targets, checkpointing)


def with_adapters(model: nn.Module, targets: str, checkpointing: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model.config.output_router_logits = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    config = LoraConfig(r=RANK, init_lora_weights=False, **LORA[targets])
    model = get_peft_model(model, config).train()
    generator, experts = torch.Generator().manual_seed(4), set(expert_parameters(model))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            shape = list(parameter.shape)
            cut = None if parameter not in experts else "lora_B" in name
            if cut is not None:
                shape[cut] = RANK * EXPERTS
            whole = torch.randn(shape, generator=generator, dtype=parameter.dtype)
            parameter.data.copy_(of_rank(whole, cut))
    return model


def of_rank(whole: Tensor, cut: bool | None) -> Tensor:
    """This rank's part of an adapter: lora_A is [E * r, in], lora_B [out, r * E], None is whole on each."""
    parts = dist.get_world_size()
    if cut is None or parts == 1:
        return whole
    if not cut:
        return whole.chunk(parts)[dist.get_rank()]
    return whole.view(len(whole), RANK, EXPERTS).chunk(parts, 2)[dist.get_rank()].flatten(1)


def distances(family: str, targets: str, checkpointing: str, way: str) -> tuple[int, float, float]:
    """-> gradients that were compared, the largest difference, and the smallest of their largest values."""
    ranks = dist.get_world_size()
    whole = whole_gradients(family, targets, checkpointing, ranks)
    model = adapted(family, targets, checkpointing, None)
    experts = {name for name, p in model.named_parameters() if p in set(expert_parameters(model))}
    batch = tiny_batch(dist.get_rank())
    step: Callable = CausalLMStep(model)
    if way == "ddp":
        if targets == "experts":
            with refused("no trained parameters but those of experts", "prepare_data_parallel(model)"):
                ddp(step)
            prepare_data_parallel(step)
        else:
            step = ddp(step)
    else:
        if way == "fsdp":
            fsdp(model)
        inputs = batch["input_ids"], batch["labels"]
        step = optimized(step, inputs, "lancet", reduce_gradients="mean")
    for _ in range(2):
        model.zero_grad()
        step(batch["input_ids"], batch["labels"]).backward()
    assert way == "ddp" or not step.fallbacks
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            wanted = of_rank(whole.pop(name), "lora_B" in name if name in experts else None)
            found.append((float((gradient - wanted).abs().max()), float(wanted.abs().max())))
    assert not whole
    return len(found), max(d for d, _ in found), min(largest for _, largest in found)


@pytest.mark.long
@pytest.mark.parametrize(("targets", "checkpointing"), [*zip(LORA, CHECKPOINTING, strict=True)])
def test_without_conversion(targets: str, checkpointing: str) -> None:
    """One rank, by `experts_implementation="lancet"`, beside transformers' own experts."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    import lancet_kernels.transformers.expert_parallel  # noqa: F401  registers

    batch = tiny_batch()
    theirs = adapted_alone("Qwen3-MoE", targets, checkpointing, "eager")
    CausalLMStep(theirs)(**batch).backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(wanted) >= {"attention": 8, "experts": 4, "both": 12}[targets]
    for is_planned in (True, False):  # a plan first: nothing may depend on an eager call before it
        model = adapted_alone("Qwen3-MoE", targets, checkpointing, "lancet")
        step: Callable = CausalLMStep(model)
        if is_planned:
            step = optimized(step, (batch["input_ids"], batch["labels"]))
        for _ in range(2):
            model.zero_grad()
            step(batch["input_ids"], batch["labels"]).backward()
        assert not is_planned or not step.fallbacks
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in wanted), name
            if name in wanted:
                assert wanted[name].abs().max() > 1e-8, "a gradient that is 0 proves nothing"
                assert (parameter.grad - wanted[name]).abs().max() < BOUND, name


def test_adapters_that_a_trace_would_leave_out_are_refused() -> None:
    model = adapted_alone("Qwen3-MoE", "experts", "", "batched_mm")
    batch = tiny_batch()
    with refused("adapters of down_proj", "Qwen3MoeExperts", "convert(model) before PEFT"):
        optimized(CausalLMStep(model), (batch["input_ids"], batch["labels"]))


@pytest.mark.parametrize("family", ["llama4", "gpt_oss", "mixtral"])
def test_adapters_fit_the_original(family: str) -> None:
    """Whichever way its weights lie; put around it, they are named."""
    from peft import LoraConfig, get_peft_model

    original, model = (transformers_families.tiny_model(family) for _ in range(2))
    convert(model, strict=True)
    adapters = LoraConfig(r=RANK, **LORA["experts"])
    shapes = [
        {name: p.shape for name, p in get_peft_model(m, adapters).named_parameters()}
        for m in (original, model)
    ]
    assert shapes[0] == shapes[1]
    assert "ParamWrapper: adapters are around it: convert the model before" in str(convert(original))


def test_a_plan_of_adapters_has_the_loss_of_the_routers() -> None:
    model, batch = adapted_alone("Mixtral", "attention", ""), tiny_batch()
    model.config.output_router_logits = True
    step = optimized(CausalLMStep(model), (batch["input_ids"], batch["labels"]))
    planned = step(**batch)
    assert not step.fallbacks
    assert distance(planned, model(**batch).loss) < BOUND


def under_expert_parallelism(folder: str, checkpointing: str, is_planned: bool) -> float:
    """Adapters of attention on a model that transformers has divided. -> the largest difference."""
    from tests.lancet_kernels.transformers.test_transformers_ep import loaded

    whole = whole_gradients("Qwen3-MoE", "attention", checkpointing, 2, "eager")
    model = with_adapters(
        loaded(folder, "lancet", {"fsdp_size": 2, "ep_size": 2}), "attention", checkpointing
    )
    ids = tiny_batch(dist.get_rank())["input_ids"]
    step: Callable = CausalLMStep(model)
    if is_planned:
        step = optimized(step, (ids, ids), reduce_gradients="mean")
    step(ids, ids).backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if not is_planned:  # PEFT made them after transformers divided the others: no FSDP knows them
        for gradient in own.values():
            dist.all_reduce(gradient.div_(2))
    assert own.keys() == whole.keys()
    return max(float((gradient - whole[name]).abs().max()) for name, gradient in own.items())


@pytest.mark.long
@pytest.mark.parametrize(("checkpointing", "is_planned"), [("reentrant", True), ("not reentrant", False)])
def test_attention_under_expert_parallelism(pool, tmp_path, checkpointing: str, is_planned: bool) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    tiny_model("Qwen3-MoE").save_pretrained(tmp_path)
    for difference in pool.run(
        under_expert_parallelism, str(tmp_path), checkpointing, is_planned, timeout_s=240
    ):
        assert difference < BOUND


def whole_gradients(
    family: str, targets: str, checkpointing: str, ranks: int, unconverted: str = ""
) -> dict[str, Tensor]:
    """Gradients of the mean loss over the batches of all ranks, in one process that has all experts."""
    model = adapted_alone(family, targets, checkpointing, unconverted)
    for rank in range(ranks):
        (CausalLMStep(model, Groups())(**tiny_batch(rank)) / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def adapted_alone(family: str, targets: str, checkpointing: str, unconverted: str = "") -> nn.Module:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda *_: 1)
        return adapted(family, targets, checkpointing, Groups(), unconverted)


# Every two of them meet.
CASES = [
    ("Qwen3-MoE", targets, checkpointing, [*LORA_WAYS][(i + j + 1) % 3])
    for i, targets in enumerate(LORA)
    for j, checkpointing in enumerate(CHECKPOINTING)
]
CASES += [("GPT-OSS", "both", "not reentrant", "optimize")]


@pytest.mark.parametrize(("family", "targets", "checkpointing", "way"), few_of(CASES, 6))
def test_gradients_of_one_process(pool, family: str, targets: str, checkpointing: str, way: str) -> None:
    for number, difference, smallest in pool.run(
        distances, family, targets, checkpointing, way, ranks=2, timeout_s=240
    ):
        assert number >= {"attention": 8, "experts": 4, "both": 12}[targets]
        assert difference < BOUND
        assert smallest > 1e-8, "a gradient that is 0 proves nothing"


def trained_and_saved(folder: str) -> float:
    """Adapters trained under a plan, with FSDP and activation checkpointing; saved; loaded by PEFT on what
    transformers loads; merged there, saved, and loaded once more. -> how far logits are, at most."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = fsdp(adapted("Qwen3-MoE", "both", "not reentrant", None))
    before = export_state_dict(model)
    ids = tiny_batch(dist.get_rank())["input_ids"]
    step = optimized(CausalLMStep(model), (ids, ids), "lancet", reduce_gradients="mean")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        step(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not step.fallbacks
    with torch.no_grad():
        expected = model.eval()(input_ids=tiny_batch()["input_ids"]).logits
    whole = export_state_dict(model)
    changed = {name for name in whole if not torch.equal(whole[name], before[name])}
    assert changed == {name for name in whole if "lora" in name}
    if dist.get_rank():
        dist.barrier()
        return 0.0
    base = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): value
        for name, value in whole.items()
        if "lora" not in name
    }
    tiny_model("Qwen3-MoE").save_pretrained(f"{folder}/base", state_dict=base)
    model.save_pretrained(f"{folder}/adapters", state_dict=whole)
    dist.barrier()

    def loaded(name: str) -> nn.Module:
        path, options = f"{folder}/{name}", {"dtype": torch.float64, "experts_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()

    def off(model: nn.Module) -> float:
        with torch.no_grad():
            logits = model(input_ids=tiny_batch()["input_ids"]).logits
        return float((logits - expected).abs().max() / expected.abs().max())

    own = PeftModel.from_pretrained(loaded("base"), f"{folder}/adapters").eval()
    of_adapters = off(own)
    assert off(loaded("base")) > 1e-3, "adapters that change nothing prove nothing"
    own.merge_and_unload().save_pretrained(f"{folder}/merged")
    return max(of_adapters, off(loaded("merged")))


@pytest.mark.long
def test_trained_adapters_are_loaded_by_transformers_and_peft(pool, tmp_path) -> None:
    assert max(pool.run(trained_and_saved, str(tmp_path), timeout_s=600, collective_timeout_s=120)) < BOUND


def refused_and_saved(folder: str) -> None:
    """Saving on one rank is refused. Then all adapters are saved, and loaded on experts of this rank; and
    merged, saved and exported."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, rank = copy.deepcopy(adapted("Qwen3-MoE", "both", "", None)), dist.get_rank()
    own = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    nowhere = f"{folder}/nowhere"
    told = (
        "save_pretrained of a converted PeftModel: got adapters that are on several ranks, expected "
        "state_dict=, with all of them; call state = export_state_dict(model) on every rank, and "
        "model.save_pretrained(folder, state_dict=state) on one"
    )
    for given in ({}, {"state_dict": model.state_dict()}):
        assert refusal(lambda given=given: model.save_pretrained(nowhere, **given)) == told
    with refused("push_to_hub of a converted PeftModel"):
        model.push_to_hub("nobody/nothing")
    with refused("got a PeftModel with adapters, expected a model of transformers without any"):
        save_safetensors(model, nowhere)
    with refused("got a Qwen3MoeForCausalLM with adapters"):
        save_safetensors(model.get_base_model(), nowhere)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, state in (("exported", export_state_dict(model)), ("gathered", whole)):
        if rank == 0:
            model.save_pretrained(f"{folder}/{name}", state_dict=state)
    dist.barrier()
    base = tiny_model("Qwen3-MoE")
    convert(base)
    loaded = dict(PeftModel.from_pretrained(base, f"{folder}/exported").named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in own.items())
    of_attention = adapted("Qwen3-MoE", "attention", "", None)
    of_attention.save_pretrained(f"{folder}/attention{rank}")
    merged = model.merge_and_unload()
    save_safetensors(merged, f"{folder}/merged")
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float64)
    check_equal(saved.state_dict(), export_state_dict(merged))


def test_adapters_of_all_experts_are_saved_or_none(pool, tmp_path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    pool.run(refused_and_saved, str(tmp_path))
    folders = {"exported", "gathered", "attention0", "attention1", "merged"}
    assert {path.name for path in tmp_path.iterdir()} == folders
    model = adapted_alone("Qwen3-MoE", "both", "")
    wanted = {n.replace(".default", ""): p for n, p in model.named_parameters() if "lora" in n}
    for name in ("exported", "gathered"):
        check_equal(load_file(tmp_path / name / "adapter_model.safetensors"), wanted)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64, experts_implementation="eager"
    )
    ids = tiny_batch()["input_ids"]
    with torch.no_grad():
        off = loaded(input_ids=ids).logits - model.eval()(input_ids=ids).logits
    assert off.abs().max() < BOUND


# ---- torch.distributed.checkpoint


class Run:
    """A model whose experts have adapters, with other values for each rank of an expert group, and their
    optimizer. Args: sharing: how many ranks share experts."""

    def __init__(self, sharing: int, is_sharded: bool, targets: list[str]) -> None:
        from peft import LoraConfig, get_peft_model

        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // sharing, sharing), mesh_dim_names=("replica", "expert")
        )
        groups = Groups.from_mesh(mesh, "expert", "replica")
        model = tiny_model("GPT-OSS")
        model.config.output_router_logits = False
        convert(model, groups)
        torch.manual_seed(dist.get_rank() % sharing)
        config = LoraConfig(r=RANK, init_lora_weights=False, target_modules=[], target_parameters=targets)
        # A copy has hooks and places of its own.
        self.model = copy.deepcopy(get_peft_model(model, config))
        if is_sharded:
            fsdp(self.model, groups=groups)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)

    def values(self) -> dict[str, Tensor]:
        """The adapters of this rank, and what the optimizer keeps of them."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        averages = {f"exp_avg of {n}": self.optimizer.state[p]["exp_avg"] for n, p in named.items()}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in (named | averages).items()}


def saved_by_dcp(folder: str, sharing: int, is_sharded: bool, targets: list[str]) -> dict[str, Tensor]:
    run = Run(sharing, is_sharded, targets)
    for _ in range(2):
        CausalLMStep(run.model)(**tiny_batch()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return run.values()


def loaded_by_dcp(folder: str, sharing: int, is_sharded: bool, targets: list[str]) -> dict[str, Tensor]:
    run = Run(sharing, is_sharded, targets)
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(run.model, run.optimizer, **states)
    return run.values()


def whole_adapters(by_rank: list[dict[str, Tensor]], sharing: int) -> dict[str, Tensor]:
    """The adapters of all experts, as PEFT has them in one process, from those of each rank."""
    whole = {}
    for name in by_rank[0]:
        parts = [values[name] for values in by_rank]
        for rank, part in enumerate(parts):
            assert torch.equal(part, parts[rank % sharing]), "replicas"
        if "lora_B" in name:
            of_each = [part.unflatten(1, (RANK, -1)) for part in parts[:sharing]]
            whole[name] = torch.cat(of_each, 2).flatten(1)
        else:
            whole[name] = torch.cat(parts[:sharing])
    return whole


PLACES = (
    ((2, 2, False), ((2, 2, False), (4, 4, False))),
    ((4, 2, True), ((4, 4, False), (4, 2, True))),
    ((2, 2, False), ((4, 2, True),)),
)
"""Ranks, how many share experts, and whether FSDP shards the model: where it is saved, and where loaded."""


@pytest.mark.parametrize(("here", "elsewhere"), few_of(PLACES))
def test_adapters_of_experts_go_through_a_checkpoint(pool, tmp_path, here: tuple, elsewhere: tuple) -> None:
    targets = LORA["experts"]["target_parameters"]
    ranks, sharing, is_sharded = here
    saved = pool.run(saved_by_dcp, str(tmp_path), sharing, is_sharded, targets, ranks=ranks)
    wanted = whole_adapters(saved, sharing)
    assert len(wanted) == 16
    for ranks, sharing, is_sharded in elsewhere:
        loaded = pool.run(loaded_by_dcp, str(tmp_path), sharing, is_sharded, targets, ranks=ranks)
        check_equal(whole_adapters(loaded, sharing), wanted)


def saved_and_exported(folder: str, targets: list[str]) -> tuple[dict[str, Tensor], str]:
    values = saved_by_dcp(folder, 2, False, targets)
    return values, refusal(lambda: export_state_dict(Run(2, False, targets).model))


def test_adapters_without_a_part_for_each_expert_stay_this_ranks_own(pool, tmp_path) -> None:
    """PEFT takes the biases [L, D] for one matrix."""
    targets = ["experts.down_proj_bias"]
    saved = pool.run(saved_and_exported, str(tmp_path), targets)
    loaded = pool.run(loaded_by_dcp, str(tmp_path), 2, False, targets)
    for (values, told), found in zip(saved, loaded, strict=True):
        assert len(values) == 8
        check_equal(found, values)
        assert "an adapter of the 4 experts of this rank together" in told
    assert not any(torch.equal(saved[0][0][name], saved[1][0][name]) for name in saved[0][0])
