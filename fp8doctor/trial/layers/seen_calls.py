"""Find the checkpoint functions and autocasts that a forward calls, and its layers' rows, while it runs.

While a checkpoint function runs its region, its frame is on the stack, reentrant or not. The outermost module
call below that frame is the region; the innermost one above it is the module that calls checkpoint.
`CallsSeen` hears of every call of a module: from hooks in the worker's forward on fake tensors, from
`fp8doctor.running.calls` in a step of the user's own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.examine.autocasts import AUTOCAST_WITHIN, FP8_AUTOCAST
from fp8doctor.examine.checkpointing import CHECKPOINT_MODULES, TRANSFORMER_ENGINE, open_fp8_autocast
from fp8doctor.facts import Checkpointing, Facts, Linear, recorded
from fp8doctor.stacks import te_private
from fp8doctor.stacks.code_names import LIBRARIES, named
from fp8doctor.stacks.looking import forward_of, read
from fp8doctor.stacks.tensors import tensors
from fp8doctor.stacks.torch_private import Unknown, call_code
from fp8doctor.trial.copies.depth import cleaned

FORWARDS = 2
"""Forwards that have to agree, because the recomputed layers may be drawn at random."""

NO_FORWARD = "no forward was seen"

IN_COMPILED_CODE = "compiled code may call one, and runs no Python that could be watched"

AUTOCAST_HOMES = ("torch.amp.", "torch.cuda.amp.", "contextlib.", f"{__name__}.")
"""Modules with frames between an autocast and the code that opens it."""


class Call(msgspec.Struct, frozen=True):
    """A call of a checkpoint function in a module's forward."""

    library: str
    reentrant: bool | None
    opens_fp8: bool = False
    """Whether its region opens Transformer Engine's autocast."""
    inside_fp8: bool = False
    """Whether the calling forward opens one."""
    flag: str | None = None
    """Attribute of the module that has to be on for the call."""


class Seen(msgspec.Struct):
    """Calls of a forward."""

    regions: dict[str, str | None] = {}
    """Layer -> name of the checkpointed region that it ran in; None if it ran in none."""
    calls: dict[str, Call] = {}
    """By the module whose forward calls a checkpoint function."""
    autocast: bool = False
    """Whether the user's code opened torch's autocast."""
    under: dict[str, str | None] = {}
    """Layer -> dtype of the autocast that it ran under; None if under none."""
    fp8_autocast: bool = False
    """Whether a module ran under Transformer Engine's."""
    without_hooks: bool = False
    """Whether the user's hooks, which may open one, were left out."""
    compiled: tuple[str, ...] = ()
    """Compiled regions, whose inside was not seen."""


@dataclass
class _Entered:
    """A call of a module that runs or ran."""

    module: int
    above: _Entered | None
    """Call of the module around it."""
    autocast: str | None
    fp8: bool
    rows: int | None
    begin: _Entered | None = None
    """Call that begins the checkpointed region around it, or itself; None outside of any."""


