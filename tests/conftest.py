"""What all tests share: a clean environment, and a look at a live model."""

import compileall
import gc
import itertools
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is loaded: processes of the tests share the cores

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and screens keep to it

from fp8doctor.facts import Facts, Target, Workload
from tests import assertions, processes
from tests.logged import Records
from tests.process_state import of_a_module, process_state, stand_ins_since

ROOT = Path(__file__).parents[1]

SETTINGS = ("ACCELERATE_", "TORCHDYNAMO_", "TORCH_COMPILE_", "NVTE_", "UNSLOTH_")
"""Prefixes of variables that change what is diagnosed, whoever runs the tests."""

COLLECT_AT = (100_000, 50, 100)
"""Thresholds of the garbage collector. At its own (700, 10, 10) it takes a fifth of the time of a process
that has imported torch: 93 s of CPU for 1,497 tests, 75 s at these (Python 3.11)."""

settings.register_profile(
    "gate", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gate")  # neither chance nor the clock decides


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes longer than a fifth of a second")
    config.addinivalue_line("markers", "gate(*cases): the gate runs these cases, the others are nightly")
    config.addinivalue_line("markers", "nightly: a further case, or a check of the tests' own kit; slow too")
    config.addinivalue_line("markers", "inductor: compiles with Inductor to its last kernel")
    config.option.loadscopereorder = False  # xdist would hand out files by their number of tests
    config.pluginmanager.register(assertions)
    config.pluginmanager.register(processes)
    gc.set_threshold(*COLLECT_AT)
    # In the place of pytest's own, which are hung at each of torch's 54 loggers six times a test: 2 ms.
    logging.getLogger().addHandler(logging.NullHandler())
    if not hasattr(config, "workerinput"):
        # Programs that tests start find it compiled where PYTHONDONTWRITEBYTECODE is set, in half the time.
        for room in ("fp8doctor", "checks"):
            compileall.compile_dir(ROOT / room, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the collection imports is compiled once, where PYTHONDONTWRITEBYTECODE is set too: a process that
    imports torch takes 2.3 s of CPU, and 6.3 s with nothing compiled. What a test imports stays as it is."""
    as_set, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = as_set


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that the gate leaves out, and put the files with most slow tests of the gate first.

    No process is then left alone with one of these files."""
    missing: dict[str, set[str]] = {}
    slow: Counter[Path] = Counter()
    for item in items:
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        if gate := item.get_closest_marker("gate"):
            missing.setdefault(test, {*gate.args}).discard(case)
            if case not in gate.args:
                item.add_marker("nightly")
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        elif item.get_closest_marker("slow"):
            slow[item.path] += 1
    if any(missing.values()) and not any("::" in each for each in config.args):
        raise pytest.UsageError(f"cases for the gate that there are not: {missing}")
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def _unset_settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(SETTINGS):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fp8_gemms_past_onednn() -> Iterator[None]:
    """FP8 GEMMs of a CPU go past oneDNN, whose reference takes 310 ms for one of 64 x 32 x 2048 where AMX is;
    torch's own emulation takes 1 ms and gives the same bits (torch 2.13)."""
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_step_gains_by_chance() -> Iterator[None]:
    """The clock by which a trial of this process times its steps ticks once a reading: all take as long,
    to the last bit, as a 1,024th of a second has no rounding."""
    from fp8doctor.trial.measure import timer

    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1024, monotonic=time.monotonic)
        patch.setattr(timer, "time", clock)
        yield


@pytest.fixture(autouse=True)
def _no_kernels_of_inductor(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is compiled for Inductor is captured and differentiated as ever and runs without its kernels, for
    each of which a C++ compiler takes two seconds; a test that is marked ``inductor`` has them."""
    if request.node.get_closest_marker("inductor") or "torch" not in sys.modules:
        yield
        return

    def run_as_captured(self: object, graph: Any, inputs: Any, **_: object) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._TorchCompileInductorWrapper.__call__", run_as_captured)
        yield


def seed(number: int) -> None:
    """Draw from here on what follows this seed, by every generator that is loaded."""
    random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


@pytest.fixture(scope="module", autouse=True)
def _a_module_draws_its_own_numbers() -> None:
    """Whichever modules ran before it in this process."""
    seed(0)


@pytest.fixture(autouse=True)
def _a_test_draws_its_own_numbers() -> None:
    """Whichever tests ran before it."""
    seed(1)


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """A trial collects garbage thrice, 0.4 s each with all that the tests have loaded: what is alive before a
    module is left out of its collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Fails a test that leaves a setting of the process changed: another test would read it."""
    before, modules = process_state(), set(sys.modules)
    yield
    after = process_state()
    left = [
        f"{name}: {before.get(name)!r} before, {after.get(name)!r} after"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and (name in before or not of_a_module(name))
    ]
    left += [f"sys.modules[{name!r}] is a stand-in" for name in stand_ins_since(modules)]
    assert not left, "\n".join(["this test leaves behind:", *left])


@pytest.fixture
def forget_accelerate() -> Iterator[None]:
    """Accelerate's shared state is put back to nothing, before and after."""
    from tests.stand_ins.accelerate_state import forget

    forget()
    yield
    forget()


@pytest.fixture
def logged() -> Iterator[Records]:
    """What fp8doctor logs, from WARNING on; a test may set another level."""
    logger, records = logging.getLogger("fp8doctor"), Records()
    logger.addHandler(records)
    yield records
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(records)


@pytest.fixture
def look() -> Callable[..., Facts]:
    """Facts of a live model before a trial: ``look(model, tokens=16384, **fields of the job)``."""
    from fp8doctor.examine import examine
    from fp8doctor.loading.job import Job
    from fp8doctor.trial import with_forward

    def examined(model: Any, *, tokens: int | None = None, **fields: Any) -> Facts:
        workload = Workload(
            batch_source="given" if tokens else None,
            batch_size=tokens,
            sequence_length=None,
            tokens=tokens,
            loss_source="mean",
            optimizer_source="made up",
            autocast_source="none",
            accumulate=1,
        )
        target = Target(kind="live", name=type(model).__name__, attribute=None)
        job = Job(model=model, target=target, workload=workload, **fields)
        return with_forward(job, examine(job))

    return examined
