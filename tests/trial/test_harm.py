"""First, do no harm: every item of it with a planted violation that is prevented, put back or reported, and
clean runs.

A replica reaches the user's model through an object that no copy can see through. It misbehaves after its
first step, which the tripwire guards, so that it is the digest that has to notice.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fp8doctor import inspect_model
from fp8doctor.facts import Target, Trial, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.arms import as_it_is
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.measure import bench, timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.run import TrialRun
from fp8doctor.trial.variant import ArmPlan

pytestmark = pytest.mark.slow

AFTER_THE_FIRST_STEP = 3
"""The forward at which a replica begins to misbehave: the tripwire's is the first."""


@pytest.fixture(autouse=True)
def one_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "MOST_WARM_UP", bench.LEAST_WARM_UP)
    monkeypatch.setattr(timer, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timer, "MOST_ROUNDS", 2)
    monkeypatch.chdir(tmp_path)


@dataclass
class Reach:
    """What a replica gets hold of; every copy is this very object."""

    deed: Callable[[Reach], object] | None = None
    at: int = AFTER_THE_FIRST_STEP
    forwards: int = 0
    model: Any = None
    optimizer: Any = None
    left: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reach:
        return self

    def tick(self) -> None:
        self.forwards += 1
        if self.deed is not None and self.forwards == self.at:
            self.deed(self)


