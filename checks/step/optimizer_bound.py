"""The optimizer takes many kernels

FP8 makes the matmuls shorter and leaves the optimizer as it is, so its share grows. A foreach AdamW reads and
writes weights, gradients and both moments in a dozen passes. A loop over the parameters launches a dozen
kernels for each. The fused form needs one pass for all. On one H200 (torch 2.11) it took 3 and 11% of two
decoders' steps in compiled FP8.

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)              # before: foreach

    import torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # after

Adam, AdamW and SGD have a fused form. Ignore it if your optimizer's settings do not work with that form. An
optimizer that is already fused is not reported, even if its share is large, as with few tokens and many
parameters.
https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html
"""

from fp8doctor import kit

SHARE_PCT = 5.0
"""Percent of the step from which it is reported. A choice: above the 3% that fp8doctor calls even."""


@kit.check("STP007", "optimizer-bound", severity="warning", explained_by=("ENV006",))
def optimizer_bound(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    profiled = kit.step_difference.profiled_on_gpu(facts)
    if isinstance(profiled, kit.NotApplicable):
        return profiled
    _, found, step_ms = profiled
    spent = found.families_ms.get("optimizer", 0.0)
    share = 100 * spent / step_ms
    if share < SHARE_PCT or not could_be_fused(facts, found):
        return None
    name = (facts.training.optimizer or "the optimizer").rpartition(".")[2]
    return kit.Finding(
        title=f"{name} takes {spent:,.1f} ms, {kit.percent(share)} of the step, and is not fused",
        explanation="It reads and writes weights, gradients and moments in several passes instead of one.",
        evidence={"optimizer": facts.training.optimizer, "optimizer_ms": spent, "share_pct": share},
        severity=None if kit.arms.uses_fp8(facts) else "info",
        saving_ms=kit.Saving(low=0.0, high=spent, basis="modelled") if kit.arms.uses_fp8(facts) else None,
        treatment=kit.describe("fused-optimizer", facts),
    )


def could_be_fused(facts: kit.Facts, found: kit.facts.Breakdown) -> bool:
    """Whether the optimizer could be fused and is not, by its kernels' names."""
    groups = [group for group in found.get("groups", ()) if group.family == "optimizer"]
    fused = any("fused" in f"{group.name}{group.operator}".lower() for group in groups)
    return bool(groups) and not fused and kit.treatment_table.has_fused_form(facts.training.optimizer or "")


def _adamw(kernel: str, spent_ms: float) -> kit.Facts:
    """AdamW over four layers of 8B widths; the foreach form's times are invented."""
    families = {"gemm_fp8": 38.7, "gemm_16bit": 9.8, "cast": 6.3, "attention": 5.2, "optimizer": spent_ms}
    group = kit.facts.KernelGroup(name=kernel, family="optimizer", operator=None, count=96, time_ms=spent_ms)
    arms = (kit.profiled(kit.ArmName.AS_IS, families, groups=(group,)),)
    return kit.example(linears=(kit.float8(),), optimizer="torch.optim.adamw.AdamW", device="cuda", arms=arms)


FIRES = _adamw("multi_tensor_apply_kernel<PointwiseOpScalarListFunctor<BFloat16, 3, 3, 0>>", 19.0)
SILENT = _adamw("multi_tensor_apply_kernel<FusedAdamMathFunctor<BFloat16, 4>>", 7.5)
