"""What is done to a replica, on real layers of torchao, transformers and PEFT, and on Transformer Engine's
stand-in.

Each treatment is held to what it says by the facts of the variant that it makes, and to leaving the model it
was copied from, and the Parameters that all arms share, as they were.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.stacks.tensors import subclass
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.treatments import (
    NotTried,
    TreatmentContext,
    carries_out,
    carry_out,
    compile_blocks,
    registry,
    strip_compile_marks,
    to_bf16,
    to_float8,
    treatments,
)
from fp8doctor.trial.treatments.adapters import without_adapters
from fp8doctor.trial.treatments.compilation import block_by_block
from fp8doctor.trial.treatments.registry import swap
from fp8doctor.trial.variant import Variant
from tests import prototypes
from tests.examine.models import Stacked, llama, lora, network, training
from tests.examine.test_checkpoint_calls import ON, recomputes
from tests.stand_ins import transformer_engine as te

pytestmark = pytest.mark.slow

TOKENS = {"input_ids": torch.arange(32).reshape(2, 16), "labels": torch.arange(32).reshape(2, 16)}


def facts(model: nn.Module) -> Facts:
    return Facts(network=network(model), training=training(model))


def applied(name: str, model: nn.Module, *layers: str, batch: Any = None, job: Job | None = None) -> Variant:
    """A treatment carried out on a replica that shares the model's Parameters."""
    replica = replicate(model, share=True)[0]
    return treatments()[name].function(
        Variant(replica, batch), TreatmentContext(facts(model), name, layers, job)
    )


def float8(model: nn.Module, **settings: Any) -> nn.Module:
    return convert_to_float8_training(
        model, config=Float8LinearConfig(**settings), module_filter_fn=lambda layer, name: "head" not in name
    )


def in_fp8(model: nn.Module) -> dict[str, str | None]:
    """Recipe by name of every layer that trains in FP8."""
    return {linear.name: linear.recipe for linear in network(model).linears if linear.use == "training"}


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(a is b for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_float8_linear_becomes_a_linear_over_the_same_parameters(bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(32, 48, bias=bias), nn.Linear(48, 16)).bfloat16()
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    expected, weight = plain(x), plain[0].weight
    twin = to_bf16(convert_to_float8_training(plain))
    assert [type(layer) for layer in twin] == [nn.Linear, nn.Linear]  # type: ignore[attr-defined]
    assert twin[0].weight is weight  # type: ignore[index]
    assert torch.equal(twin(x), expected)


def test_a_weight_wrapped_for_the_all_gather_is_unwrapped_over_the_same_data() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32)).bfloat16(), enable_fsdp_float8_all_gather=True)
    twin = to_bf16(replicate(model, share=True)[0])
    assert subclass(model[0].weight) is not None  # type: ignore[index]
    assert subclass(twin[0].weight) is None  # type: ignore[index]
    assert twin[0].weight.data_ptr() == model[0].weight._tensor.data_ptr()  # type: ignore[index]
    twin(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    assert twin[0].weight.grad is not None  # type: ignore[index]


def test_a_training_weight_is_unwrapped_and_its_layer_stays() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16()
    data = model[0].weight.data_ptr()
    quantize_(model, prototypes.float8(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear))
    assert in_fp8(model)
    twin = to_bf16(replicate(model, share=True)[0])
    assert in_fp8(twin) == {}
    assert twin[0].weight.data_ptr() == data  # type: ignore[index]
    assert in_fp8(model), "the model it was copied from keeps its wrapper"


def test_stored_weights_have_no_bf16_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", lambda: None)
    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, Float8WeightOnlyConfig())
    with pytest.raises(NotTried, match="stored in low precision"):
        to_bf16(model)


def test_some_layers_go_back_to_bf16_and_keep_their_compile_marks() -> None:
    model = float8(Stacked())
    model.blocks[0].up.compile(backend="eager")
    kept = applied("keep-in-bf16", model, "blocks.0.up", "blocks.2.down").model
    assert set(in_fp8(model)) - set(in_fp8(kept)) == {"blocks.0.up", "blocks.2.down"}
    assert kept.blocks[0].up._compiled_call_impl is not None  # type: ignore[union-attr, index]
    assert same_parameters(model, kept)
    with pytest.raises(NotTried, match="none of its layers"):
        applied("keep-in-bf16", model, "blocks.7.up")
    with pytest.raises(NotTried, match="names no layers"):
        applied("keep-in-bf16", model)


def test_staying_in_bf16_leaves_no_fp8_and_compiles() -> None:
    bf16 = applied("stay-in-bf16", float8(Stacked())).model
    assert in_fp8(bf16) == {}
    assert [blocks.compiled for blocks in network(bf16).blocks] == [3]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}],
    ids=["plain", "as Accelerate sets it"],
)
def test_another_recipe_is_read_back_from_every_layer(recipe: str, settings: dict[str, bool]) -> None:
    model = float8(Stacked(), **settings)
    model.blocks[1].compile(backend="eager")
    changed = applied(f"recipe-{recipe.replace('_', '-')}", model).model
    assert list(in_fp8(changed).values()) == [recipe] * 6
    assert set(in_fp8(model).values()) == {"tensorwise"}
    assert {linear.features["pad_inner_dim"] for linear in network(changed).linears if linear.features} == {
        "pad_inner_dim" in settings
    }
    assert changed.blocks[1]._compiled_call_impl is not None  # type: ignore[union-attr, index]
    changed(torch.arange(32).reshape(2, 16)).sum().backward()