class Net(nn.Module):
    """Two layers, dropout and a buffer; ``helper`` is compiled by a graph break of its own."""

    def __init__(self, reach: Reach) -> None:
        super().__init__()
        self.reach = reach
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(16))
        self.notes: list[str] = ["kept"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reach.tick()
        return self.second(self.dropout(self.first(x).relu())) * self.scale


def mend(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def trained(deed: Callable[[Reach], object] | None = None, at: int = AFTER_THE_FIRST_STEP) -> Job:
    """A job in the middle of training: gradients, optimizer state, hooks, mixed flags."""
    reach = Reach()
    model = Net(reach)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    model.first.eval()
    model.first.bias.requires_grad_(False)
    model.second.register_forward_hook(lambda module, arguments, output: output)
    model.second.weight.register_hook(lambda gradient: gradient)
    model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    reach.deed, reach.at, reach.forwards, reach.model, reach.optimizer = deed, at, 0, model, optimizer
    return Job(
        model=model,
        target=Target(),
        workload=Workload(accumulate=1),
        batch=torch.ones(4, 16),
        optimizer=optimizer,
    )


def attempt(job: Job, budget_s: float = 60) -> Trial:
    return conduct(
        job,
        [],
        [ArmPlan("as_is", as_it_is)],
        TrialRun(torch.device("cpu"), Budget(budget_s)),
    )


def flags() -> list[Any]:
    """Process-wide settings, read one by one."""
    backends = torch.backends
    return [
        torch.get_default_dtype(),
        torch.utils._device.CURRENT_DEVICE,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.allow_tf32,
        backends.cuda.matmul.fp32_precision,
        backends.fp32_precision,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cudnn.allow_tf32,
        backends.cudnn.enabled,
        backends.mkldnn.matmul.fp32_precision,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        *(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ),
        torch.is_autocast_cache_enabled(),
        [
            list(value)
            for key, value in vars(torch.nn.modules.module).items()
            if key.startswith("_global_") and isinstance(value, dict)
        ],
        torch._dynamo.eval_frame._stance,
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        {kind: dict(counted) for kind, counted in torch._dynamo.utils.counters.items()},
        len(torch._dynamo.utils._compilation_metrics),
        gc.isenabled(),
        gc.get_threshold(),
        sys.getrecursionlimit(),
        os.getcwd(),
        list(sys.path),
        list(sys.argv),
        dict(os.environ),
        (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        (logging.getLogger().level, list(logging.getLogger().handlers), logging.root.manager.disable),
        list(warnings.filters),
        id(warnings.showwarning),
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(each) if each is None else numpy.asarray(each).tolist() for each in numpy.random.get_state()],
        torch.cuda.is_initialized(),
    ]


def of_tensor(tensor: torch.Tensor | None) -> Any:
    """Identity, version and bytes."""
    if tensor is None:
        return None
    return (
        id(tensor),
        tensor.data_ptr(),
        tensor._version,
        tensor.requires_grad,
        tensor.detach().contiguous().view(torch.uint8).tolist() if tensor.dim() else tensor.item(),
    )


def owned(model: nn.Module, optimizer: Any, batch: Any) -> dict[str, Any]:
    """Everything of the user's, to the last bit."""
    modules, named = list(model.named_modules()), [*model.named_parameters(), *model.named_buffers()]
    tensors = batch.values() if isinstance(batch, dict) else (batch,)
    return {
        "tensors": {name: of_tensor(each) for name, each in named},
        "gradients": {name: of_tensor(each.grad) for name, each in named},
        "tensor hooks": {
            name: (
                list(each._backward_hooks or ()),
                list(each._post_accumulate_grad_hooks or ()),
                dict(vars(each)),
            )
            for name, each in named
        },
        "optimizer": [
            of_tensor(value) if isinstance(value, torch.Tensor) else value
            for state in optimizer.state.values()
            for value in state.values()
        ],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "modules": {
            name: (id(each), type(each), each.training, {key: id(value) for key, value in vars(each).items()})
            for name, each in modules
        },
        "containers": {
            name: {key: list(value) for key, value in vars(each).items() if isinstance(value, (dict, list))}
            for name, each in modules
        },
        "batch": [of_tensor(each) for each in tensors],
    }


def processes() -> list[str]:
    return [
        Path(f"/proc/self/task/{thread}/children").read_text() for thread in os.listdir("/proc/self/task")
    ]


def differences(before: Any, after: Any) -> list[Any]:
    if isinstance(before, dict):
        return [key for key in before if before[key] != after.get(key)]
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]


# Put back: settings of the process, which a model's own forward may change


def new_precision(reach: Reach) -> None:
    torch.backends.fp32_precision = "tf32"


SETTINGS: dict[str, Callable[[Reach], object]] = {
    "random numbers of torch": lambda reach: torch.manual_seed(5),
    "random numbers of Python": lambda reach: random.seed(5),
    "random numbers of NumPy": lambda reach: numpy.random.seed(5),
    "the default dtype": lambda reach: torch.set_default_dtype(torch.float64),
    "the default device": lambda reach: torch.set_default_device("cpu"),
    "grad mode": lambda reach: torch.set_grad_enabled(False),
    "anomaly mode": lambda reach: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": lambda reach: torch.use_deterministic_algorithms(True, warn_only=True),
    "deterministic fill": lambda reach: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "matmul precision": lambda reach: torch.set_float32_matmul_precision("medium"),
    "TF32": lambda reach: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "TF32, as it is set from torch 2.9 on": new_precision,
    "reduced precision": lambda reach: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cuDNN's choice of algorithms": lambda reach: setattr(torch.backends.cudnn, "benchmark", True),
    "attention backends": lambda reach: torch.backends.cuda.enable_flash_sdp(False),
    "the number of threads": lambda reach: torch.set_num_threads(torch.get_num_threads() + 1),
    "autocast on a CPU": lambda reach: torch.set_autocast_enabled("cpu", True),
    "autocast on CUDA": lambda reach: torch.set_autocast_dtype("cuda", torch.bfloat16),
    "autocast's cache": lambda reach: torch.set_autocast_cache_enabled(False),
    "hooks on all modules": lambda reach: nn.modules.module.register_module_forward_hook(
        lambda *arguments: None
    ),
    "a new environment variable": lambda reach: os.environ.__setitem__("PLANTED", "1"),
    "a deleted environment variable": lambda reach: os.environ.pop("PATH"),
    "sys.path": lambda reach: sys.path.append("planted"),
    "sys.argv": lambda reach: sys.argv.append("planted"),
    "the current folder": lambda reach: os.chdir("/"),
    "standard streams": lambda reach: setattr(sys, "stderr", sys.__stderr__),
    "garbage collection": lambda reach: gc.disable(),
    "the recursion limit": lambda reach: sys.setrecursionlimit(12345),
    "signal handlers": lambda reach: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "logging": lambda reach: logging.basicConfig(level=logging.ERROR, force=True),
    "logging disabled": lambda reach: logging.disable(logging.ERROR),
    "warning filters": lambda reach: warnings.simplefilter("error", ResourceWarning),
    "Dynamo's settings": lambda reach: setattr(torch._dynamo.config, "recompile_limit", 99),
    "Inductor's settings": lambda reach: setattr(torch._inductor.config, "max_autotune", True),
    "Dynamo's stance": lambda reach: torch.compiler.set_stance("force_eager"),
    "counters and metrics of torch.compile": lambda reach: torch.compile(mend, backend="eager")(
        torch.ones(3)
    ),
}


@pytest.mark.parametrize("item", SETTINGS)
def test_a_setting_that_a_step_changes_is_put_back(item: str) -> None:
    job = trained(SETTINGS[item])
    before, mine = flags(), owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert job.model.reach.forwards >= AFTER_THE_FIRST_STEP
    assert differences(before, flags()) == []
    assert differences(mine, owned(job.model, job.optimizer, job.batch)) == []
    assert trial.harm == ()


# Put back and named: what belongs to the user's model


def backward_through_the_original(reach: Reach) -> None:
    reach.forwards = -100
    reach.model(torch.ones(4, 16)).sum().backward()


def replace_a_parameter(reach: Reach) -> None:
    reach.model.first.weight = nn.Parameter(torch.zeros(16, 16))


BELONGINGS: dict[str, tuple[Callable[[Reach], object], str]] = {
    "training flags": (lambda reach: reach.model.eval(), "training flags"),
    "requires_grad": (lambda reach: reach.model.second.weight.requires_grad_(False), "requires_grad"),
    "a forward hook": (
        lambda reach: reach.model.first.register_forward_hook(lambda *arguments: None),
        "hooks",
    ),
    "a forward pre-hook": (
        lambda reach: reach.model.first.register_forward_pre_hook(lambda *arguments: None, with_kwargs=True),
        "hooks",
    ),
    "a backward hook": (
        lambda reach: reach.model.first.register_full_backward_hook(lambda *arguments: None),
        "hooks",
    ),
    "a removed hook": (lambda reach: reach.model.second._forward_hooks.clear(), "hooks"),
    "a first hook on a tensor": (
        lambda reach: reach.model.first.weight.register_hook(lambda gradient: gradient * 0),
        "hooks",
    ),
    "one more hook on a tensor": (
        lambda reach: reach.model.second.weight.register_hook(lambda gradient: gradient * 0),
        "hooks",
    ),
    "a hook after accumulation": (
        lambda reach: reach.model.first.weight.register_post_accumulate_grad_hook(lambda parameter: 1 / 0),
        "hooks",
    ),
    "gradients": (backward_through_the_original, "gradients"),
    "a forward put over the class's": (lambda reach: setattr(reach.model, "forward", lambda x: x), "modules"),
    "a compile mark": (lambda reach: reach.model.compile(), "modules"),
    "a class": (lambda reach: setattr(reach.model.first, "__class__", nn.Identity), "modules"),
    "a layer": (lambda reach: setattr(reach.model, "first", nn.Identity()), "modules"),
    "an attribute": (lambda reach: setattr(reach.model, "planted", 1), "modules"),
    "the contents of an attribute": (lambda reach: reach.model.notes.append("planted"), "modules"),
    "a parameter": (replace_a_parameter, "parameters"),
    "a new buffer": (lambda reach: reach.model.register_buffer("planted", torch.ones(1)), "buffers"),
    "the optimizer's settings": (
        lambda reach: reach.optimizer.param_groups[0].update(lr=0.5, planted=1),
        "optimizer settings",
    ),
    "a group of the optimizer": (
        lambda reach: reach.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "optimizer settings",
    ),
    "the optimizer's state": (lambda reach: reach.optimizer.state.clear(), "optimizer settings"),
    "a parameter's part of that state": (
        lambda reach: next(iter(reach.optimizer.state.values())).clear(),
        "optimizer settings",
    ),
    "the data of a parameter": (
        lambda reach: setattr(reach.model.first.weight, "data", torch.zeros(16, 16)),
        "parameters",
    ),
    "the data of a buffer": (lambda reach: setattr(reach.model.scale, "data", torch.zeros(16)), "parameters"),
    "the dtype": (lambda reach: reach.model.bfloat16(), "parameters"),
    "an attribute of a parameter": (
        lambda reach: setattr(reach.model.first.weight, "planted", 1),
        "attributes of parameters",
    ),
}


@pytest.mark.parametrize("item", BELONGINGS)
def test_what_belongs_to_the_model_is_put_back_and_named(item: str) -> None:
    deed, name = BELONGINGS[item]
    job = trained(deed)
    before = owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert differences(before, owned(job.model, job.optimizer, job.batch)) == []
    assert f"{name} (put back)" in (trial.harm or ())
    assert trial.reliable is False
    assert f"it changed what it had to leave alone: {', '.join(trial.harm)}" in (trial.reason or "")
    job.model.reach.deed = None
    job.model(torch.ones(4, 16)).sum().backward()


def test_gradients_are_out_of_reach_while_replicas_run() -> None:
    seen: list[Any] = []
    job = trained(lambda reach: seen.extend(parameter.grad for parameter in reach.model.parameters()))
    before = owned(job.model, job.optimizer, job.batch)
    assert attempt(job).harm == ()
    assert seen == [None] * 4
    assert differences(before, owned(job.model, job.optimizer, job.batch)) == []


def test_a_gradient_that_could_not_be_set_again_is_not_taken() -> None:
    job = trained()
    weight = job.model.first.weight
    weight.data = weight.data.bfloat16()
    before = weight.grad
    with pytest.raises(RuntimeError, match="dtype"):
        weight.grad = before
    attempt(job)
    assert weight.grad is before


# Reported: what nobody can put back


def write(reach: Reach) -> None:
    with torch.no_grad():
        reach.model.first.weight.add_(1)


def leave_a_thread(reach: Reach) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)
    thread.start()
    reach.left.append(ended.set)


