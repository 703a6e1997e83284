"""Find the checkpoint functions and autocasts that a forward calls, and its layers' rows, while it runs.

While a checkpoint function runs its region, its frame is on the stack. The outermost module call below that
frame is the region; the innermost one above it is the module that calls checkpoint.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.analysis.layers import OWN_FUNCTION, QUANTIZES
from fp8doctor.cost.matmuls import passes, step_tokens
from fp8doctor.examine.linears import with_shares
from fp8doctor.examine.marks import CHECKPOINT_MODULES, TRANSFORMER_ENGINE, name_fp8_autocast
from fp8doctor.facts import NOT_RECORDED, Checkpointing, Facts, Linear, recorded
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import modules_of
from fp8doctor.stacks.tensors import tensors
from fp8doctor.stacks.torch_private import Unknown, call_code
from fp8doctor.stacks.transformer_engine import autocast_is_open
from fp8doctor.trial.copies.depth import cleaned

AUTOCAST_WITHIN, FP8_AUTOCAST = "training.autocast_within", "training.fp8_autocast"

ROWS = "workload.rows"

CALLED = "called_in_forward"

FIRST_MICROBATCH = "is_first_microbatch"
"""Argument of Transformer Engine's modules: True casts the weight again, False takes the kept copy."""

NO_FORWARD = "no forward was seen"

NO_LAYER = "the forward that was seen calls none of the layers"

IN_COMPILED_CODE = "compiled code may call one, and runs no Python that could be watched"


class Call(msgspec.Struct):
    """A call of a checkpoint function in a module's forward; of several, what one of them does."""

    library: str
    reentrant: bool | None
    opens_fp8: bool = False
    """Whether its region opens Transformer Engine's autocast."""
    inside_fp8: bool = False
    """Whether the calling forward opens one."""


class Seen(msgspec.Struct):
    """Calls of a forward."""

    rows: dict[str, tuple[int, ...]] = {}
    """As `fp8doctor.facts.Workload.rows`."""
    scaled: Mapping[str, bool | None] | None = None
    """Layer whose forward calls ``torch._scaled_mm`` -> whether its own backward does; None without one.
    None if no calls of it were noted."""
    recipes: Mapping[str, str] = {}
    """Layer of Transformer Engine -> the recipe that its FP8 forward had."""
    own_loss: bool = False
    """Whether the output has a ``loss``, and nothing else computes one."""
    forward_only: tuple[str, ...] = ()
    """Layers that ran without autograd alone, such as a frozen teacher's."""
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
    fp8_calls: tuple[str, ...] = ()
    """Functions that multiplied FP8 tensors, those of layers too."""
    fp32_products: tuple[str, ...] = NOT_RECORDED
    """As in `fp8doctor.facts.Network`."""
    first_microbatch: tuple[bool, ...] = ()
    """`FIRST_MICROBATCH` in the calls of one module, of the one with most calls that have it."""


@dataclass
class _Entered:
    """A call of a module that runs or ran."""

    module: int
    above: _Entered | None
    """Call of the module around it."""
    autocast: str | None
    fp8: bool
    with_backward: bool
    rows: int | None
    begin: _Entered | None = None
    """Call that begins the checkpointed region around it, or itself; None outside of any."""