class Rotated(Float8Linear):
    """A user's own layer, in the manner of tests/patients/gpu/rotated.py."""

    def __init__(self, features: int) -> None:
        super().__init__(features, features, bias=False, config=Float8LinearConfig())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned, weight = self.before(x) @ self.rotation, self.scale * self.weight @ self.rotation
        return matmul_with_hp_or_float8_args.apply(turned, weight.t(), self.linear_mm_config, self.config)


def rotated() -> nn.Module:
    """One layer that has a buffer, a module, a Parameter and a number of its user's."""
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    layer = model[0]  # type: ignore[index]
    layer.__class__ = Rotated
    rotation = nn.init.orthogonal_(torch.empty(32, 32)).bfloat16()
    layer.register_buffer("rotation", rotation, persistent=False)
    layer.before, layer.scale = nn.Linear(32, 32).bfloat16(), 0.5
    layer.register_parameter("shift", nn.Parameter(torch.zeros(32)))
    return model


def test_another_recipe_leaves_a_layer_of_the_users_own_what_its_user_gave_it() -> None:
    model = rotated()
    model[0].compile(backend="eager")  # type: ignore[index]
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    before = model(x)
    changed = applied("recipe-rowwise", model).model
    assert type(changed[0]) is Rotated  # type: ignore[index]
    assert list(in_fp8(changed).values()) == ["rowwise"]
    assert list(in_fp8(model).values()) == ["tensorwise"]
    assert same_parameters(model, changed)
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in model.named_parameters()]
    after = changed(x)
    after.sum().backward()
    assert not torch.equal(before, after), "its forward multiplies under the other recipe"
    assert torch.allclose(before, after, atol=0.2)
    back = applied("recipe-tensorwise", changed).model
    assert torch.equal(before, back(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_was_put_on_a_layer_runs_under_the_other_recipe(compiled: bool) -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    layer = model[0]  # type: ignore[index]
    twice = MethodType(lambda self, x: 2 * Float8Linear.forward(self, x), layer)
    layer.forward = torch.compile(twice, backend="eager") if compiled else twice
    changed, x = applied("recipe-rowwise", model).model, torch.randn(16, 32, dtype=torch.bfloat16)
    assert not torch.equal(changed(x), model(x))
    assert torch.allclose(changed(x), model(x), atol=0.2)


def test_what_holds_a_layer_holds_it_under_the_other_recipe() -> None:
    """A list beside the modules, and the forward of a module that closes over it."""
    model = float8(nn.Sequential(nn.Linear(32, 32, bias=False)).bfloat16())
    model.layers = [model[0]]  # type: ignore[index]
    changed = applied("recipe-rowwise", model).model
    assert changed.layers == [changed[0]]  # type: ignore[index]
    assert in_fp8(changed) == {"0": "rowwise"}


class Adapted(Float8Linear):
    """A user's own layer with another inside, that cannot be pickled."""

    def __getstate__(self) -> None:
        raise RuntimeError

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        new = memo[id(self)] = Adapted.__new__(Adapted)
        vars(new).update({name: copy.deepcopy(each, memo) for name, each in vars(self).items()})
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.inner(x)


def test_a_layer_within_a_layer_is_under_the_other_recipe_too() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).bfloat16())
    layer, layer.inner = model[0], model[1]  # type: ignore[index]
    layer.__class__ = Adapted
    assert in_fp8(applied("recipe-rowwise", nn.Sequential(layer)).model) == {
        "0": "rowwise",
        "0.inner": "rowwise",
    }


def test_a_parametrized_weight_stays_so_under_another_recipe() -> None:
    model = float8(nn.Sequential(nn.Linear(32, 32)).bfloat16())
    nn.utils.parametrizations.weight_norm(model[0])  # type: ignore[index]
    changed = applied("recipe-rowwise", model).model
    changed(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
    assert set(in_fp8(changed).values()) == {"rowwise"}
    assert same_parameters(model, changed)


def test_no_other_recipe_without_a_float8_linear() -> None:
    with pytest.raises(NotTried, match="no Float8Linear"):
        applied("recipe-rowwise", Stacked())


def test_conversion_leaves_out_what_is_named_and_what_is_not_aligned() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "odd": nn.Linear(30, 32), "head": nn.Linear(32, 64)})
    converted = to_float8(model, "rowwise", skip=("head",))
    assert {name: type(layer).__name__ for name, layer in converted.items()} == {
        "a": "Float8Linear",
        "odd": "Linear",
        "head": "Linear",
    }  # type: ignore[operator]
    with pytest.raises(NotTried, match=r"no nn\.Linear that torchao could convert"):
        to_float8(nn.Sequential(nn.Conv1d(16, 16, 1)), "tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_model_without_fp8_is_converted_but_for_its_head(recipe: str) -> None:
    converted = in_fp8(applied(f"convert-{recipe}", Stacked()).model)
    assert set(converted.values()) == {recipe}
    assert len(converted) == 6


def forwards_per_step(model: nn.Module, layer: nn.Module) -> int:
    """How often a layer runs in forward and backward together."""
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda module, arguments: calls.append(1))
    model.train()
    model(**TOKENS).loss.backward() if hasattr(model, "config") else model(
        TOKENS["input_ids"]
    ).sum().backward()
    return len(calls)


def test_transformers_checkpointing_is_switched_off() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    off = applied("checkpointing-off", model.train()).model
    assert (training(model).checkpointing != (), training(off).checkpointing) == (True, ())
    assert [forwards_per_step(each, each.model.layers[0].mlp.up_proj) for each in (model, off)] == [2, 1]  # type: ignore[union-attr, index]


def test_checkpoint_wrappers_are_taken_off() -> None:
    model = float8(Stacked())
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    off = applied("checkpointing-off", model).model
    assert {linear.checkpointed for linear in network(off).linears} == {None}
    assert set(in_fp8(off)) == set(in_fp8(model))
    assert [
        forwards_per_step(each, each.get_submodule("blocks.0" + inner).up)
        for each, inner in ((model, "._checkpoint_wrapped_module"), (off, ""))
    ] == [2, 1]


