"""Calls of the model in the script's own steps, seen without a hook and without a compilation.

``Module.__call__`` looks for ``_compiled_call_impl`` on the module. For a while the class of a watched module
answers that look with a call of ours, and everybody else with what is there: nothing of it stands in the
module. Dynamo reads classes by itself, so the classes are as they were while it traces anything.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

from torch import nn

from fp8doctor.running.traceback_frames import without_own_frame
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import COMPILED_CALL, without_modes

_log = logging.getLogger("fp8doctor")

CALL = torch_private.outer_call_code()
"""The code of ``Module.__call__``; without it no call is seen."""

Called = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]
"""Told of a call before it runs; may return what is told the output."""


class Calls:
    """Calls of the outermost of these modules, by the thread that made this. It keeps none of them alive.

    Those ``inside`` a compiled region that nothing has called yet are watched until something calls one of
    the others: what compiles then is not called from outside.
    """

    def __init__(
        self, modules: Iterable[nn.Module], called: Called, inside: Iterable[nn.Module] = ()
    ) -> None:
        inner = tuple(inside)
        self._called, self._inside = called, {id(each) for each in inner}
        self._depth, self._thread = 0, get_ident()
        of_kinds: dict[type, list[nn.Module]] = {}
        for each in (*modules, *inner):
            of_kinds.setdefault(type(each), []).append(each)
        self._marks = [_Mark(self, kind, each) for kind, each in of_kinds.items()]
        self._compiling = _Compiling(self._place, self._take_off)

    def begin(self) -> None:
        """Stand before each module's call."""
        self._place()
        self._compiling.begin()

    def end(self) -> None:
        """Stand there no longer."""
        self._compiling.end()
        self._take_off()

    def _place(self) -> None:
        for mark in self._marks:
            mark.place()

    def _take_off(self) -> None:
        for mark in self._marks:
            mark.take_off()

    def _leave_inside(self, called: nn.Module) -> None:
        """Watch nothing inside of compiled regions any more, once something else than that is called."""
        if self._inside and id(called) not in self._inside:
            for mark in self._marks:
                mark.leave(self._inside)
            self._inside.clear()

    def run(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the call; the outermost of this thread is told of."""
        self._leave_inside(module)
        try:
            if get_ident() != self._thread:
                return call(*args, **kwargs)
            then = self._told(self._called, module, args, kwargs) if self._depth == 0 else None
            self._depth += 1
            try:
                output = call(*args, **kwargs)
            finally:
                self._depth -= 1
        except BaseException as error:
            without_own_frame(error)
            raise
        if then is not None:
            self._told(then, output)
        return output

    def _told(self, listener: Callable[..., Any], *what: Any) -> Any:
        """Tell a listener of ours. The script goes on, whatever becomes of that."""
        with signals_deferred(), without_modes():
            try:
                return listener(*what)
            except Exception:
                _log.debug("a call of the model could not be noted", exc_info=True)
                return None


class _Mark:
    """What a class has for `COMPILED_CALL` for a while. A pickle of it, with a class by value, is None."""

    def __init__(self, calls: Calls, kind: type, modules: Iterable[nn.Module]) -> None:
        self._calls, self._kind = calls, kind
        self._modules: dict[int, Callable[[], Any]] = {id(each): weakref.ref(each) for each in modules}
        self._had, self._own = COMPILED_CALL in vars(kind), getattr(kind, COMPILED_CALL, None)

    def place(self) -> None:
        """Stand in the class, unless something of someone else's has come to stand there."""
        if self._modules and vars(self._kind).get(COMPILED_CALL) is (self._own if self._had else None):
            with suppress(TypeError):  # a class that cannot be written to
                type.__setattr__(self._kind, COMPILED_CALL, self)

    def leave(self, modules: Collection[int]) -> None:
        """Watch these modules, by their ids, no longer."""
        for each in modules:
            self._modules.pop(each, None)
        if not self._modules:
            self.take_off()

    def take_off(self) -> None:
        """Leave the class as it was; what someone else has put there meanwhile stays."""
        if vars(self._kind).get(COMPILED_CALL) is self:
            if self._had:
                type.__setattr__(self._kind, COMPILED_CALL, self._own)
            else:
                type.__delattr__(self._kind, COMPILED_CALL)

    def __get__(self, module: Any, kind: type) -> Any:
        own: Any = self._own
        if module is not None:
            own = object.__getattribute__(module, "__dict__").get(COMPILED_CALL, own)
        watched = self._modules.get(id(module))
        if watched is None or watched() is not module or sys._getframe(1).f_code is not CALL:
            return own  # the look is not torch's, or at another module of the class
        if torch_private.is_traced():  # it would trace our call in the place of the module's
            return own
        call = own if own is not None else torch_private.plain_call(module)
        return partial(self._calls.run, module, call)

    def __set__(self, module: Any, value: Any) -> None:
        _state(module)[COMPILED_CALL] = value

    def __delete__(self, module: Any) -> None:
        if COMPILED_CALL not in _state(module):
            raise AttributeError(COMPILED_CALL)
        del _state(module)[COMPILED_CALL]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _state(module: Any) -> dict[str, Any]:
    return object.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]


class _Compiling:
    """Tells when Dynamo begins and ends to trace, by its own callbacks."""

    def __init__(self, ended: Callable[[], None], began: Callable[[], None]) -> None:
        self._told = [("start", self._calling(began)), ("end", self._calling(ended))]
        self._handler: Any = None

    def begin(self) -> None:
        """Listen, where Dynamo is loaded: making an optimizer loads it."""
        self._handler = torch_private.tracing_callbacks()
        torch_private.skip(_Mark.__get__.__code__)  # a guard may read a class, and would have this compiled
        for when, told in self._told:
            if self._handler is not None:
                getattr(self._handler, f"register_{when}_callback")(told)

    def end(self) -> None:
        """Listen no longer."""
        for when, told in self._told:
            if self._handler is not None:
                with suppress(ValueError):  # torch._dynamo.reset() forgets them
                    getattr(self._handler, f"remove_{when}_callback")(told)
        self._handler = None

    @staticmethod
    def _calling(function: Callable[[], None]) -> Callable[[Any], None]:
        return lambda *_: function()
