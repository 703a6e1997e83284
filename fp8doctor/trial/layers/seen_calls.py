"""Find the checkpoint functions and autocasts that a forward calls, while it runs.

While a checkpoint function runs its region, its frame is on the stack, reentrant or not. The outermost module
call below that frame is the region; the innermost one above it is the module that calls checkpoint.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from fp8doctor.examine.autocasts import AUTOCAST_WITHIN, FP8_AUTOCAST, no_code_names_fp8_autocast
from fp8doctor.examine.checkpointing import CHECKPOINT_MODULES, TRANSFORMER_ENGINE
from fp8doctor.facts import Checkpointing, Facts, Linear, recorded
from fp8doctor.stacks import te_private
from fp8doctor.stacks.code_names import LIBRARIES, named
from fp8doctor.stacks.looking import forward_of, read
from fp8doctor.stacks.torch_private import Unknown, call_code

FORWARDS = 2
"""Forwards that have to agree, because the recomputed layers may be drawn at random."""

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
    """Whether any code opened Transformer Engine's."""
    without_hooks: bool = False
    """Whether the user's hooks, which may open one, were left out."""


class _Where(NamedTuple):
    """A place in a forward, read from its stack of frames."""

    region: str | None
    """Outermost module called below a checkpoint function; empty for a function, None outside of any."""
    module: str
    """Module that calls the checkpoint function; outside of any, the innermost module."""
    call: Call | None


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
    names = {id(module): name for name, module in model.named_modules()}
    seen, opening = Seen(), set()

    def layer_runs(layer_name: str) -> None:
        where = _where(sys._getframe(2), names)
        seen.under[layer_name] = _autocast_now()
        if seen.regions.get(layer_name) is None:
            seen.regions[layer_name] = layer_name if where.region == "" else where.region
        if where.call is not None:
            before = seen.calls.get(where.module, where.call)
            inside = before.inside_fp8 or where.module in opening
            seen.calls[where.module] = msgspec.structs.replace(before, inside_fp8=inside)

    def fp8_opens() -> None:
        seen.fp8_autocast = True
        where = _where(sys._getframe(2), names)
        if where.call is None:
            opening.add(where.module)
        else:
            seen.calls[where.module] = msgspec.structs.replace(where.call, opens_fp8=True)

    def autocast_opens() -> None:
        seen.autocast = seen.autocast or not _opener(sys._getframe(2)).startswith(LIBRARIES)

    with ExitStack() as hooks, _autocasts(autocast_opens, fp8_opens):
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(lambda layer, arguments, name=name: layer_runs(name))
            hooks.callback(handle.remove)
        forward()
    return seen


def _where(frame: FrameType | None, names: Mapping[int, str]) -> _Where:
    if (module_call := call_code()) is None:
        raise Unknown("torch calls modules by another name")
    outermost, innermost, call = "", None, None
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if home in CHECKPOINT_MODULES:
            reentrant = frame.f_locals.get("use_reentrant", call and call.reentrant)
            call = Call(home.partition(".")[0], reentrant if isinstance(reentrant, bool) else None)
        elif frame.f_code is module_call:
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None and call is not None:
                return _Where(outermost, name, call)
            if name is not None:
                outermost, innermost = name, name if innermost is None else innermost
        frame = frame.f_back
    return _Where(None if call is None else outermost, innermost or "" if call is None else "", call)


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
def _autocasts(torchs: Callable[[], None], fp8: Callable[[], None]) -> Iterator[None]:
    """Call a function for each opened autocast.

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
        if enabled:
            fp8()

    manager, enters = te_private.state_manager(), te_private.own_names(te_private.ENTERS)
    if manager is not None and not enters:
        raise Unknown("Transformer Engine opens its autocast in another way")
    replaced: list[tuple[Any, str, Any]] = [
        (torch.autocast, "__init__", made),
        (torch.autocast, "__enter__", entered),
        *((manager, name, classmethod(opened)) for name in enters),
        *((manager, name, classmethod(_nothing)) for name in te_private.own_names(te_private.EXITS)),
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
    linears = tuple(_decided(each, seen.regions) for each in facts.network.linears)
    blocks = tuple(
        each
        if recorded(each, "checkpointed")
        else msgspec.structs.replace(each, checkpointed=_recomputed(each.name, linears))
        for each in facts.network.blocks
    )
    marks = tuple(
        each if each.form != "called_in_forward" else _called(each, seen.calls[each.name])
        for each in facts.training.checkpointing
        if each.form != "called_in_forward" or each.name in seen.calls
    )
    training = msgspec.structs.replace(facts.training, checkpointing=marks)
    gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
    gaps.pop(AUTOCAST_WITHIN, None)
    if seen.autocast or not recorded(training, "autocast_within"):
        training = msgspec.structs.replace(training, autocast_within=seen.autocast)
    if training.get("autocast", "unknown") is None:
        training = msgspec.structs.replace(training, autocast=_of_most(seen.under))
    if not recorded(training, "fp8_autocast"):
        if seen.fp8_autocast:
            gaps.pop(FP8_AUTOCAST, None)
            training = msgspec.structs.replace(training, fp8_autocast=True)
        elif seen.without_hooks:
            gaps.setdefault(FP8_AUTOCAST, "hooks of the model, which may open te.autocast, were not run")
        elif FP8_AUTOCAST not in gaps:
            training = msgspec.structs.replace(training, fp8_autocast=False)
    network = msgspec.structs.replace(facts.network, linears=linears, blocks=blocks)
    return msgspec.structs.replace(facts, network=network, training=training, gaps=gaps)


def without_seen(facts: Facts, why: str) -> Facts:
    """Add to the facts why the calls of the job's forward are unknown.

    If no code in the process names an FP8 autocast, the forward opens none.
    """
    gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
    if any(each.form == "called_in_forward" for each in facts.training.checkpointing):
        gaps["network.linears.checkpointed"] = why
    if not recorded(facts, AUTOCAST_WITHIN):
        gaps[AUTOCAST_WITHIN] = why
    if not recorded(facts, FP8_AUTOCAST) and FP8_AUTOCAST not in gaps:
        if no_code_names_fp8_autocast(sys.modules):
            training = msgspec.structs.replace(facts.training, fp8_autocast=False)
            facts = msgspec.structs.replace(facts, training=training)
        else:
            gaps[FP8_AUTOCAST] = why
    return msgspec.structs.replace(facts, gaps=gaps)


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


def _decided(linear: Linear, found: Mapping[str, str | None]) -> Linear:
    if recorded(linear, "checkpointed") or linear.name not in found:
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