class CallsSeen:
    """Notes where the modules of a model run; `enter` and `leave` report every call. Keeps no module."""

    def __init__(self, fp8_is_open: Callable[[], bool] = te_private.autocast_is_open) -> None:
        self._fp8_is_open = fp8_is_open
        self._running: list[_Entered] = []
        self._ran: dict[int, list[_Entered]] = {}
        """By the module."""
        self._calls: dict[int | None, Call] = {}
        """By the module whose forward calls a checkpoint function; None above all."""

    def enter(self, module: nn.Module, arguments: object) -> None:
        """Note the begin of a call."""
        above = self._running[-1] if self._running else None
        first = next(tensors(arguments), None)
        rows = (
            first.numel() // first.shape[-1] if first is not None and first.dim() and first.numel() else None
        )
        entered = _Entered(id(module), above, _autocast_now(), self._fp8_is_open(), rows)
        self._running.append(entered)
        self._ran.setdefault(id(module), []).append(entered)
        call = None
        if above is not None and above.begin is not None:
            entered.begin = above.begin
        elif (call := _checkpoint_call(sys._getframe(1), above.module if above else None)) is not None:
            entered.begin = entered
        if (begin := entered.begin) is None:
            return
        caller = begin.above.module if begin.above else None
        before = self._calls.get(caller) or call
        if before is not None:
            around = begin.above is not None and begin.above.fp8
            self._calls[caller] = msgspec.structs.replace(
                before,
                opens_fp8=before.opens_fp8 or (entered.fp8 and not begin.fp8),
                inside_fp8=before.inside_fp8 or (begin.fp8 and not around),
            )

    def leave(self, module: nn.Module) -> None:
        """Note the end of a call."""
        if self._running and self._running[-1].module == id(module):
            self._running.pop()

    def seen(self, layers: Mapping[str, nn.Module], model: nn.Module, compiled: Collection[int] = ()) -> Seen:
        """Say what the layers ran in; nobody reported calls inside the ``compiled`` modules, given by id."""
        names = {id(module): cleaned(name) for name, module in model.named_modules()}
        at: dict[str, list[int]] = {}
        for each in (*names, *(each for each in self._ran if each not in names)):  # others are around it
            at.setdefault(names.get(each, ""), []).append(each)
        seen = Seen(
            calls={names.get(caller or 0, ""): call for caller, call in self._calls.items()},
            fp8_autocast=any(each.fp8 for ran in self._ran.values() for each in ran),
            compiled=tuple(names.get(each, "") for each in compiled),
        )
        for name, layer in layers.items():
            ran, within = self._ran.get(id(layer), []), name
            while not ran and within:
                within = within.rpartition(".")[0]
                above = [(each, ran) for each in at.get(within, ()) for ran in self._ran.get(each, ())]
                ran = [ran for each, ran in above if ran.begin or each in compiled]
            if ran:
                regions = [names.get(each.begin.module, "") for each in ran if each.begin]
                seen.regions[name] = regions[0] if regions else None
                seen.under[name] = ran[-1].autocast
        return seen

    def rows(self, layers: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        """Return the rows of every call of the layers that were called."""
        found = {name: [each.rows for each in self._ran.get(id(layer), ())] for name, layer in layers.items()}
        return {name: tuple(each for each in rows if each) for name, rows in found.items() if any(rows)}


def seen_calls(
    forward: Callable[[], object], layers: Mapping[str, nn.Module], model: nn.Module
) -> Seen | None:
    """Find the calls of a training forward; None if two forwards do not agree."""
    first, second = (_once(forward, layers, model) for _ in range(FORWARDS))
    if first != second:
        return None
    modules = dict(model.named_modules())
    calls = {
        name: msgspec.structs.replace(
            call, flag=_flag(name, modules[name], lambda: _once(forward, layers, model))
        )
        for name, call in first.calls.items()
    }
    return msgspec.structs.replace(first, calls=calls)


def _flag(name: str, module: nn.Module, again: Callable[[], Seen]) -> str | None:
    """Name the module's attribute without which a forward does not call checkpoint."""
    used = dict.fromkeys(each for each, _ in named(forward_of(module), type(module).__mro__))
    for flag in used:
        if flag == "training" or not flag or read(module, flag) is not True:
            continue
        own = dict(module.__dict__)
        module.__dict__[flag] = False
        try:
            if name not in again().calls:
                return flag
        except Exception:
            continue
        finally:
            module.__dict__.clear()
            module.__dict__.update(own)
    return None


def _once(forward: Callable[[], object], layers: Mapping[str, nn.Module], model: nn.Module) -> Seen:
    fp8: list[bool] = []
    calls = CallsSeen(lambda: any(fp8[-1:]))
    opened = []

    def autocast_opens() -> None:
        opened.append(not _opener(sys._getframe(2)).startswith(LIBRARIES))

    with ExitStack() as hooks, _autocasts(autocast_opens, fp8):
        for module in model.modules():
            entering = module.register_forward_pre_hook(
                lambda module, *given: calls.enter(module, given), with_kwargs=True
            )
            leaving = module.register_forward_hook(lambda module, *_: calls.leave(module), always_call=True)
            for handle in (entering, leaving):
                hooks.callback(handle.remove)
        forward()
    return msgspec.structs.replace(calls.seen(layers, model), autocast=any(opened))


def _checkpoint_call(frame: FrameType | None, above: int | None) -> Call | None:
    """Find a checkpoint function between a frame and the call of the module ``above``, given by id."""
    if (module_call := call_code()) is None:
        raise Unknown("torch calls modules by another name")
    call = None
    inside: list[FrameType] = []
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if home in CHECKPOINT_MODULES:
            reentrant = frame.f_locals.get("use_reentrant", call and call.reentrant)
            known = reentrant if isinstance(reentrant, bool) else None
            call = Call(
                home.partition(".")[0],
                known,
                opens_fp8=open_fp8_autocast(
                    (each.f_code, {**each.f_globals, **each.f_locals}) for each in inside
                ),
            )
        elif above is not None and frame.f_code is module_call and id(frame.f_locals.get("self")) == above:
            break
        else:
            inside.append(frame)
        frame = frame.f_back
    return call


def _opener(frame: FrameType | None) -> str:
    """Name the module of the code that opens an autocast; for a decorated function its own."""
    while frame is not None:
        home = f"{frame.f_globals.get('__name__', '')}."
        if frame.f_code.co_name == "decorate_autocast":
            return f"{frame.f_locals['func'].__module__}."
        if not home.startswith(AUTOCAST_HOMES):
            return home
        frame = frame.f_back
    return ""


def _autocast_now() -> str | None:
    on = (each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each))
    return next((str(torch.get_autocast_dtype(each)).removeprefix("torch.") for each in on), None)