class CallsSeen:
    """Notes where the modules of a model run; `enter` and `leave` report every call. Keeps no module."""

    def __init__(self) -> None:
        self._running: list[_Entered] = []
        self._ran: dict[int, list[_Entered]] = {}
        """By the module."""
        self._calls: dict[int | None, Call] = {}
        """By the module whose forward calls a checkpoint function; None above all."""
        self._told: dict[int, tuple[bool, ...]] = {}
        """By the module: `FIRST_MICROBATCH` of each call."""

    def tell(self, module: nn.Module, named: Any) -> None:
        """Note what a call's ``named`` arguments say of its micro-batch."""
        told = named.get(FIRST_MICROBATCH) if isinstance(named, dict) else None
        if isinstance(told, bool):
            self._told[id(module)] = (*self._told.get(id(module), ()), told)

    def enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.tell(module, arguments[-1])
        above = self._running[-1] if self._running else None
        first = next(tensors(arguments), None)
        rows = rows_of(first) if first is not None and first.dim() and first.shape[-1] else None
        entered = _Entered(
            id(module), above, autocast_now(), autocast_is_open(), torch.is_grad_enabled(), rows
        )
        self._running.append(entered)
        self._ran.setdefault(id(module), []).append(entered)
        if above is not None and above.begin is not None:
            entered.begin = above.begin
        elif (call := _checkpoint_call(sys._getframe(1), above.module if above else None)) is not None:
            entered.begin = entered
            self._calls.setdefault(above.module if above else None, call)
        if (begin := entered.begin) is not None:
            call = self._calls[begin.above.module if begin.above else None]
            call.opens_fp8 |= entered.fp8 and not begin.fp8
            call.inside_fp8 |= begin.fp8 and not (begin.above and begin.above.fp8)

    @property
    def first_microbatch(self) -> tuple[bool, ...]:
        return max(self._told.values(), key=len, default=())

    @property
    def running(self) -> int | None:
        """The innermost module that runs, by id."""
        return self._running[-1].module if self._running else None

    def leave(self, module: nn.Module) -> None:
        if self._running and self._running[-1].module == id(module):
            self._running.pop()

    def seen(
        self,
        layers: Mapping[str, nn.Module],
        model: nn.Module,
        compiled: Collection[int] = (),
        kept_blocks: Mapping[str, str] | None = None,
    ) -> Seen:
        """Say what the layers ran in.

        Nobody reported calls inside the ``compiled`` modules, given by id. ``kept_blocks`` maps the prefix of
        every block's names in the whole model to that of the block that ran for it.
        """
        names = {id(module): cleaned(name) for name, module in modules_of(model)}
        at: dict[str, list[int]] = {}
        for each in (*names, *(each for each in self._ran if each not in names)):  # others are around it
            at.setdefault(names.get(each, ""), []).append(each)
        calls = {names.get(caller or 0, ""): call for caller, call in self._calls.items()}
        seen = Seen(
            calls=dict(calls),
            fp8_autocast=any(each.fp8 for ran in self._ran.values() for each in ran),
            compiled=tuple(names.get(each, "") for each in compiled),
            first_microbatch=self.first_microbatch,
        )
        for name, layer in layers.items():
            ran, within = self._ran.get(id(layer), []), name
            while not ran and within:
                within = within.rpartition(".")[0]
                above = [(each, ran) for each in at.get(within, ()) for ran in self._ran.get(each, ())]
                ran = [ran for each, ran in above if ran.begin or each in compiled]
            if ran and not any(each.with_backward or each.begin for each in ran):
                seen.forward_only += (name,)
            if ran:
                regions = [names.get(each.begin.module, "") for each in ran if each.begin]
                seen.regions[name] = regions[0] if regions else None
                seen.under[name] = ran[-1].autocast
        for block, kept in (kept_blocks or {}).items():
            seen.calls |= {_within(block, kept, name): call for name, call in calls.items()}
            of_block = {name: region for name, region in seen.regions.items() if name.startswith(block)}
            seen.regions |= {
                name: region and _within(block, kept, region) for name, region in of_block.items()
            }
        return seen

    def rows(self, layers: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        found = {name: [each.rows for each in self._ran.get(id(layer), ())] for name, layer in layers.items()}
        return {name: tuple(each for each in rows if each) for name, rows in found.items() if any(rows)}


def _within(block: str, kept: str, name: str) -> str:
    """Name a module of a kept block as in another block; one outside of it keeps its name."""
    inside = f"{name}.".startswith(kept)
    return f"{block}{f'{name}.'.removeprefix(kept)}".rstrip(".") if inside else name


def rows_of(into: torch.Tensor) -> int:
    return into.numel() // into.shape[-1]


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
                opens_fp8=any(
                    name_fp8_autocast(
                        (name, {**each.f_globals, **each.f_locals}.get(name))
                        for name in (*names_in(each.f_code), *each.f_code.co_freevars)
                    )
                    for each in inside
                ),
            )
        elif above is not None and frame.f_code is module_call and id(frame.f_locals.get("self")) == above:
            break
        else:
            inside.append(frame)
        frame = frame.f_back
    return call


def autocast_now() -> str | None:
    """Return the dtype of the autocast that is open; None without one."""
    on = (each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each))
    return next((str(torch.get_autocast_dtype(each)).removeprefix("torch.") for each in on), None)


