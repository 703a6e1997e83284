"""Apply treatments to a replica: one file for each family.

A new treatment is a record in `fp8doctor.analysis.treatment_table`, which names a function here::

    def switch_it_off(variant: Variant, context: TreatmentContext) -> Variant:
        ...
        return variant

It changes a replica, the batch, the autocast, a context or settings of the optimizer, and raises `NotTried`
with the reason if it does not apply. The trial times it whenever a finding names it. The lines that a user
would write are in the check that names it, or in `fp8doctor.diagnosis.treatments` if the trial proposes it
by itself (`fp8doctor.trial.explorations`).
"""
