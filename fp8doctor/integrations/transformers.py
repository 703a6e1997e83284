"""A callback for transformers' Trainer and its subclasses, such as TRL's."""

from typing import Any

from transformers import TrainerCallback

from fp8doctor.integrations.watching import Watching
from fp8doctor.stacks.looking import unwrapped


class FP8DoctorCallback(Watching, TrainerCallback):
    """Pass ``callbacks=[FP8DoctorCallback()]`` to a Trainer; arguments: `Watching`.

    Passed when the Trainer is built, it also sees Accelerate's conversion to FP8.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._begin(state.is_world_process_zero, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._begin(state.is_world_process_zero, model)
        self._converted()

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any
    ) -> None:
        self._stepped(unwrapped(optimizer))

    if not hasattr(TrainerCallback, "on_optimizer_step"):  # before transformers 4.46
        on_step_end = on_optimizer_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._paused()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end()