def with_seen(facts: Facts, seen: Seen) -> Facts:
    """Add to the facts what the job's forward showed, and keep what was known before."""
    told = msgspec.structs.replace(facts.training, first_microbatch=seen.first_microbatch)
    linears = with_shares([_as_seen(each, seen, step_tokens(facts)) for each in facts.network.linears])
    in_fp8 = dict.fromkeys(facts.network.get("fp8_calls", ()))
    if all(each.use == "none" for each in linears):  # else FP8 is in layers that are known
        in_fp8 |= dict.fromkeys(seen.fp8_calls)
    network = msgspec.structs.replace(
        facts.network, linears=linears, fp32_products=seen.fp32_products, fp8_calls=tuple(in_fp8)
    )
    workload, gaps = facts.workload, dict(facts.get("gaps", {}))
    if seen.rows:
        workload = msgspec.structs.replace(workload, rows={**workload.get("rows", {}), **seen.rows})
        gaps.pop(ROWS, None)
    if seen.own_loss and workload.get("loss_source") == "mean":
        workload = msgspec.structs.replace(workload, loss_source="output.loss")
    facts = msgspec.structs.replace(facts, training=told, network=network, workload=workload, gaps=gaps)
    if facts.network.linears and not seen.regions:
        return without_forward(facts, IN_COMPILED_CODE if seen.compiled else NO_LAYER)
    marks: list[Checkpointing] = []
    unknown: list[str] = []
    for each in facts.training.checkpointing:
        if each.form != CALLED or each.active is not None:
            marks.append(each)
        elif each.name in seen.calls:
            marks.append(_called(each, seen.calls[each.name]))
        elif any(is_below(each.name, region) for region in seen.compiled):
            marks.append(each)
            unknown.append(each.name)

    def decided(linear: Linear) -> Linear:
        region = seen.regions.get(linear.name, NOT_RECORDED)
        unseen = region is None and any(is_below(linear.name, each) for each in unknown)
        if unseen or recorded(linear, "checkpointed"):
            return linear
        return msgspec.structs.replace(linear, checkpointed=region)

    network = msgspec.structs.replace(network, linears=tuple(map(decided, linears)))
    training = msgspec.structs.replace(told, checkpointing=tuple(marks))
    if unknown:
        gaps["network.linears.checkpointed"] = IN_COMPILED_CODE
    if seen.autocast or not (recorded(training, "autocast_within") or seen.compiled):
        gaps.pop(AUTOCAST_WITHIN, None)
        training = msgspec.structs.replace(training, autocast_within=seen.autocast)
    if training.get("autocast", "unknown") is None:
        of_most = Counter(seen.under.values()).most_common(1)
        training = msgspec.structs.replace(training, autocast=of_most[0][0] if of_most else None)
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
    return msgspec.structs.replace(facts, network=network, training=training, gaps=gaps)


def without_forward(facts: Facts, why: str = NO_FORWARD) -> Facts:
    """Add to the facts why what only a forward shows is unknown."""
    if not recorded(facts, "network.linears"):
        return facts
    gaps = dict(facts.get("gaps", {}))
    if not recorded(facts, ROWS):
        gaps[ROWS] = why
    if any(each.form == CALLED and each.active is None for each in facts.training.get("checkpointing", ())):
        gaps["network.linears.checkpointed"] = why
    if not recorded(facts, AUTOCAST_WITHIN):
        gaps[AUTOCAST_WITHIN] = why
    if not recorded(facts, FP8_AUTOCAST) and FP8_AUTOCAST not in gaps:
        gaps[FP8_AUTOCAST] = why
    return msgspec.structs.replace(facts, gaps=gaps)


def _as_seen(linear: Linear, seen: Seen, tokens: int | None) -> Linear:
    """Take the gradients off a layer that ran without autograd; note a recipe, and FP8 matmuls over storage.

    A function of its own has a backward; torchao's dynamic inference tensors have none. The rows of experts
    tell their FLOPs, if no module says how many a token visits.
    """
    rows = sum(seen.rows.get(linear.name, ()))
    if not recorded(linear, "flops_per_token") and rows and tokens:
        flops = 2.0 * passes(linear) * linear.in_features * linear.out_features * rows / tokens
        linear = msgspec.structs.replace(linear, flops_per_token=flops)
    if linear.get("recipe", "") is None and (recipe := seen.recipes.get(linear.name)):
        linear = msgspec.structs.replace(linear, recipe=recipe)
    if linear.name in seen.forward_only and (flops := linear.get("flops_per_token")):
        return msgspec.structs.replace(linear, flops_per_token=flops / passes(linear))
    stores = linear.use == "storage" or (linear.use == "unknown" and linear.dtype.startswith("float8"))
    if not stores or seen.scaled is None or linear.name not in seen.regions:
        return linear
    if backward := seen.scaled.get(linear.name):  # FP8 training, of the user's own
        return msgspec.structs.replace(linear, use="unknown")
    feature = QUANTIZES if backward is None else OWN_FUNCTION
    added = {feature: True} if linear.name in seen.scaled else {}
    return msgspec.structs.replace(linear, use="storage", features={**linear.features, **added})


def _called(mark: Checkpointing, call: Call) -> Checkpointing:
    known: dict[str, Any] = {}
    if TRANSFORMER_ENGINE in sys.modules:
        around = call.inside_fp8 and not call.opens_fp8
        known = {"library": call.library, "opens_fp8_autocast": call.opens_fp8, "fp8_autocast_around": around}
    return msgspec.structs.replace(mark, active=True, reentrant=call.reentrant, **known)