@pytest.mark.parametrize(
    "order", ["compiled inside", "compiled around", "in place inside", "in place around"]
)
def test_a_checkpoint_wrapper_goes_and_the_compile_mark_beside_it_stays(order: str) -> None:
    model = Stacked().bfloat16()
    for number, block in enumerate(model.blocks):
        inside, in_place = order.endswith("inside"), order.startswith("in place")
        made = block if inside else checkpoint_wrapper(block)
        if in_place:
            made.compile(backend="eager")
        else:
            made = torch.compile(made, backend="eager")
        model.blocks[number] = checkpoint_wrapper(made) if inside else made
    before = training(model)
    assert [each.name for each in before.checkpointing] == ["blocks.0", "blocks.1", "blocks.2"]
    after = training(applied("checkpointing-off", model).model)
    assert after.checkpointing == ()
    assert [each.name for each in after.compile_marks] == [each.name for each in before.compile_marks]
    assert len(after.compile_marks) == 3


class CallsIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.up, x, use_reentrant=False)


@pytest.mark.parametrize("form", ["timm", "open_clip", "monai", "partial", "composable"])
def test_flags_hooks_and_assigned_forwards_are_switched_off(form: str) -> None:
    model = ON[form]()
    off = applied("checkpointing-off", model).model
    assert (recomputes(off), training(off).checkpointing) == (False, ())
    assert recomputes(model)


def test_a_printed_flag_is_switched_off() -> None:
    model = ON["timm"]()
    treatment = describe("checkpointing-off", facts(model))
    assert treatment is not None
    exec(treatment.code, {"model": model})
    assert not recomputes(model)


def test_a_call_to_checkpoint_inside_a_forward_cannot_be_switched_off() -> None:
    with pytest.raises(NotTried, match="own code calls checkpoint"):
        applied("checkpointing-off", CallsIt())


def test_adapters_get_the_dtype_of_the_base_and_the_shared_ones_stay() -> None:
    model = lora(llama().bfloat16())
    adapters = {linear.name for linear in network(model).linears if linear.adapter == "adapter"}
    changed = applied("adapters-to-bf16", model).model
    assert {linear.dtype for linear in network(model).linears if linear.name in adapters} == {"float32"}
    assert {linear.dtype for linear in network(changed).linears if linear.name in adapters} == {"bfloat16"}
    pairs = list(zip(model.named_parameters(), changed.named_parameters(), strict=True))
    assert all((one is other) is ("lora_" not in name) for (name, one), (_, other) in pairs)
    assert all(one.requires_grad == other.requires_grad for (_, one), (_, other) in pairs)
    with pytest.raises(NotTried, match="no adapter in fp32"):
        applied("adapters-to-bf16", changed)


