"""The state of training as facts, on real objects, and the promise that looking changes nothing."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import textwrap
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from accelerate.utils.transformer_engine import contextual_fp8_autocast
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint as recompute
from transformers import Trainer, TrainingArguments

from fp8doctor.examine import examine
from fp8doctor.examine.dynamo import examine_dynamo
from fp8doctor.facts import (
    Accelerate,
    Checkpointing,
    CompileMark,
    Dynamo,
    Facts,
    Target,
    TrainerArguments,
    Workload,
)
from fp8doctor.loading.job import Job
from tests.examine.models import Block, Stacked, llama, network, training
from tests.stand_ins import transformer_engine as stand_in

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def test_a_job_that_has_not_begun() -> None:
    facts = training(Stacked())
    assert (facts.autocast, facts.gradients_seen) == (None, False)
    assert (facts.compile_marks, facts.compiled_elsewhere, facts.checkpointing, facts.forward_chain) == (
        (),
        (),
        (),
        (),
    )
    assert (facts.trainer, facts.optimizer, facts.parameters_outside_optimizer) == (None, None, None)


def test_gradients() -> None:
    model = Stacked()
    model(TOKENS).mean().backward()
    assert training(model).gradients_seen is True


def test_autocast_of_the_job_around_forward_or_in_force() -> None:
    assert training(Stacked(), autocast=torch.float16).autocast == "float16"
    model = Stacked()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    assert training(model).autocast == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        assert training(Stacked()).autocast == "bfloat16"
        assert training(Stacked().to("meta")).autocast is None


class Decorated(Block):
    """A class whose forward is compiled where it is defined."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_five_ways_to_compile() -> None:
    model = Stacked()
    model.blocks[0].compile(backend="eager")
    model.blocks[1] = torch.compile(model.blocks[1])
    model.blocks[2].forward = torch.compile(model.blocks[2].forward, backend="aot_eager")
    model.norm = Decorated()
    step = torch.compile(lambda model, batch: None, backend="eager")
    assert training(model, training_step=step).compile_marks == (
        CompileMark(name="", form="training_step", backend="eager", compiles=True),
        CompileMark(name="blocks.0", form="in_place", backend="eager", compiles=True),
        CompileMark(name="blocks.1", form="wrapped", backend="inductor", compiles=True),
        CompileMark(name="blocks.2", form="assigned_forward", backend="aot_eager", compiles=True),
        CompileMark(name="norm", form="decorated_forward", backend="aot_eager", compiles=True),
    )


def test_a_backend_of_the_users_own() -> None:
    def nothing(graph: Any, inputs: Any) -> Any:
        return graph

    assert training(torch.compile(Stacked(), backend=nothing)).compile_marks == (
        CompileMark(name="", form="wrapped", backend="nothing", compiles=True),
    )


def test_a_disabled_forward_is_no_mark() -> None:
    model = Stacked()
    model.forward = torch.compiler.disable(model.forward)
    assert training(model).compile_marks == ()
    assert (
        training(Stacked(), training_step=torch.compiler.disable(lambda model, batch: None)).compile_marks
        == ()
    )


def test_compiled_elsewhere_is_passed_on() -> None:
    assert training(Stacked(), compiled_elsewhere=("fast",)).compiled_elsewhere == ("fast",)


def test_dynamo_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    off = Dynamo(
        disabled=False, suppress_errors=False, stance="default", frames_total=0, frames_ok=0, failures=()
    )
    assert examine_dynamo({}) == off
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("TORCHDYNAMO_SUPPRESS_ERRORS", "0")
    facts = examine_dynamo({})
    assert facts.disabled is True
    assert facts.suppress_errors is True  # torch takes any text for a yes
    assert not any(name.startswith("torch._dynamo") for name in sys.modules)


def test_dynamo_switches() -> None:
    with (
        torch._dynamo.config.patch(disable=True, suppress_errors=True),
        torch.compiler.set_stance("force_eager"),
    ):
        facts = training(Stacked()).dynamo
    assert (facts.disabled, facts.suppress_errors, facts.stance) == (True, True, "force_eager")


@pytest.fixture
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def test_dynamo_counts_frames(fresh_dynamo: None) -> None:
    assert training(Stacked()).dynamo.frames_total == 0
    assert "frames" not in torch._dynamo.utils.counters
    model = torch.compile(Stacked(), backend="eager")
    model(TOKENS)
    facts = training(model).dynamo
    assert facts.frames_ok == facts.frames_total == torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert facts.failures == ()


def test_dynamo_failures(fresh_dynamo: None) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel in /home/someone/project/kernels.py")

    model = torch.compile(Stacked(), backend=broken)
    with torch._dynamo.config.patch(suppress_errors=True):
        model(TOKENS)
    facts = training(model).dynamo
    assert facts.frames_ok < facts.frames_total
    assert facts.failures
    assert "no kernel in" in facts.failures[0]
    assert "someone" not in facts.failures[0]


