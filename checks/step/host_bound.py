"""The GPU waits for the host

Python launches every kernel, and FP8 adds launches: about 83 per torchao layer that is not compiled. A
Transformer Engine layer takes the host several times as long as an nn.Linear. With few tokens the GPU
finishes before the next launch, and FP8 cannot shorten a step that waits for the host. With 256 tokens, one
job ran at 0.59x of BF16, idle for 64% of the step (`h200-few_tokens`).

    args = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=8)  # before

    from transformers import TrainingArguments
    args = TrainingArguments(per_device_train_batch_size=8, gradient_accumulation_steps=4)  # after

Compile, use larger micro-batches, or CUDA graphs (`torch.compile` with `mode="reduce-overhead"` or
`"max-autotune"`). BF16 gains from CUDA graphs too, and the trial does not time them. Upgrade a Transformer
Engine before 2.16.

Ignore it if your real batch is larger. A busy host alone proves nothing: it is busy for 84 to 99% of every
sound step. Most gaps must end with a late launch, and waits for data do not count.
https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
https://github.com/NVIDIA/TransformerEngine/issues/445
"""

from packaging.version import Version

from fp8doctor import kit

QUICKER = Version("2.16")
"""The last Transformer Engine that cut its modules' host time (TE#2957), after 2.10, 2.12 and 2.14."""

CAUSES = ("ENV006", "CMP001", "CMP002", "CMP003", "CMP005", "SHP003")


@kit.check("STP001", "host-bound", severity="warning", explained_by=CAUSES)
def host_bound(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    untimed = not kit.recorded(facts, "trial") and not kit.recorded(facts, "observed")
    if untimed and (estimated := kit.modelled_fix.modelled_host_bound(facts)):
        return launching(facts, estimated)
    found = kit.step_difference.profiled_on_gpu(facts)
    if isinstance(found, kit.NotApplicable):
        return found
    now, parts, step = found
    if not kit.step_difference.waits_for_the_host(now) or kit.watched.host_is_ahead(facts):
        return None
    idle = 100 * parts.idle_ms / step
    others_pct = facts.get("trial.health.other_use_pct") or 0.0
    if others_pct >= idle:
        why = f"other processes used up to {kit.percent(others_pct)} of the GPU, which looks idle meanwhile"
        raise kit.Unrecorded(kit.Arm, "breakdown", why)
    eager = [each for each in facts.network.linears if kit.needs_compile(each) and each.compiled is None]
    return kit.Finding(
        title=f"The GPU waits for the host for {kit.percent(idle)} of the step",
        explanation=f"The GPU has nothing to do for {parts.idle_ms:,.1f} of {step:,.1f} ms, and "
        f"{kit.percent(parts.host_wait_pct or 0.0)} of its gaps end with a late launch. A step launches "
        f"{parts.kernels:,} kernels of {1e3 * parts.busy_ms / max(parts.kernels, 1):.0f} µs on average."
        f"{outdated(facts)}",
        evidence={
            "idle_ms": parts.idle_ms,
            "idle_pct": idle,
            "host_wait_pct": parts.host_wait_pct,
            "kernels": parts.kernels,
            "busy_ms": parts.busy_ms,
            "step_ms": step,
        },
        severity="info" if not kit.arms.uses_fp8(facts) or kit.trial_view.is_faster(facts) else None,
        treatment=kit.compile_coverage.compile_treatment(facts, eager)
        if eager
        else kit.treatments.larger_batch(facts),
    )


def launching(facts: kit.Facts, found: kit.modelled_fix.HostBound) -> kit.Finding:
    """Report a step that was not timed, in which launching takes the host too long."""
    fp8, step, pays = facts.network.fp8, found.step, found.pays_from
    then = f"Up to {kit.layer_gain.MANY_TOKENS:,} tokens, FP8 is not faster here."
    if pays:
        then = f"FP8 pays off from about {pays:,} tokens per micro-batch."
    return kit.Finding(
        title=f"The host needs {step.host_ms:,.1f} ms to launch "
        f"{kit.plural(len(fp8), f'{kit.stack_of(fp8[0]).in_words} layer')}, a step in compiled BF16 takes "
        f"{found.bf16_ms:,.1f} ms (estimated)",
        explanation=f"This is for {facts.workload.tokens:,} tokens on {step.gpu}. In FP8 the GPU would "
        f"compute for {step.busy_ms:,.1f} ms/step. {then}{outdated(facts)}",
        evidence={
            "host_ms": step.host_ms,
            "busy_ms": step.busy_ms,
            "bf16_step_ms": found.bf16_ms,
            "speedup": round(found.speedup, 2),
            "tokens": facts.workload.tokens,
            "pays_from_tokens": pays,
            "fp8_layers": len(fp8),
        },
        treatment=kit.treatments.more_tokens(facts, pays)
        if pays
        else kit.stay_in_bf16(facts, "launching FP8 takes longer than BF16 (estimated)"),
    )


def outdated(facts: kit.Facts) -> str:
    """Name the release that needs less host time, if the layers' library is older; else empty."""
    of_te = any(linear.stack == "transformer_engine" for linear in facts.network.fp8)
    version = kit.installed(facts, "transformer_engine") if of_te else None
    if version is None or version >= QUICKER:
        return ""
    return f" Transformer Engine {version} is installed; {QUICKER} and newer need less host time."


def _llama_1b_in_te(idle_ms: float) -> kit.Facts:
    """Transformer Engine, not compiled, 256 tokens: an H200's step; its parts are invented."""
    families = {"gemm_fp8": 4.0, "cast": 2.0, "pointwise": 35.5 - idle_ms}
    arms = (kit.profiled(kit.ArmName.AS_IS, families, idle_ms, host_wait_pct=92.0),)
    linears = (kit.float8(stack="transformer_engine"),)
    return kit.example(linears=linears, blocks=(), wrappers=(), tokens=256, device="cuda", arms=arms)


FIRES = _llama_1b_in_te(idle_ms=27.0)
SILENT = _llama_1b_in_te(idle_ms=1.2)
