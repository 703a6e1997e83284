"""The treatments, as they are carried out: one file for each family, found by the names that findings give
them.

A new treatment is a record in `fp8doctor.analysis.treatment_table`, which names a function here::

    def switch_it_off(variant: Variant, context: TreatmentContext) -> Variant:
        ...
        return variant

It changes a replica (or the batch, the autocast, a context, settings of the optimizer), raises `NotTried`
with the reason where it does not apply, and is then timed whenever a finding names it. What a user would
write stands in the check that names it; for what the trial proposes by itself
(`fp8doctor.trial.explorations`) in `fp8doctor.diagnosis.treatments`.
"""

from fp8doctor.trial.treatments.bf16 import to_bf16
from fp8doctor.trial.treatments.compilation import compile_blocks, strip_compile_marks, without_compile_marks
from fp8doctor.trial.treatments.convert import to_float8
from fp8doctor.trial.treatments.live import carry_out
from fp8doctor.trial.treatments.registry import (
    NotTried,
    TreatmentContext,
    function_of,
    known,
)

__all__ = [
    "NotTried",
    "TreatmentContext",
    "carry_out",
    "compile_blocks",
    "function_of",
    "known",
    "strip_compile_marks",
    "to_bf16",
    "to_float8",
    "without_compile_marks",
]