def test_checkpoint_and_offload_wrappers() -> None:
    model = Stacked()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_impl=CheckpointImpl.REENTRANT)
    model.blocks[2] = offload_wrapper(model.blocks[2])
    assert training(model).checkpointing == (
        Checkpointing(name="blocks.0", form="wrapper", active=True, reentrant=False),
        Checkpointing(name="blocks.1", form="wrapper", active=True, reentrant=True),
        Checkpointing(name="blocks.2", form="offload", active=True, reentrant=None),
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_huggingface_checkpointing(reentrant: bool) -> None:
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert training(model).checkpointing == tuple(
        Checkpointing(name=f"model.layers.{i}", form="huggingface", active=True, reentrant=reentrant)
        for i in (0, 1)
    )
    assert not any(each.active for each in training(model.eval()).checkpointing)
    model.activation_checkpointing_disable()
    assert training(model).checkpointing == ()


class Recomputes(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return recompute(super().forward, x, use_reentrant=False)


class RecomputesInside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run() -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(
                super(RecomputesInside, self).forward, x, use_reentrant=False
            )

        return run()


class ImportsInside(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(super().forward, x, use_reentrant=False)


class LoadsACheckpoint(Block):
    """Another meaning of the word: no call to torch's function."""

    checkpoint = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.checkpoint is None else x


@pytest.mark.parametrize("block", [Recomputes, RecomputesInside, ImportsInside])
def test_call_in_forward(block: type[nn.Module]) -> None:
    found = training(Stacked(block)).checkpointing
    assert found == tuple(
        Checkpointing(name=f"blocks.{i}", form="called_in_forward", active=True, reentrant=None)
        for i in range(3)
    )


def test_call_in_a_wrapper_around_forward() -> None:
    model = Stacked()
    inner = model.blocks[1].forward

    @functools.wraps(inner)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return recompute(inner, x, use_reentrant=False)

    model.blocks[1].forward = forward
    assert [each.name for each in training(model).checkpointing] == ["blocks.1"]


def test_a_word_is_no_call() -> None:
    assert training(Stacked(LoadsACheckpoint)).checkpointing == ()


class RecomputesIfAsked(Block):
    gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gradient_checkpointing and self.training:
            return recompute(super().forward, x, use_reentrant=False)
        return super().forward(x)


def test_a_call_behind_a_flag_that_is_off() -> None:
    assert training(Stacked(RecomputesIfAsked)).checkpointing == ()


def test_unsloths_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsloth_checkpoint() -> None:
        """A stand-in: unsloth cannot be imported without a GPU."""

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", unsloth_checkpoint)
    assert training(Stacked()).checkpointing == (
        Checkpointing(name="", form="unsloth", active=None, reentrant=None),
    )
    model = llama()
    model.activation_checkpointing_enable()
    assert training(model).checkpointing[-1] == Checkpointing(
        name="", form="unsloth", active=True, reentrant=None
    )


def test_memory_budget_of_the_compiler() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert training(Stacked()).checkpointing == (
            Checkpointing(name="", form="compiler_budget", active=True, reentrant=None),
        )


def test_optimizer() -> None:
    model = Stacked()
    optimizer = torch.optim.AdamW([*model.blocks.parameters(), model.head.weight])
    model.embedding.requires_grad_(False)
    facts = training(model, optimizer=optimizer)
    assert (facts.optimizer, facts.parameters_outside_optimizer) == (
        "torch.optim.adamw.AdamW",
        2,
    )  # the norm's two


def test_accelerate_in_bf16(forget_accelerate: None) -> None:
    assert training(Stacked()).accelerate is None
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = Stacked()
    assert training(model).accelerate == Accelerate(
        mixed_precision="bf16",
        distributed="NO",
        prepared=False,
        may_prepare=True,
        te_autocast=False,
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    facts = training(model, optimizer=optimizer)
    assert facts.accelerate.prepared is True
    assert facts.autocast == "bfloat16"
    assert facts.forward_chain == (
        "accelerate.utils.operations.convert_outputs_to_fp32.<locals>.forward",
        "accelerate.utils.operations.ConvertOutputsToFp32",
        "torch.amp.autocast_mode.autocast_decorator.<locals>.decorate_autocast",
    )
    assert (facts.optimizer, facts.parameters_outside_optimizer) == ("torch.optim.adamw.AdamW", 0)


def test_accelerate_in_fp8(forget_accelerate: None) -> None:
    """Accelerate's torchao path: the first and the last Linear are left out, nothing is compiled."""
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    facts = training(model)
    assert (facts.accelerate.mixed_precision, facts.autocast, facts.compile_marks) == ("fp8", "bfloat16", ())
    linears = network(model).linears
    assert [each.name for each in linears if each.use == "none"] == [
        "model.layers.0.self_attn.q_proj",
        "lm_head",
    ]
    assert linears[1].features["pad_inner_dim"]
    assert linears[1].features["float8_all_gather_weight"]


def test_accelerates_autocast_for_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's own wrapper, around a stand-in for the library."""
    stand_in.install(monkeypatch, "fp8")
    monkeypatch.setattr("accelerate.utils.transformer_engine.is_transformer_engine_available", lambda: True)
    model = Stacked()
    model.forward = MethodType(contextual_fp8_autocast(type(model).forward, stand_in.DelayedScaling()), model)
    assert training(model).forward_chain == (
        "accelerate.utils.transformer_engine.contextual_fp8_autocast.<locals>.forward",
    )


@pytest.mark.parametrize("regional", [False, True])
def test_accelerate_that_compiles(forget_accelerate: None, regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Stacked())
    facts = training(model)
    assert facts.accelerate.prepared is True
    regions = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"] if regional else [""]
    assert [(each.name, each.form, each.backend) for each in facts.compile_marks] == [
        (name, "wrapped", "aot_eager") for name in regions
    ]
    assert network(model).blocks[0].compiled == 3


def test_training_arguments(forget_accelerate: None, tmp_path: Any) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, activation_checkpointing=True
    )
    assert training(llama(), trainer=arguments).trainer == TrainerArguments(
        kind="transformers.training_args.TrainingArguments",
        bf16=True,
        fp16=False,
        mixed_precision="bf16",
        checkpointing=True,
    )


def test_trainer(forget_accelerate: None, tmp_path: Any) -> None:
    model = llama()
    optimizer = torch.optim.SGD([model.lm_head.weight])
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=model, args=arguments, optimizers=(optimizer, None))
    facts = training(model, trainer=trainer)
    assert (facts.trainer.bf16, facts.trainer.mixed_precision, facts.trainer.checkpointing) == (
        False,
        "no",
        False,
    )
    assert (facts.optimizer, facts.parameters_outside_optimizer) == ("torch.optim.sgd.SGD", 2 * 9 + 2)


def test_arguments_of_transformers_4() -> None:
    """A stand-in for the fields of 4.x, where the precision lives in the environment."""
    arguments = SimpleNamespace(bf16=False, fp16=True, gradient_checkpointing=True)
    facts = training(Stacked(), trainer=arguments).trainer
    assert (facts.fp16, facts.mixed_precision, facts.checkpointing) == (True, None, True)


def test_examine_puts_it_together() -> None:
    target, workload = Target(kind="live", name="Stacked", attribute=None), Workload(tokens=16)
    surroundings = Facts(gpus=(), gaps={"gpus": "no driver"})
    facts = examine(Job(model=Stacked(), target=target, workload=workload), surroundings)
    assert (facts.target, facts.workload, facts.gpus, facts.gaps) == (
        target,
        workload,
        (),
        {"gpus": "no driver"},
    )
    assert facts.network.linears[0].name == "blocks.0.up"
    assert Facts.from_dict(facts.to_dict()) == facts


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that looking must leave alone."""
    modules = {}
    for name, module in model.named_modules():
        state = {key: id(value) for key, value in vars(module).items()}
        hooks = {
            key: list(value)
            for key, value in vars(module).items()
            if key.endswith("_hooks") and isinstance(value, dict)
        }
        modules[name] = (
            id(type(module)),
            module.training,
            state,
            hooks,
            id(vars(module).get("_compiled_call_impl")),
        )
    tensors = {
        name: (
            id(each),
            each.data_ptr(),
            each._version,
            each.requires_grad,
            each.detach().sum().item(),
            None if each.grad is None else each.grad.sum().item(),
        )
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    return {
        "modules": modules,
        "tensors": tensors,
        "optimizer": str(optimizer.state_dict()),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(numpy.random.get_state()),
        "settings": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        ),
        "dynamo": (
            str(torch._dynamo.utils.counters),
            torch._dynamo.config.disable,
            torch._dynamo.eval_frame._stance.stance,
        ),
        "cuda": torch.cuda.is_initialized(),
        "path": list(sys.path),
        "imported": sorted(sys.modules),
    }


def test_looking_changes_nothing() -> None:
    model = llama(tie_word_embeddings=True)
    model.activation_checkpointing_enable()
    model.model.layers[0].compile(backend="eager")
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, output: None)
    model.lm_head.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    job = Job(model=model, target=Target(), workload=Workload(), optimizer=optimizer)
    surroundings = Facts(gaps={})
    examine(job, surroundings)
    before = digest(model, optimizer)
    examine(job, surroundings)
    assert digest(model, optimizer) == before


@pytest.mark.slow
def test_looking_imports_no_library() -> None:
    program = """
        import sys, torch
        from fp8doctor.examine import examine
        from fp8doctor.facts import Facts, Target, Workload
        from fp8doctor.loading.job import Job
        before = set(sys.modules)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        examine(Job(model=model, target=Target(), workload=Workload()), Facts(gaps={}))
        gained = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        print(sorted(gained), "torch._dynamo" in sys.modules, torch.cuda.is_initialized())
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert answer.stdout.strip() == "['fp8doctor'] False False"


def test_importing_examine_imports_no_torch() -> None:
    program = "import sys, fp8doctor.examine, fp8doctor.stacks; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
        ).stdout.strip()
        == "False"
    )
