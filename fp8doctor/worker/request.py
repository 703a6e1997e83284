"""What a trial is asked to be; the command line fills it in before there is a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8doctor.facts.arm_names import ArmName


@dataclass(frozen=True)
class TrialRequest:
    """A trial's time, its device, the checks whose treatments it tries, and where its traces go."""

    budget_s: float | None = None
    """None leaves it to what there is to compile."""
    device: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks."""
    trace: str | None = None
    """Absolute path for the trace of the step as it is: a model file may change the folder."""

    def trace_of(self, arm: str) -> Path | None:
        """Name the file that keeps the trace of an arm: the arm's name stands before the suffix. None where
        traces are not kept."""
        if self.trace is None:
            return None
        file = Path(self.trace)
        ending = "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix
        return (
            file
            if arm == ArmName.AS_IS
            else file.with_name(f"{file.name.removesuffix(ending)}.{arm}{ending}")
        )