def leave_a_process(reach: Reach) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    reach.left.append(lambda: (process.kill(), process.wait()))


def leave_an_open_file(reach: Reach) -> None:
    reach.left.append(open(__file__).close)  # noqa: SIM115


REPORTED: dict[str, tuple[Callable[[Reach], object], str]] = {
    "a parameter": (write, "parameters"),
    "a parameter behind its version counter": (
        lambda reach: reach.model.first.weight.data.add_(1),
        "parameters",
    ),
    "a buffer": (lambda reach: reach.model.scale.mul_(2), "buffers"),
    "the optimizer's step": (
        lambda reach: reach.optimizer.state[reach.model.second.weight]["step"].add_(1),
        "optimizer state",
    ),
    "the optimizer's moments": (
        lambda reach: reach.optimizer.state[reach.model.second.weight]["exp_avg"].data.zero_(),
        "optimizer state",
    ),
    "a thread": (leave_a_thread, "threads"),
    "a child process": (leave_a_process, "child processes"),
    "an open file": (leave_an_open_file, "open files"),
    "a file": (lambda reach: Path("planted").touch(), "files in the current folder"),
}


@pytest.mark.parametrize("item", REPORTED)
def test_what_cannot_be_put_back_is_reported(item: str) -> None:
    deed, name = REPORTED[item]
    job = trained(deed)
    try:
        trial = attempt(job)
    finally:
        for undo in job.model.reach.left:
            undo()
    assert trial.harm == (name,)
    assert name in (trial.reason or "")
    assert trial.reliable is (name == "files in the current folder")
    accused = "it changed what it had to leave alone" in (trial.reason or "")
    assert accused is not trial.reliable


