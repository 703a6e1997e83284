"""Private names of torch, torchao and Transformer Engine: each works, and stands in one module alone.

The names of torch and torchao are tried with the installed libraries. Transformer Engine needs a GPU: its
names are looked up in `tests.stand_ins.transformer_engine`.
"""

from __future__ import annotations

import importlib
import sys
from collections import deque
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.utils._device
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8doctor.examine import fp8_conversion
from fp8doctor.stacks import torch_private, torchao
from fp8doctor.stacks import transformer_engine as stack
from tests.stand_ins import transformer_engine


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled_double() -> Any:
    torch._dynamo.reset()
    function = torch.compile(double, backend="eager")
    function(torch.ones(2))
    return function


def test_marks_of_torch_compile() -> None:
    model = nn.Linear(2, 2)
    wrapped, function = torch.compile(model), torch.compile(double, dynamic=True)
    assert torch_private.behind_compile(wrapped) is model
    assert torch_private.behind_compile(model) is None
    assert torch_private.original(function) is double
    assert torch_private.original(double) is None
    assert torch_private.is_dynamos_frame(torch_private.original(wrapped.__dict__["forward"]))
    context, other = torch_private.context_of(function), torch_private.context_of(torch.compile(double))
    assert context is not None
    assert torch_private.settings_of(context) != torch_private.settings_of(other)
    assert torch_private.original(context(double)) is double


def test_marks_of_compiler_disable() -> None:
    assert torch_private.disabled(torch.compiler.disable(double))
    assert torch_private.disabled_below(torch.compiler.disable(double))
    assert not torch_private.disabled_below(torch.compiler.disable(double, recursive=False))
    assert not torch_private.disabled(double)


def test_the_compiled_call_of_a_module() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert torch_private.compiled_call(model) is None
    model.compile(backend="eager")
    context = torch_private.context_of(torch_private.compiled_call(model))
    assert context is not None
    torch_private.compile_call(other, context)
    assert torch_private.compiled_call(other) is not None
    torch_private.compile_call(other, None)
    assert torch_private.compiled_call(other) is None
    assert torch_private.plain_call(other)(torch.ones(2)).shape == (2,)


def test_the_code_of_a_modules_call() -> None:
    seen = []

    class Net(nn.Module):
        def forward(self) -> None:
            frame = sys._getframe(1)
            seen.extend([frame.f_code, frame.f_back and frame.f_back.f_code])

    Net()()
    assert seen == [torch_private.call_code(), torch_private.outer_call_code()]


def test_dynamo_counts_what_it_compiles() -> None:
    before, log = torch_private.frames_compiled(), deque[Any]()
    kept = torch_private.compilation_metrics()
    torch_private.keep_metrics_in(log)
    try:
        compiled_double()
    finally:
        torch_private.keep_metrics_in(kept)
    assert torch_private.frames_compiled() > before
    assert (torch_private.counters("frames") or {})["ok"] == torch_private.frames_compiled()
    assert log[-1].co_name == "double"
    assert torch_private.frames_tried() > 0
    assert torch_private.all_counters() is not None
    assert torch_private.counters("no such group") == {}


def test_dynamos_settings() -> None:
    assert torch_private.config().disable is False
    with torch.compiler.set_stance("force_eager"):
        assert torch_private.stance().stance == "force_eager"
    assert torch_private.stance().stance == "default"
    assert not torch_private.is_traced()
    assert hasattr(torch_private.tracing_callbacks(), "register_start_callback")


def test_entries_of_compiled_code() -> None:
    compiled_double()
    assert any(each is double.__code__ for each in torch_private.seen_codes())
    assert torch_private.compiled_entries(double.__code__)
    torch_private.reset_code(double.__code__)
    assert torch_private.compiled_entries(double.__code__) == []


def test_skipped_code_is_not_compiled() -> None:
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    torch_private.skip(triple.__code__)
    torch.compile(triple, backend="eager")(torch.ones(2))
    assert torch_private.compiled_entries(triple.__code__) == []


