"""See calls of the model in the script's steps, without a hook or a recompilation.

``Module.__call__`` reads ``_compiled_call_impl`` from the module. During the window the module's class
answers that read with our call, and every other read with the original value; the module stores nothing.
Dynamo reads classes too, so the class is restored while Dynamo traces.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from torch import nn

from fp8doctor.running.patches import unnoticed, without_own_frames
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import COMPILED_CALL
from fp8doctor.trial.layers.seen_calls import CallsSeen

CALL = torch_private.outer_call_code()
"""Code of ``Module.__call__``; without it no call is seen."""

Called = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]
"""Listener, called before a call; may return a function that takes the output."""


class Calls:
    """Watches outermost calls of modules by the current thread; keeps no module alive."""

    def __init__(self, modules: Iterable[nn.Module], called: Called) -> None:
        self._called, self._outer = called, _references(modules)
        self.watched: dict[int, Callable[[], nn.Module | None]] = {}
        """By their ids: the outermost modules, and for a while others within them."""
        self._depth, self._thread = 0, get_ident()
        self._within: CallsSeen | None = None
        self._marks: list[_Mark] = []
        self._handler: Any = None
        self._callbacks = (("start", lambda *_: self._take_off()), ("end", lambda *_: self._place()))

    def begin(self) -> None:
        self._watch(self._outer)
        self._handler = torch_private.tracing_callbacks()
        torch_private.skip(_Mark.__get__.__code__)  # a guard may read a class, and would have this compiled
        for when, callback in self._callbacks:
            if self._handler is not None:
                getattr(self._handler, f"register_{when}_callback")(callback)

    def end(self) -> None:
        for when, callback in self._callbacks:
            if self._handler is not None:
                with suppress(ValueError):  # torch._dynamo.reset() forgets them
                    getattr(self._handler, f"remove_{when}_callback")(callback)
        self._handler = None
        self._take_off()

    def tell_within(self, modules: Iterable[nn.Module], seen: CallsSeen) -> None:
        """Also tell of the calls of these modules, until the outermost call that runs or comes returns."""
        self._within = seen
        self._watch({**self._outer, **_references(modules)})

    def _watch(self, modules: dict[int, Callable[[], nn.Module | None]]) -> None:
        self._take_off()
        self.watched = modules
        kinds = {type(alive) for each in modules.values() if (alive := each()) is not None}
        self._marks = [_Mark(self, kind) for kind in kinds]
        self._place()

    def _place(self) -> None:
        for mark in self._marks:
            mark.place()

    def _take_off(self) -> None:
        for mark in self._marks:
            mark.take_off()

    def run(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the call, and report it if it is the outermost."""
        try:
            if get_ident() != self._thread:
                return call(*args, **kwargs)
            outer = id(module) in self._outer
            then = self._notify(self._called, module, args, kwargs) if outer and not self._depth else None
            within, self._depth = self._within, self._depth + outer
            if within is not None:
                self._notify(within.enter, module, (args, kwargs))
            try:
                output = call(*args, **kwargs)
            finally:
                self._depth -= outer
                if within is not None:
                    within.leave(module)
                    if not self._depth:
                        self._within = None
                        self._watch(self._outer)
        except BaseException as error:
            without_own_frames(error)
            raise
        if then is not None:
            self._notify(then, output)
        return output

    def _notify(self, listener: Callable[..., Any], *what: Any) -> Any:
        """Call our listener. Its failure never stops the script."""
        with signals_deferred(), unnoticed():
            return listener(*what)


def _references(modules: Iterable[nn.Module]) -> dict[int, Callable[[], nn.Module | None]]:
    return {id(each): weakref.ref(each) for each in modules}


class _Mark:
    """A descriptor in place of a class's `COMPILED_CALL`. It pickles as None."""

    def __init__(self, calls: Calls, kind: type) -> None:
        self._calls, self._kind = calls, kind
        self._had, self._own = COMPILED_CALL in vars(kind), getattr(kind, COMPILED_CALL, None)

    def place(self) -> None:
        """Mark the class, unless other code has put something there."""
        if vars(self._kind).get(COMPILED_CALL) is (self._own if self._had else None):
            with suppress(TypeError):  # a class that cannot be written to
                type.__setattr__(self._kind, COMPILED_CALL, self)

    def take_off(self) -> None:
        if vars(self._kind).get(COMPILED_CALL) is self:
            if self._had:
                type.__setattr__(self._kind, COMPILED_CALL, self._own)
            else:
                type.__delattr__(self._kind, COMPILED_CALL)

    def __get__(self, module: Any, kind: type) -> Any:
        own: Any = self._own
        if module is not None:
            own = object.__getattribute__(module, "__dict__").get(COMPILED_CALL, own)
        watched: Any = self._calls.watched.get(id(module))
        if watched is None or watched() is not module or sys._getframe(1).f_code is not CALL:
            return own  # not torch's read, or another module of the class
        if torch_private.is_traced():  # it would trace our call instead of the module's
            return own
        call = own if own is not None else torch_private.plain_call(module)
        return partial(self._calls.run, module, call)

    def __set__(self, module: Any, value: Any) -> None:
        object.__getattribute__(module, "__dict__")[COMPILED_CALL] = value

    def __delete__(self, module: Any) -> None:
        try:
            del object.__getattribute__(module, "__dict__")[COMPILED_CALL]
        except KeyError:
            raise AttributeError(COMPILED_CALL) from None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()
