"""Calls of the model in the script's own steps, seen without a hook and without a compilation.

``Module.__call__`` looks for ``_compiled_call_impl`` on the instance. Dynamo guards it, like the hooks,
only on modules that it traced. A module that no compiled region runs can therefore carry a call of ours for
a while, in eager mode and around ``torch.compile(m)`` and ``m.compile()`` alike (torch 2.6 to 2.13: no new
frame). It is neither pickled nor copied with the module.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from torch import nn

from fp8doctor.running.traceback_frames import without_own_frame
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks.looking import without_modes

_log = logging.getLogger("fp8doctor")

ATTRIBUTE = "_compiled_call_impl"

Called = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]
"""Told of a call before it runs; may return what is told the output."""


class Calls:
    """Calls of the outermost of these modules, by the thread that made this. It keeps none of them alive.

    Those ``inside`` a compiled region that nothing has called yet are watched until something calls one of
    the others: Dynamo then traces them, and must not meet a call of ours.
    """

    def __init__(
        self, modules: Iterable[nn.Module], called: Called, inside: Iterable[nn.Module] = ()
    ) -> None:
        self._inside = [weakref.ref(each) for each in inside]
        self._modules, self._called = [*(weakref.ref(each) for each in modules), *self._inside], called
        self._depth, self._thread = 0, get_ident()
        self._placed: list[tuple[weakref.ref[nn.Module], Any]] = []

    def begin(self) -> None:
        """Stand before each module's call."""
        for reference in self._modules:
            if (module := reference()) is not None:
                own = vars(module).get(ATTRIBUTE)
                self._placed.append((reference, own))
                vars(module)[ATTRIBUTE] = _Call(self, reference, own)

    def end(self) -> None:
        """Put back what stood there; a call that someone else has placed meanwhile stays."""
        for reference, own in self._placed:
            _put_back(reference, own)
        self._placed.clear()

    def _leave_inside(self, called: nn.Module) -> None:
        """Watch nothing inside of compiled regions any more, once something else than that is called."""
        if self._inside and all(each() is not called for each in self._inside):
            for reference, own in self._placed:
                if reference in self._inside:
                    _put_back(reference, own)
            self._inside.clear()

    def run(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the call; the outermost of this thread is told of."""
        self._leave_inside(module)
        if get_ident() != self._thread:
            return call(*args, **kwargs)
        then = self._told(self._called, module, args, kwargs) if self._depth == 0 else None
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        except BaseException as error:
            without_own_frame(error)
            raise
        finally:
            self._depth -= 1
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


def _put_back(reference: weakref.ref[nn.Module], own: Any) -> None:
    """Put back what stood before a module's call."""
    module = reference()
    if module is not None and isinstance(vars(module).get(ATTRIBUTE), _Call):
        if own is None:
            del vars(module)[ATTRIBUTE]
        else:
            vars(module)[ATTRIBUTE] = own


class _Call:
    """A module's call for a while. A copy or a pickle of it is None, as if it had never been there."""

    def __init__(self, calls: Calls, module: weakref.ref[nn.Module], own: Any) -> None:
        self._calls, self._module, self._own = calls, module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is being called
        own = self._own if self._own is not None else module._call_impl
        try:
            return self._calls.run(module, own, *args, **kwargs)
        except BaseException as error:
            without_own_frame(error)
            raise

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> None:
        return None