def test_inductor() -> None:
    importlib.import_module("torch._inductor.async_compile").AsyncCompile.pool()
    assert "pool" in torch_private.compile_pools()
    torch_private.stop_pool("pool")
    assert "pool" not in torch_private.compile_pools()
    importlib.import_module("torch._inductor.cudagraph_trees")
    assert torch_private.may_hold_cuda_graphs()
    torch_private.forget_cuda_graphs()


def test_inside_a_backward() -> None:
    seen: list[bool | None] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.in_backward())
        return x.sin()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_profilers() -> None:
    assert not torch_private.is_profiled()
    with torch.profiler.profile():
        assert torch_private.is_profiled()
    profile = torch.autograd.profiler.profile(use_kineto=True)
    getattr(profile, torch_private.PREPARES_PROFILER)()
    getattr(profile, torch_private.STARTS_PROFILER)()
    profile.__exit__(None, None, None)


def test_torch_itself() -> None:
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or not torch.version.cuda
    assert torch_private.default_device() is None
    with torch.device("meta"):
        assert torch_private.default_device() is None or torch_private.default_device().type == "meta"
    with torch.utils._python_dispatch.TorchDispatchMode(), torch_private.without_modes():
        assert torch.ones(2).sum() == 2
    with torch_private.fake_tensor_mode():
        fake = torch.ones(2)
    kind = type(fake)
    assert f"{kind.__module__}.{kind.__qualname__}" == torch_private.FAKE_TENSOR
    loader = torch.utils.data.DataLoader([1])  # type: ignore[var-annotated, arg-type]
    assert isinstance(iter(loader), torch_private.loader_iterator())


def test_wrappers_of_torch_distributed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = checkpoint_wrapper(nn.Linear(2, 2))
    assert type(wrapped).__module__ == torch_private.CHECKPOINT_WRAPPERS
    assert isinstance(getattr(wrapped, torch_private.CHECKPOINTED_CHILD), nn.Linear)
    assert torch_private.COMPILED_CHILD in dict(torch.compile(nn.Linear(2, 2)).named_children())
    importlib.import_module("torch.distributed._composable_state")

    assert torch_private.fsdp2_policy(nn.Linear(2, 2)) is None
    assert torch_private.local_tensor(torch.ones(2)) is None


def test_a_name_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as utils

    for name in ("counters", "_compilation_metrics"):
        monkeypatch.delattr(utils, name)
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list")
    assert torch_private.counters("frames") is None
    assert torch_private.frames_compiled() == 0
    assert torch_private.compilation_metrics() is None
    assert torch_private.in_backward() is None
    assert torch_private.compiled_entries(double.__code__) == []


def test_torchaos_converter_leaves_its_trace() -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(nn.Sequential(nn.Linear(16, 16)))
    assert convert_to_float8_training.__module__ == torchao.CONVERTER_HOME
    assert fp8_conversion.has_run()


def test_torchaos_weights() -> None:
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    sides = WeightWithDynamicFloat8CastTensor.__new__.__code__.co_varnames
    assert "precomputed_scale" in sides


def test_the_fp8_state_of_the_transformer_engine_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack.state_manager() is None
    assert stack.state() is None
    assert not stack.autocast_is_open()
    transformer_engine.install(monkeypatch)
    manager = stack.state_manager()
    assert manager is transformer_engine.FP8GlobalStateManager
    assert stack.state() is manager
    assert stack.recipe_test() is None
    recipe, layer = transformer_engine.DelayedScaling(), transformer_engine.Linear(16, 16)
    with transformer_engine.autocast(recipe=recipe):
        assert stack.autocast_is_open()
        assert stack.open_recipe() is recipe
        layer(torch.ones(1, 16))
    assert (stack.meta(layer) or {})["recipe"] is recipe
    assert stack.meta(nn.Linear(2, 2)) is None