@contextmanager
def _autocasts(torchs: Callable[[], None], fp8: list[bool]) -> Iterator[None]:
    """Call a function for each opened autocast of torch's, and keep the switches of Transformer Engine's.

    torch's opens on the CPU and Transformer Engine's has no effect, because a forked process cannot use a
    GPU.
    """
    enter: Any = torch.autocast.__enter__
    make: Any = torch.autocast.__init__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache: Any = None) -> None:
        given = dtype or torch.get_autocast_dtype(device_type)
        make(self, "cpu", given if given is torch.float16 else torch.bfloat16, enabled, cache)

    def entered(self: Any) -> Any:
        if self._enabled:
            torchs()
        return enter(self)

    def opened(cls: Any, /, enabled: bool = False, *settings: Any, **more: Any) -> None:
        fp8.append(enabled)

    def closed(cls: Any, /, *settings: Any, **more: Any) -> None:
        fp8.pop()

    manager, enters = te_private.state_manager(), te_private.own_names(te_private.ENTERS)
    if manager is not None and not enters:
        raise Unknown("Transformer Engine opens its autocast in another way")
    replaced: list[tuple[Any, str, Any]] = [
        (torch.autocast, "__init__", made),
        (torch.autocast, "__enter__", entered),
        *((manager, name, classmethod(opened)) for name in enters),
        *((manager, name, classmethod(closed)) for name in te_private.own_names(te_private.EXITS)),
        *([(te_private.home(), te_private.RECIPE_TEST, _nothing)] if te_private.recipe_test() else []),
    ]
    before = [(of, name, vars(of)[name]) for of, name, _ in replaced]
    for of, name, instead in replaced:
        setattr(of, name, instead)
    try:
        yield
    finally:
        for of, name, own in before:
            setattr(of, name, own)


def _nothing(*arguments: Any, **settings: Any) -> None:
    """Replace functions that use a GPU."""