def test_without_adapters_the_step_is_that_of_the_base_with_its_gradient_flow() -> None:
    base = llama()
    expected = base(**TOKENS).logits
    model = lora(base, init_lora_weights=False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    assert not torch.allclose(model(**TOKENS).logits, expected)
    without = without_adapters(Variant(replicate(model, share=True)[0], None)).model
    output = without(**TOKENS)
    assert torch.allclose(output.logits, expected)
    output.loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert not torch.allclose(model(**TOKENS).logits, expected)


def test_the_step_without_adapters_needs_adapters() -> None:
    with pytest.raises(NotTried, match="no switch"):
        without_adapters(Variant(llama(), None))


def test_two_ways_out_of_fp32() -> None:
    model = llama(tie_word_embeddings=True)
    assert applied("autocast-bf16", model).autocast is torch.bfloat16
    with pytest.raises(NotTried, match=r"under autocast already \(float16\)"):
        treatments()["autocast-bf16"].function(
            Variant(model, None, torch.float16), TreatmentContext(facts(model), "autocast-bf16")
        )
    changed = applied(
        "bf16-parameters", model, batch={"pixels": torch.ones(2, 3), "labels": torch.ones(2).long()}
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in changed.model.parameters()} == {torch.bfloat16}
    assert [name for name, _ in changed.model.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert changed.model.lm_head.weight is changed.model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert {name: tensor.dtype for name, tensor in changed.batch.items()} == {
        "pixels": torch.bfloat16,
        "labels": torch.int64,
    }
    with pytest.raises(NotTried, match="no parameter in fp32"):
        applied("bf16-parameters", llama().bfloat16())


def test_eager_attention_is_replaced_in_the_replica_alone() -> None:
    model = llama(attn_implementation="eager")
    changed = applied("attention-sdpa", model).model
    assert (model.config._attn_implementation, changed.config._attn_implementation) == ("eager", "sdpa")  # type: ignore[union-attr]
    before, calls = functional.scaled_dot_product_attention, []
    functional.scaled_dot_product_attention = lambda *arguments, **settings: (
        calls.append(1) or before(*arguments, **settings)
    )  # type: ignore[assignment, func-returns-value]
    try:
        model(**TOKENS)
        assert calls == []
        changed(**TOKENS)
    finally:
        functional.scaled_dot_product_attention = before
    assert len(calls) == 2
    with pytest.raises(NotTried, match="no configuration in it asks for eager"):
        applied("attention-sdpa", changed)


def test_the_cache_is_switched_off_in_the_replica_alone() -> None:
    model = llama(use_cache=True)
    changed = applied("cache-off", model).model
    assert (model(**TOKENS).past_key_values is None, changed(**TOKENS).past_key_values is None) == (
        False,
        True,
    )
    with pytest.raises(NotTried, match="no configuration in it asks for a cache"):
        applied("cache-off", changed)


def job(model: nn.Module, optimizer: Any = None) -> Job:
    return Job(model=model, target=Target(), workload=Workload(accumulate=1), optimizer=optimizer)


def test_an_optimizer_is_fused_once() -> None:
    model = Stacked()
    assert applied(
        "fused-optimizer", model, job=job(model, torch.optim.AdamW(model.parameters()))
    ).optimizer == {"fused": True, "foreach": None}
    for optimizer in (
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.Adadelta(model.parameters()),
        None,
    ):
        with pytest.raises(NotTried, match="fused already, or has no fused form"):
            applied("fused-optimizer", model, job=job(model, optimizer))


def test_a_larger_batch_has_twice_the_samples() -> None:
    model = Stacked()
    assert treatments()["larger-batch"].tokens_ratio == 2
    for batch in (
        {"a": torch.zeros(2, 3), "b": torch.zeros(2)},
        (torch.zeros(2, 3), torch.zeros(2)),
        torch.zeros(2, 3),
    ):
        larger = applied("larger-batch", model, batch=batch).batch
        parts = (
            larger.values() if isinstance(larger, dict) else larger if isinstance(larger, tuple) else [larger]
        )
        assert type(larger) is type(batch)
        assert {len(part) for part in parts} == {4}
    with pytest.raises(NotTried, match="first dimension"):
        applied("larger-batch", model, batch=(torch.zeros(2), torch.zeros(3)))


def test_cuda_graphs_need_cuda() -> None:
    with pytest.raises(NotTried, match="need a CUDA device"):
        applied("cuda-graphs", Stacked())


@pytest.mark.parametrize(("name", "compiled"), [("compile-blocks", [3]), ("compile-model", [3])])
def test_what_is_compiled(name: str, compiled: list[int]) -> None:
    model = convert_to_float8_training(Stacked())
    changed = applied(name, model).model
    assert [blocks.compiled for blocks in network(changed).blocks] == compiled
    assert {linear.compiled for linear in network(changed).linears} == (
        {""} if name == "compile-model" else {"blocks.0", "blocks.1", "blocks.2", "head"}
    )
    assert {linear.compiled for linear in network(model).linears} == {None}


def test_a_layer_beside_compiled_blocks_is_compiled_and_the_blocks_stay_as_they_are() -> None:
    model = convert_to_float8_training(Stacked().bfloat16())
    for block in model.blocks:
        block.compile(backend="eager")
    assert {linear.name for linear in network(model).linears if linear.compiled is None} == {"head"}
    changed = applied("compile-layers", model).model
    assert {mark.name: (mark.backend, mark.compiles) for mark in training(changed).compile_marks} == {
        **{f"blocks.{i}": ("eager", True) for i in range(3)},
        "head": ("inductor", True),
    }
    changed.head.compile(backend="eager")  # type: ignore[union-attr]
    assert frames(changed.head, torch.ones(16, 32, dtype=torch.bfloat16)) == 1, (
        "a Float8Linear compiles in place"
    )  # type: ignore[arg-type]
    with pytest.raises(NotTried, match="no uncompiled FP8 layer beside its blocks"):
        applied("compile-layers", changed)


class Nested(nn.Module):
    """Blocks of a class of torch.nn, each of another length, and a head of torch.nn beside them."""

    def __init__(self, blocks: int = 2, deeper: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(1 + deeper))) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def frames(model: nn.Module, *arguments: Any, **settings: Any) -> int:
    torch._dynamo.utils.counters.clear()
    model(*arguments, **settings)
    return int(torch._dynamo.utils.counters["frames"].get("ok", 0))


@pytest.mark.parametrize(
    ("build", "name"),
    [(Nested, "compile-blocks"), (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "compile-model")],
)
def test_classes_of_torch_are_wrapped_and_compile(build: Any, name: str) -> None:
    model = build()
    changed = applied(name, model).model
    marks = training(changed).compile_marks
    assert {(mark.form, mark.compiles) for mark in marks} == {("wrapped", True)}
    assert {linear.compiled for linear in network(changed).linears} == {mark.name for mark in marks}
    assert len(marks) == (2 if name == "compile-blocks" else 1)
    assert frames(changed, torch.ones(4, 32, requires_grad=True)) == 1
    again = replicate(changed, share=True)[0]
    assert training(again).compile_marks == marks
    assert {linear.compiled for linear in network(strip_compile_marks(again)).linears} == {None}
    assert training(model).compile_marks == ()


def test_wrapped_classes_of_torch_do_not_push_each_other_out() -> None:
    """What Dynamo compiles for all of them is one function of its own, of which it keeps eight versions."""
    torch._dynamo.reset()
    x = torch.ones(4, 32, requires_grad=True)
    assert [
        frames(compile_blocks(Nested(deeper=deeper), ["blocks"], backend="eager"), x) for deeper in range(10)
    ] == [1] * 10
    replicas = [
        replicate(
            torch.compile(nn.Sequential(*Nested(deeper=deeper).blocks[0]), backend="eager"), share=True
        )[0]
        for deeper in range(10)
    ]
    for replica in replicas:
        give_own_code(replica)
    assert [frames(replica, x) for replica in replicas] == [1] * 10


def test_a_wrapped_root_goes_back_into_what_holds_it() -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(32, 32)))
    assert carry_out(prescribed("compile-model"), model, facts(model)) is model
    assert type(model.module).__name__ == "OptimizedModule"
    bare = nn.Sequential(nn.Linear(32, 32))
    assert type(carry_out(prescribed("compile-model"), bare, facts(bare))).__name__ == "OptimizedModule"