def test_a_file_that_another_program_may_have_left_makes_no_timing_doubtful(tmp_path: Path) -> None:
    job = trained(lambda reach: Path("planted").touch())
    trial = attempt(job)
    assert trial.reliable is True
    assert trial.reason == (
        "more was there after it than before, which others may have made: files in the current folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["planted"]


# Prevented


def test_a_step_that_writes_into_its_batch_writes_into_a_copy() -> None:
    job = trained()
    job.loss = lambda output, batch: output.mean() + batch.mul_(2).mean() * 0
    before = of_tensor(job.batch)
    assert attempt(job).harm == ()
    assert of_tensor(job.batch) == before


def test_a_tensor_that_is_kept_at_a_parameter_is_copied_with_it() -> None:
    job = trained()
    job.model.second.weight.main_grad = torch.zeros(16, 16)

    def accumulate(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.main_grad.data.add_(1)
        return output.mean()

    parameters: list[Any] = []
    forward = Net.forward

    def noting(self: Net, x: torch.Tensor) -> torch.Tensor:
        parameters[:] = [self.second.weight]
        return forward(self, x)

    job.model.__class__ = type("Noting", (Net,), {"forward": noting})
    job.loss = accumulate
    trial = attempt(job)
    assert trial.harm == ()
    assert torch.equal(job.model.second.weight.main_grad, torch.zeros(16, 16))


def test_a_trial_that_would_write_at_once_is_refused_and_nothing_is_written() -> None:
    job = trained(write, at=1)
    mine = owned(job.model, job.optimizer, job.batch)
    trial = attempt(job)
    assert (trial.arms, trial.harm) == ((), ())
    assert trial.reason == "it would write to 'first.weight' of the original"
    assert differences(mine, owned(job.model, job.optimizer, job.batch)) == []


@pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
def test_a_trial_inside_a_region_without_gradients_times_the_step(way: Any) -> None:
    job = trained()
    with way():
        trial = attempt(job)
        assert not torch.is_grad_enabled()
    assert trial.arms[0].tried
    assert trial.harm == ()


# torch.compile


def entries(function: Any) -> list[Any]:
    return [each.code for each in _debug_get_cache_entry_list(function.__code__)]


class Broken(Net):
    """Its graph breaks, so that its own method and ``mend`` are compiled as frames of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.mended(x)

    def mended(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.second(self.first(mend(x)))


@pytest.fixture
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("forgotten")
def test_compiled_code_of_a_function_that_had_none_is_forgotten() -> None:
    job = trained(lambda reach: torch.compile(mend, backend="eager", dynamic=False)(torch.ones(5)))
    assert attempt(job).harm == ()
    assert entries(mend) == []


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    "deed",
    [
        lambda reach: torch._dynamo.reset(),
        lambda reach: torch.compile(mend, backend="eager", dynamic=False)(torch.ones(5)),
    ],
    ids=["forgotten", "one more"],
)
def test_what_the_user_compiled_is_watched(deed: Callable[[Reach], object]) -> None:
    torch.compile(mend, backend="eager", dynamic=False)(torch.ones(2))
    job = trained(deed)
    assert attempt(job).harm == ("compiled code of the model",)


@pytest.mark.usefixtures("forgotten")
def test_a_broken_graph_of_the_user_gets_no_entries_of_replicas() -> None:
    job = trained()
    job.model = Broken(Reach())
    job.model.compile(backend="eager")
    job.model(job.batch).sum().backward()
    job.optimizer = None
    before = entries(Broken.forward), entries(Broken.mended), entries(mend)
    assert [len(each) > 0 for each in before] == [True, True, False]
    assert attempt(job).harm == ()
    assert (entries(Broken.forward), entries(Broken.mended), entries(mend)) == before


@pytest.mark.usefixtures("forgotten")
def test_workers_that_compiling_starts_are_ended() -> None:
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    shutdown_compile_workers()
    AsyncCompile.pool.cache_clear()
    before = {thread.ident for thread in threading.enumerate()}

    def compile_in_a_pool(reach: Reach) -> None:
        AsyncCompile.pool().submit(int).result()
        assert {thread.ident for thread in threading.enumerate()} - before

    assert attempt(trained(compile_in_a_pool)).harm == ()
    assert {thread.ident for thread in threading.enumerate()} == before
    assert AsyncCompile.pool().submit(lambda: 3).result() == 3
    AsyncCompile.pool().shutdown()
    AsyncCompile.pool.cache_clear()


def test_the_timer_of_compile_workers_is_no_harm() -> None:
    """It ends by itself; a trial on a GPU that compiles leaves it behind."""
    from torch._inductor.compile_worker.timer import Timer

    timers: list[Timer] = []

    def start(reach: Reach) -> None:
        timers.append(Timer(0.2, lambda: None))
        timers[0].record_call()

    assert attempt(trained(start)).harm == ()
    timers[0].quit()


def test_the_threads_of_autograd_are_no_harm() -> None:
    """It runs a backward on a GPU, and one that is nested deeply, in a thread that Python did not start."""
    asked: set[int] = set()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            asked.add(threading.current_thread().ident or 0)
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return gradient, None

    deeply = lambda reach: Nested.apply(torch.ones(1, requires_grad=True), 70).sum().backward()  # noqa: E731
    assert attempt(trained(deeply)).harm == ()
    assert asked & {each.ident for each in threading.enumerate() if isinstance(each, threading._DummyThread)}


def test_the_monitor_of_a_progress_bar_is_ended() -> None:
    """Inductor shows progress with tqdm, which starts a thread."""
    from tqdm import tqdm

    if tqdm.monitor is not None:
        tqdm.monitor.exit()
    tqdm.monitor = None
    assert attempt(trained(lambda reach: tqdm(total=1, file=io.StringIO()).close())).harm == ()
    assert tqdm.monitor is None


def test_autocasts_cache_keeps_no_replica_alive() -> None:
    weights: list[weakref.ref[torch.Tensor]] = []

    class Noting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights.append(weakref.ref(self.first.weight))
            return super().forward(x)

    job = trained()
    job.model.__class__ = Noting
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attempt(job).harm == ()
        gc.collect()
        assert weights
        assert {weight() for weight in weights} == {None}


# Transformer Engine


@pytest.mark.parametrize("flavour", ["quantization", "fp8"])
def test_transformer_engines_state_is_put_back_and_its_buffers_are_out_of_reach(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.stand_ins import transformer_engine

    transformer_engine.install(monkeypatch, flavour)
    manager: Any = transformer_engine.FP8GlobalStateManager
    amax = torch.ones(1)
    monkeypatch.setattr(manager, "global_amax_buffer", {"forward_key": [amax]}, raising=False)
    monkeypatch.setattr(manager, "autocast_arguments", {"key": 1}, raising=False)
    monkeypatch.setattr(manager, "enabled", False)
    seen: list[Any] = []

    def deed(reach: Reach) -> None:
        seen.append(dict(manager.global_amax_buffer))
        manager.enabled, manager.recipe = True, "planted"
        manager.global_amax_buffer["planted"] = [torch.ones(1)]
        manager.autocast_arguments["planted"] = 2

    buffer = manager.global_amax_buffer
    assert attempt(trained(deed)).harm == ()
    assert seen == [{}]
    assert (manager.enabled, manager.recipe, manager.autocast_arguments) == (False, None, {"key": 1})
    assert manager.global_amax_buffer is buffer
    assert list(buffer) == ["forward_key"]
    assert buffer["forward_key"][0] is amax


class Registers(nn.Linear):
    """A layer that registers at its first forward, as those of Transformer Engine do, and tells at each how
    many would be updated with it."""

    seen: ClassVar[list[int]] = []
    is_registered = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tests.stand_ins.transformer_engine import FP8GlobalStateManager

        manager: Any = FP8GlobalStateManager
        if not self.is_registered:
            manager.global_amax_buffer.setdefault("forward_key", []).append(self.weight)
        self.is_registered = True
        self.seen.append(len(manager.global_amax_buffer["forward_key"]))
        return super().forward(x)


def test_scales_of_one_arm_are_updated_in_its_own_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.stand_ins import transformer_engine

    transformer_engine.install(monkeypatch, "quantization")
    manager: Any = transformer_engine.FP8GlobalStateManager
    monkeypatch.setattr(manager, "global_amax_buffer", {}, raising=False)
    job = Job(
        model=nn.Sequential(Registers(8, 8), Registers(8, 8)),
        target=Target(),
        workload=Workload(accumulate=1),
        batch=torch.ones(2, 8),
    )
    of = bench.Bench(job, [], torch.device("cpu"))
    for name in ("a", "b"):
        of.build(Attempt(ArmPlan(name, as_it_is)))
    of.close()
    assert set(Registers.seen[2:]) == {1, 2}, "never those of the other arm"
    assert len(manager.global_amax_buffer["forward_key"]) == 2, "of the first step, which no arm took"


# When it raises


class Planted(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Planted])
@pytest.mark.parametrize("at", [1, 3, 6], ids=["first step", "warm-up", "timing"])
def test_all_is_as_before_when_it_is_interrupted(error: type[BaseException], at: int) -> None:
    def deed(reach: Reach) -> None:
        reach.model.eval()
        reach.model.first.register_forward_hook(lambda *arguments: None)
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        os.environ["PLANTED"] = "1"
        raise error

    job = trained(deed, at)
    before, mine = flags(), owned(job.model, job.optimizer, job.batch)
    if issubclass(error, Exception):
        assert "hooks (put back)" in attempt(job).harm
    else:
        with pytest.raises(error):
            attempt(job)
    assert differences(before, flags()) == []
    assert differences(mine, owned(job.model, job.optimizer, job.batch)) == []


# Clean runs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.dropout = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def float8() -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(
        Decoder().bfloat16(), module_filter_fn=lambda layer, name: name != "head"
    )


def float8_compiled() -> nn.Module:
    model: Any = float8()
    for block in model.blocks:
        block.compile()
    return model


def wrapped() -> nn.Module:
    return torch.compile(Decoder())  # type: ignore[return-value]


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=64,
            **settings,
        )
    )


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def checkpointed() -> nn.Module:
    model = llama(use_cache=False, tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    return model


def hooked() -> nn.Module:
    model = Decoder()
    model.blocks[0].register_forward_hook(lambda module, arguments, output: output)
    model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    model.head.weight.register_hook(lambda gradient: gradient)
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    torch.nn.utils.parametrizations.weight_norm(model.head)
    return model


CLEAN = [float8, float8_compiled, wrapped, lora, checkpointed, hooked]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("build", CLEAN, ids=[each.__name__ for each in CLEAN])
def test_a_clean_run_leaves_every_bit(
    build: Callable[[], nn.Module],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import torch._inductor.config

    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    # Inductor's own work is timed and proven elsewhere; every compiled frame is still captured, guarded and
    # cached.
    stance = torch.compiler.set_stance("default", force_backend="eager")
    try:
        model = build()
        tokens = torch.randint(0, 64, (2, 8))
        batch: Any = {"input_ids": tokens, "labels": tokens} if hasattr(model, "config") else tokens
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for last in (False, True):
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            (output.loss if hasattr(output, "loss") else output.float().mean()).backward()
            optimizer.step()
            if not last:
                optimizer.zero_grad()
        before, mine, children = flags(), owned(model, optimizer, batch), processes()
        code = {
            each: entries(each)
            for each in {type(module).forward for module in model.modules()}
            if hasattr(each, "__code__")
        }
        running, loaded = {thread.ident for thread in threading.enumerate()}, set(sys.modules)
        capfd.readouterr()

        # All arms of one model; of the others those that come first.
        report = inspect_model(
            model, batch, optimizer=optimizer, device="cpu", budget_s=60 if build is float8 else 4
        )

        printed = capfd.readouterr()
        assert report.facts.trial.harm == ()
        assert report.facts.trial.arms[0].tried
        assert differences(before, flags()) == []
        assert differences(mine, owned(model, optimizer, batch)) == []
        assert {each: entries(each) for each in code} == code
        assert {thread.ident for thread in threading.enumerate()} <= running
        assert len("".join(processes()).split()) <= len("".join(children).split())
        assert (printed.out, printed.err) == ("", "")
        assert list(tmp_path.iterdir()) == []
        assert [path.name for path in temporary.iterdir() if "fp8doctor" in path.name] == []
        stacks = (
            "transformers",
            "peft",
            "accelerate",
            "transformer_engine",
            "unsloth",
            "bitsandbytes",
            "deepspeed",
            "matplotlib",
        )
        assert {name.partition(".")[0] for name in set(sys.modules) - loaded}.isdisjoint(stacks)
    finally:
        stance.__exit__(None, None, None)


def test_a_clean_copy_trains_on_as_the_original_does() -> None:
    """The same losses with and without an inspection in the middle, dropout and optimizer included."""
    losses = []
    for inspected in (False, True):
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.AdamW(copy.copy(list(model.parameters())), lr=1e-2)
        for step in range(4):
            if inspected and step == 2:
                with torch.compiler.set_stance("default", force_backend="eager"):
                    inspect_model(
                        model,
                        torch.zeros(2, 8, dtype=torch.int64),
                        optimizer=optimizer,
                        device="cpu",
                        budget_s=1,
                    )
            optimizer.zero_grad()
            loss = model(torch.randint(0, 64, (2, 8))).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


FRESH = """
import json, os, sys, threading
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.first(x).relu())

def left():
    tasks = os.listdir("/proc/self/task")
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "children": "".join(open(f"/proc/self/task/{task}/children").read() for task in tasks),
        "files": sorted(os.readlink(link) for link in links if os.path.isfile(link)),
        # The cache of torch's compiler stays, as after any torch.compile: the user's own run finds it.
        "folder": os.listdir(),
        "temporary": [name for name in os.listdir(os.environ["TMPDIR"]) if "torchinductor_" not in name],
        "environment": dict(os.environ),
    }

model = Net()
model.compile(backend="aot_eager")
loaded, before = set(sys.modules), left()
from fp8doctor import inspect_model
trial = inspect_model(model, torch.ones(4, 16), device="cpu", budget_s=1).facts.trial
after = left()
print(json.dumps({
    "proven": trial.arms[0].graphs_run, "harm": trial.harm,
    "left": {key: after[key] for key in after if after[key] != before[key]},
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - loaded}),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_a_fresh_process_is_left_with_nothing_that_runs_or_lies_around(tmp_path: Path) -> None:
    """In a process that has loaded nothing that the tests have loaded."""
    for name in ("temporary", "here"):
        (tmp_path / name).mkdir()
    variables = {
        **os.environ,
        "TMPDIR": str(tmp_path / "temporary"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        cwd=tmp_path / "here",
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert (found["proven"], found["harm"], found["left"], found["cuda"]) == (1, [], {}, False)
    stacks = {
        "torchao",
        "transformers",
        "peft",
        "accelerate",
        "transformer_engine",
        "unsloth",
        "bitsandbytes",
        "deepspeed",
        "matplotlib",
    }
    assert stacks.isdisjoint(found["loaded"])