def with_seen(facts: Facts, seen: Seen) -> Facts:
    """Add the calls of the job's forward to the facts."""
    marks = tuple(
        _called(each, seen.calls[each.name]) if each.name in seen.calls and _is_call(each) else each
        for each in facts.training.checkpointing
        if not _is_call(each) or each.name in seen.calls or _is_below(each.name, seen.compiled)
    )
    unknown = [each.name for each in marks if _is_call(each) and each.active is None]
    linears = tuple(_decided(each, seen.regions, unknown) for each in facts.network.linears)
    blocks = tuple(
        each
        if recorded(each, "checkpointed") or _is_below(each.name, unknown)
        else msgspec.structs.replace(each, checkpointed=_recomputed(each.name, linears))
        for each in facts.network.blocks
    )
    training = msgspec.structs.replace(facts.training, checkpointing=marks)
    gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
    if unknown:
        gaps["network.linears.checkpointed"] = IN_COMPILED_CODE
    if seen.autocast or not (recorded(training, "autocast_within") or seen.compiled):
        gaps.pop(AUTOCAST_WITHIN, None)
        training = msgspec.structs.replace(training, autocast_within=seen.autocast)
    if training.get("autocast", "unknown") is None:
        training = msgspec.structs.replace(training, autocast=_of_most(seen.under))
    if not recorded(training, "fp8_autocast"):
        if seen.fp8_autocast:
            gaps.pop(FP8_AUTOCAST, None)
            training = msgspec.structs.replace(training, fp8_autocast=True)
        elif seen.without_hooks:
            gaps.setdefault(FP8_AUTOCAST, "hooks of the model, which may open te.autocast, were not run")
        elif seen.compiled:
            gaps.setdefault(FP8_AUTOCAST, IN_COMPILED_CODE)
        elif FP8_AUTOCAST not in gaps:
            training = msgspec.structs.replace(training, fp8_autocast=False)
    network = msgspec.structs.replace(facts.network, linears=linears, blocks=blocks)
    return msgspec.structs.replace(facts, network=network, training=training, gaps=gaps)


def without_seen(facts: Facts, why: str) -> Facts:
    """Add to the facts why the calls of the job's forward are unknown."""
    gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
    if any(each.form == "called_in_forward" for each in facts.training.checkpointing):
        gaps["network.linears.checkpointed"] = why
    if not recorded(facts, AUTOCAST_WITHIN):
        gaps[AUTOCAST_WITHIN] = why
    if not recorded(facts, FP8_AUTOCAST) and FP8_AUTOCAST not in gaps:
        gaps[FP8_AUTOCAST] = why
    return msgspec.structs.replace(facts, gaps=gaps)


def without_forward(facts: Facts) -> Facts:
    """Add to the facts of a look that runs nothing what only a forward shows."""
    if not recorded(facts, "network.linears"):
        return facts
    facts = without_seen(facts, NO_FORWARD)
    return msgspec.structs.replace(facts, gaps={**facts.gaps, "workload.rows": NO_FORWARD})


def _of_most(under: Mapping[str, str | None]) -> str | None:
    """Return the autocast that most layers ran under."""
    counted = Counter(under.values()).most_common(1)
    return counted[0][0] if counted else None


def _called(mark: Checkpointing, call: Call) -> Checkpointing:
    known: dict[str, Any] = {"flag": call.flag} if call.flag else {}
    if TRANSFORMER_ENGINE in sys.modules:
        around = call.inside_fp8 and not call.opens_fp8
        known |= {
            "library": call.library,
            "opens_fp8_autocast": call.opens_fp8,
            "fp8_autocast_around": around,
        }
    return msgspec.structs.replace(mark, active=True, reentrant=call.reentrant, **known)


def _is_call(mark: Checkpointing) -> bool:
    return mark.form == "called_in_forward"


def _is_below(name: str, modules: Collection[str]) -> bool:
    """Tell if this is one of the modules, or inside of one."""
    return any(not each or f"{name}.".startswith(f"{each}.") for each in modules)


def _decided(linear: Linear, found: Mapping[str, str | None], unknown: Collection[str]) -> Linear:
    if recorded(linear, "checkpointed") or linear.name not in found:
        return linear
    if found[linear.name] is None and _is_below(linear.name, unknown):
        return linear
    return msgspec.structs.replace(linear, checkpointed=found[linear.name])


def _recomputed(blocks: str, linears: tuple[Linear, ...]) -> int:
    """Count the blocks of a list in which a layer is recomputed."""
    below = f"{blocks}." if blocks else ""
    return len(
        {
            each.name.removeprefix(below).partition(".")[0]
            for each in linears
            if each.name.startswith(below)
            and recorded(each, "checkpointed")
            and each.checkpointed is not None
        }
    )