@pytest.mark.parametrize("use_cache", [True, False])
def test_blocks_are_compiled_without_a_cache(use_cache: bool) -> None:
    torch._dynamo.reset()
    model = llama(use_cache=use_cache, num_hidden_layers=12).train()
    changed = block_by_block(replicate(model, share=True)[0], facts(model), backend="eager")
    assert frames(changed, **TOKENS) == 1
    assert (model.config.use_cache, changed.config.use_cache) == (use_cache, False)
    assert applied("compile-blocks", model).model.config.use_cache is False  # type: ignore[union-attr]
    assert applied("compile-model", model).model.config.use_cache is use_cache  # type: ignore[union-attr]


def test_a_cache_that_is_off_already_is_off() -> None:
    model = llama(use_cache=True)
    variant = Variant(replicate(model, share=True)[0], None)
    for name in ("compile-blocks", "cache-off"):
        variant = treatments()[name].function(variant, TreatmentContext(facts(model), name))
    assert variant.model.config.use_cache is False  # type: ignore[union-attr]


def test_the_cache_stays_off_without_checkpointing() -> None:
    model = llama(use_cache=True)
    model.gradient_checkpointing_enable()
    assert (training(model.train()).use_cache, training(model).cache_switch) == (False, "")
    off = applied("checkpointing-off", model).model
    assert (training(off).use_cache, training(off).checkpointing, off(**TOKENS).past_key_values) == (
        False,
        (),
        None,
    )
    treatment = describe("checkpointing-off", facts(model))
    assert treatment is not None
    exec(treatment.code, {"model": model})
    assert (training(model).use_cache, training(model).checkpointing) == (False, ())


class Decorated(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_every_compile_mark_is_taken_off() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4), Decorated()
    )
    model[0].compile(backend="eager")
    model[2].forward = torch.compile(model[2].forward, backend="eager")
    stripped = strip_compile_marks(torch.compile(model, backend="eager"))
    torch._dynamo.utils.counters.clear()
    stripped(torch.ones(2, 4))
    assert not torch._dynamo.utils.counters["frames"]
    assert [type(layer).__name__ for layer in stripped] == ["Linear", "Linear", "Linear", "Decorated"]  # type: ignore[attr-defined]


def test_a_swap_takes_the_compile_mark_along_and_reaches_every_place() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(
        torch.compile(nn.Linear(4, 4), backend="eager"), shared, nn.Sequential(shared), nn.Linear(4, 4)
    )
    model[3].forward = torch.compile(model[3].forward, backend="eager")
    names: list[str] = []

    def identity(name: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, nn.Linear):
            return None
        names.append(name)
        return nn.Identity()

    swapped = swap(model, identity)
    assert names == ["0", "1", "3"]
    assert type(swapped[0]).__name__ == "OptimizedModule"  # type: ignore[index]
    assert swapped[1] is swapped[2][0]  # type: ignore[index]
    torch._dynamo.utils.counters.clear()
    assert torch.equal(swapped(torch.ones(2, 4)), torch.ones(2, 4))
    assert hasattr(swapped[3].forward, "_torchdynamo_orig_callable")  # type: ignore[index]


# Transformer Engine, on its stand-in.


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("returns_bias", [False, True])
def test_a_te_linear_becomes_a_linear_over_the_same_parameters(returns_bias: bool) -> None:
    linear = filled(te.Linear(32, 48))
    linear.return_bias = returns_bias  # type: ignore[assignment]
    twin = to_bf16(nn.Sequential(linear))[0]  # type: ignore[index]
    x = torch.randn(4, 32)
    expected = functional.linear(x, linear.weight)  # type: ignore[arg-type]
    output = twin(x, is_first_microbatch=None)
    assert isinstance(twin, nn.Linear)
    assert twin.weight is linear.weight
    assert same_parameters(linear, twin)
    assert (
        torch.equal(output[0], expected) if returns_bias else torch.allclose(output, expected + linear.bias)
    )  # type: ignore[operator]


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_a_fused_te_layer_keeps_its_kernels_with_fp8_off(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch, flavour)
    layer = te.LayerNormLinear(32, 48)
    twin = to_bf16(replicate(nn.Sequential(layer), share=True)[0])[0]  # type: ignore[index]
    with te.autocast(enabled=True):
        layer(torch.ones(4, 32))
        twin(torch.ones(4, 32))
    assert (layer.fp8, twin.fp8) == (True, False)
    assert type(twin) is te.LayerNormLinear


def normed(module: Any, **settings: Any) -> Any:
    module.eps = 1e-5
    for name, value in settings.items():
        setattr(module, name, value)
    return filled(module)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_fused_te_layers_have_a_form_in_plain_torch_for_the_compiler(
    normalization: str, zero_centered: bool
) -> None:
    x = torch.randn(4, 32)
    linear = normed(
        te.LayerNormLinear(32, 48), normalization=normalization, zero_centered_gamma=zero_centered
    )
    mlp = normed(
        te.LayerNormMLP(32, 64),
        normalization=normalization,
        zero_centered_gamma=zero_centered,
        activation="swiglu",
    )
    twins = to_bf16(nn.Sequential(linear, mlp), compiled=True)
    assert same_parameters(nn.Sequential(linear, mlp), twins)

    def norm(of: Any) -> torch.Tensor:
        weight = of.layer_norm_weight + int(zero_centered)
        if normalization == "RMSNorm":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(
            x.var(-1, keepdim=True, unbiased=False) + 1e-5
        ) * weight + getattr(of, "layer_norm_bias", 0)

    assert torch.allclose(twins[0](x), norm(linear) @ linear.weight.t() + linear.bias, atol=1e-4)  # type: ignore[index]
    inside = norm(mlp) @ mlp.fc1_weight.t() + mlp.fc1_bias
    gated = functional.silu(inside[:, :64]) * inside[:, 64:]
    assert torch.allclose(twins[1](x), gated @ mlp.fc2_weight.t(), atol=1e-2)  # type: ignore[index]


def test_grouped_te_layers_have_a_form_in_plain_torch() -> None:
    layer = filled(te.GroupedLinear(3, 32, 16))
    x = torch.randn(10, 32)
    twin = to_bf16(nn.Sequential(layer), compiled=True)[0]  # type: ignore[index]
    expected = torch.cat(
        [functional.linear(part, getattr(layer, f"weight{i}")) for i, part in enumerate(x.split([5, 0, 5]))]
    )
    assert torch.equal(twin(x, [5, 0, 5]), expected)


@pytest.mark.parametrize(
    "setting",
    [{"tp_size": 2}, {"return_layernorm_output": True}, {"activation": "unheard of"}],
    ids=lambda each: next(iter(each)),
)
def test_a_te_layer_that_plain_torch_cannot_match_keeps_its_kernels(
    setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    layer = normed(te.LayerNormMLP(32, 64), **{"activation": "gelu", **setting})
    assert to_bf16(nn.Sequential(layer), compiled=True)[0] is layer  # type: ignore[index]


@pytest.mark.parametrize("bias", [True, False])
def test_a_te_layer_whose_weight_is_kept_in_parts_has_a_form_in_plain_torch(bias: bool) -> None:
    x = torch.randn(4, 32)
    whole = normed(te.LayerNormLinear(32, 48, bias))
    split = normed(te.LayerNormLinear(32, 48, bias, parameters_split=("query_", "key_", "value_")))
    parts = dict(split.named_parameters())
    for i, name in enumerate(("query", "key", "value")):
        parts[f"{name}_weight"].data = whole.weight.data[16 * i : 16 * (i + 1)]
        parts[f"{name}_bias"].data = whole.bias.data[16 * i : 16 * (i + 1)]
    for name in ("layer_norm_weight", "layer_norm_bias"):
        parts[name].data = getattr(whole, name).data
    twins = to_bf16(nn.Sequential(split, whole), compiled=True)
    assert same_parameters(nn.Sequential(split, whole), twins)
    split_form, whole_form = twins
    assert torch.allclose(split_form(x), whole_form(x), atol=1e-6)  # type: ignore[operator]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        split_form(x)  # type: ignore[operator]
    own = {each.data_ptr() for each in split.parameters()}
    assert not [each.shape for each in kept if each.numel() > x.numel() and each.data_ptr() not in own]


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_what_a_te_container_reads_of_its_layers_is_there(kind: str) -> None:
    layer = normed(getattr(te, kind)(32, 32))
    layer.name = "proj"
    assert to_bf16(nn.Sequential(layer), compiled=True)[0].name == "proj"  # type: ignore[index]


@pytest.mark.parametrize("own_forward", [True, False])
def test_a_subclass_of_te_with_a_forward_of_its_own_keeps_it(
    own_forward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    forward = {"forward": lambda self, x: (te.Linear.forward(self, x), None)} if own_forward else {}
    kind = type(
        "TELinear", (te.Linear,), {"__module__": "megatron.core.extensions.transformer_engine", **forward}
    )
    layer = filled(kind(32, 32))
    twin = to_bf16(nn.Sequential(layer))[0]  # type: ignore[index]
    assert (twin is layer) == own_forward
    assert isinstance(twin(torch.ones(4, 32)), tuple) == own_forward


def test_te_weights_that_exist_in_fp8_only_have_no_bf16_form() -> None:
    class Float8Tensor(nn.Parameter):
        pass

    Float8Tensor.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"
    layer = te.Linear(32, 48)
    layer.weight = Float8Tensor(layer.weight.detach())
    with pytest.raises(NotTried, match="kept in FP8 alone"):
        to_bf16(nn.Sequential(layer))


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_te_layers_run_under_the_autocast(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch, flavour)
    model = nn.Sequential(te.Linear(32, 32))
    variant = applied("te-autocast", model)
    with variant.around():
        variant.model(torch.ones(4, 32))
    assert variant.model[0].fp8  # type: ignore[index]
    assert not te.FP8GlobalStateManager.enabled
    with pytest.raises(NotTried, match="no layer of Transformer Engine"):
        applied("te-autocast", Stacked())


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_an_autocast_that_the_model_closes_is_opened_again_and_one_that_it_opens_is_left(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch, flavour)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.closed, self.own = te.Linear(32, 32), te.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=False):
                x = self.closed(x)
            with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
                return self.own(x)

    variant = applied("te-autocast", Model())
    with variant.around():
        variant.model(torch.ones(4, 32))
    closed, own = variant.model.closed, variant.model.own
    assert closed.fp8
    assert own.fp8
    assert (type(closed.fp8_meta["recipe"]), type(own.fp8_meta["recipe"])) == (
        te.DelayedScaling,
        te.Float8CurrentScaling,
    )  # type: ignore[union-attr]
    assert not te.FP8GlobalStateManager.enabled


def with_own_autocast(layer: Callable[[], Any] = lambda: te.Linear(32, 32)) -> nn.Module:
    """A model whose forward opens the autocast, with current scaling, and closes it for its last layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.closed = layer(), te.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
                x = self.own(x)
                with te.autocast(enabled=False):
                    return self.closed(x)

    model = Model()
    model(torch.ones(4, 32))
    return model


def step_of(variant: Variant) -> None:
    with variant.around():
        variant.model(torch.ones(4, 32))


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
@pytest.mark.parametrize(
    ("name", "kind"), [("te-delayed", te.DelayedScaling), ("te-block", te.Float8BlockScaling)]
)
def test_an_autocast_that_the_model_opens_gets_another_recipe_and_one_that_it_closes_stays_closed(
    name: str, kind: type, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch, flavour)
    model = with_own_autocast()
    before = dict(vars(te.FP8GlobalStateManager))
    variant = applied(name, model)
    for _ in range(3):
        step_of(variant)
    own, closed = variant.model.own, variant.model.closed
    assert (own.fp8, closed.fp8) == (True, False)
    assert type(own.fp8_meta["recipe"]) is kind  # type: ignore[index]
    assert dict(vars(te.FP8GlobalStateManager)) == before
    model(torch.ones(4, 32))
    assert type(model.own.fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def test_an_autocast_around_the_step_gets_another_recipe_and_one_more_change_beside_it_does_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te.install(monkeypatch)
    model = nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    context = TreatmentContext(facts(model), "te-current")
    opened = replace(Variant(replicate(model, share=True)[0], None), around=lambda: te.autocast())
    variant = treatments()["te-current"].function(opened, context)
    variant = treatments()["keep-in-bf16"].function(variant, replace(context, layers=("1",)))
    step_of(variant)
    step_of(variant)
    assert type(variant.model[0].fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def test_accelerates_wrapper_gets_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    library = te.install(monkeypatch)
    library.fp8_autocast = lambda enabled, fp8_recipe: te.autocast(enabled, fp8_recipe)  # type: ignore[attr-defined]
    model = nn.Sequential(te.Linear(32, 32))
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    wrapped = contextual_fp8_autocast(model.forward, te.DelayedScaling())
    model.forward = MethodType(wrapped, model)  # type: ignore[method-assign]
    variant = applied("te-current", model)
    step_of(variant)
    assert type(variant.model[0].fp8_meta["recipe"]) is te.Float8CurrentScaling  # type: ignore[index]


def kept_in_fp8() -> te.Linear:
    layer = te.Linear(32, 32)
    layer.primary_weights_in_fp8 = True
    return layer


def captured() -> te.Linear:
    """A layer whose forward is the replay of a graph, which sets nothing."""
    layer = te.Linear(32, 32)
    layer.__dict__["forward"] = lambda x: x
    return layer


def with_fp8_attention() -> te.Linear:
    layer = te.Linear(32, 32)
    layer.fp8_meta["recipe"] = te.DelayedScaling()
    layer.fp8_meta["recipe"].fp8_dpa = True
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (kept_in_fp8, "kept in FP8 alone"),
        (with_fp8_attention, "runs attention in FP8 too"),
        (captured, "no layer ran under an FP8 autocast"),
        (lambda: nn.Linear(32, 32), "no layer of Transformer Engine"),
        (lambda: te.OperationGroupedLinear(2, 32, 32), "no layer of Transformer Engine"),
        (lambda: te.Linear(32, 32), "no layer ran under an FP8 autocast"),
    ],
    ids=["weights in FP8", "FP8 attention", "captured", "torch", "te.ops", "no autocast"],
)
def test_a_recipe_that_cannot_be_set_from_outside_is_not_tried(
    build: Callable[[], nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    with pytest.raises(NotTried, match=reason):
        step_of(applied("te-current", nn.Sequential(build())))


def test_a_backward_that_brings_the_old_recipe_back_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    variant = applied("te-delayed", with_own_autocast())
    step_of(variant)
    with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
        variant.model.own(torch.ones(4, 32))  # type: ignore[operator]
    with pytest.raises(NotTried, match="a recipe of their own"):
        step_of(variant)


def test_a_recipe_that_this_version_does_not_have_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    monkeypatch.delattr(sys.modules["transformer_engine.common.recipe"], "Float8BlockScaling")
    with pytest.raises(NotTried, match="this Transformer Engine has no Float8BlockScaling"):
        applied("te-block", with_own_autocast())


def test_the_library_refuses_the_recipe_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)

    def check_recipe_support(recipe: Any) -> None:
        if isinstance(recipe, te.MXFP8BlockScaling):
            raise RuntimeError("Device compute capability 10.0 or higher required for MXFP8 execution.")

    monkeypatch.setattr(te, "check_recipe_support", check_recipe_support, raising=False)
    variant = applied("te-mxfp8", with_own_autocast())
    with pytest.raises(RuntimeError, match="or higher required"):
        step_of(variant)
    step_of(applied("te-delayed", with_own_autocast()))


# On a live model.


def prescribed(*names: str, layers: tuple[str, ...] = ()) -> list[Treatment]:
    return [Treatment(name=name, summary=f"the summary of {name}", code="", layers=layers) for name in names]


def test_a_live_model_is_changed_in_place_and_the_rest_is_said_once() -> None:
    model = float8(Stacked())
    with pytest.warns(UserWarning, match="did not carry out") as said:
        changed = carry_out(
            prescribed("compile-blocks", "unset-variable", "fused-optimizer", "cache-off", "recipe-rowwise"),
            model,
            facts(model),
        )
    assert changed is model
    assert set(in_fp8(model).values()) == {"rowwise"}
    assert [blocks.compiled for blocks in network(model).blocks] == [3]
    # torch warns of its own parts where this is the first test of a process that compiles.
    assert [text for each in said if (text := str(each.message)).startswith("fp8doctor")] == [
        "fp8doctor did not carry out unset-variable (by hand: the summary of unset-variable), "
        "fused-optimizer (it changes the optimizer), "
        "cache-off (no configuration in it asks for a cache)"
    ]


def checkpointed() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


@pytest.mark.parametrize(
    ("name", "build", "see", "before", "after"),
    [
        ("convert-rowwise", Stacked, lambda model: len(in_fp8(model)), 0, 6),
        ("stay-in-bf16", lambda: float8(Stacked()), lambda model: len(in_fp8(model)), 6, 0),
        ("checkpointing-off", checkpointed, lambda model: len(training(model).checkpointing), 2, 0),
        (
            "attention-sdpa",
            lambda: llama(attn_implementation="eager"),
            lambda model: model.config._attn_implementation,
            "eager",
            "sdpa",
        ),
        ("cache-off", lambda: llama(use_cache=True), lambda model: model.config.use_cache, True, False),
        (
            "compile-model",
            Stacked,
            lambda model: [mark.name for mark in training(model).compile_marks],
            [],
            [""],
        ),
    ],
)
def test_what_was_timed_is_what_a_live_model_gets(
    name: str, build: Any, see: Any, before: Any, after: Any
) -> None:
    model = build()
    assert see(model) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert carry_out(prescribed(name), model, facts(model)) is model
    assert see(model) == after


def test_a_live_model_whose_parameters_are_replaced_needs_its_optimizer_anew() -> None:
    model = lora(llama().bfloat16())
    with pytest.warns(UserWarning, match="^parameters were replaced: make the optimizer anew$"):
        carry_out(prescribed("adapters-to-bf16"), model, facts(model))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_live_model_behind_a_compile_wrapper_is_reached() -> None:
    model = torch.compile(float8(Stacked()), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert carry_out(prescribed("keep-in-bf16", layers=("blocks.1.up",)), model, facts(model)) is model
    assert "blocks.1.up" not in in_fp8(model)
    assert len(in_fp8(model)) == 5


def test_a_live_model_behind_data_parallel_is_reached() -> None:
    model = nn.DataParallel(float8(Stacked()))
    seen = facts(model)
    assert (
        carry_out(prescribed("compile-blocks", "keep-in-bf16", layers=("blocks.1.up",)), model, seen) is model
    )
    assert [blocks.compiled for blocks in network(model).blocks] == [3]
    assert "blocks.1.up" not in in_fp8(model)
    with pytest.warns(UserWarning, match=r"did not carry out compile-blocks \(it has no blocks in blocks\)"):
        carry_out(prescribed("compile-blocks"), nn.Linear(2, 2), seen)


def test_a_new_treatment_is_a_decorated_function() -> None:
    @carries_out("do-nothing", changes="nothing")
    def do_nothing(variant: Variant, context: TreatmentContext) -> Variant:
        return variant

    try:
        found = treatments()["do-nothing"]
        assert (found.function, found.changes) == (do_nothing, "nothing")
    finally:
        del registry._REGISTERED["do-nothing"]


def test_attention_that_transformers_refuses_is_not_tried() -> None:
    model = llama(attn_implementation="eager")
    type(model)._supports_sdpa = False
    try:
        with pytest.raises(NotTried, match="transformers says: LlamaForCausalLM does not support"):
            applied("attention-sdpa", model)
    finally:
        type(model)._supports_sdpa = True


def test_every_treatment_has_a_name_that_findings_can_have() -> None:
    assert set(treatments()) >= {
        "compile-blocks",
        "compile-model",
        "compile-layers",
        "recipe-tensorwise",
        "recipe-rowwise",
        "recipe-rowwise-with-gw-hp",
        "keep-in-bf16",
        "stay-in-bf16",
        "checkpointing-off",
        "te-autocast",
        "te-delayed",
        "te-current",
        "te-block",
        "te-mxfp8",
        "adapters-to-bf16",
        "autocast-bf16",
        "bf16-parameters",
        "attention-sdpa",
        "fused-optimizer",
        "larger-batch",
        "cuda-graphs",
        "cache-off",
        "convert-tensorwise",
        "convert-rowwise",
        "fused-attention-on",
    }
    assert {name for name, each in treatments().items() if each.changes != "model"} == {
        "te-autocast",
        "te-delayed",
        "te-current",
        "te-block",
        "te-mxfp8",
        "autocast-bf16",
        "fused-optimizer",
        "larger-batch",
        "fused-attention-on",
    }


def test_every_treatment_has_its_traits() -> None:
    """A prescription is held to BF16 with the changes that help BF16 too, so nothing is timed of which the
    table does not tell whether it is FP8's own."""
    assert set(treatments()) == set(TREATMENTS)


def test_accelerates_wrappers_stay_around_blocks_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    """BF16 autocast as `Accelerator.prepare` puts it around the forward, and around that the FP8 autocast of
    Transformer Engine."""
    library = te.install(monkeypatch, "fp8")
    monkeypatch.setattr(library, "fp8_autocast", lambda enabled, fp8_recipe: te.autocast(enabled, fp8_recipe))
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    recipe = te.DelayedScaling()
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(
        Stacked(lambda: nn.Sequential(te.Linear(32, 32), nn.ReLU()))
    )  # type: ignore[arg-type]
    model.forward = MethodType(contextual_fp8_autocast(model.forward, recipe), model)
    replica = replicate(model, share=True)[0]
    give_own_code(replica)
    compiled = block_by_block(replica, facts(model), backend="eager")
    output = compiled(torch.arange(16).reshape(2, 8))
    layers = [module for module in compiled.modules() if isinstance(module, te.Linear)]
    assert [(layer.fp8, layer.fp8_meta["recipe"]) for layer in layers] == [(True, recipe)] * 3
    assert training(compiled).forward_chain == training(model).forward_chain
    assert output.dtype == torch.float32, "converted back by Accelerate"
    assert not any(module.fp8 for module in model.modules() if isinstance(module, te.Linear))
    assert compiled.forward.__self__ is compiled
