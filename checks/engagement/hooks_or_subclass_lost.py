"""The conversion dropped hooks, a forward or a compile

Looks at: what each Linear had at the moment when an FP8 layer took its place, against what that
FP8 layer has when the model is ready. Nothing shows it afterwards, so it is seen only while
fp8doctor loads your model file and your own conversion runs under its eyes.

Why it costs time. A converter makes a new layer with the old weight. The rest stays behind,
without a word: forward and backward hooks (logging, activation scaling, offloading), the forward
of your own nn.Linear subclass (another scaling, a fused bias, LoRA inside), and
`linear.compile()`, after which all casts of that layer run eagerly. `torch.compile(linear)` is
worse: the wrapper goes on calling the old Linear, and the FP8 layer inside it is never run. The
model then computes something else, or computes it slower.

What to do. Convert first, then add hooks and compile; keep layers with a forward of their own
out.

    model.up.compile(); convert_to_float8_training(model)           # before: compile is gone
    convert_to_float8_training(model); model.up.compile()           # after
    keep = lambda module, name: type(module) is nn.Linear           # after: subclasses stay
    convert_to_float8_training(model, module_filter_fn=keep)

Evidence: torchao 0.18 `Float8Linear.from_float` takes over weight and bias only, and so does
accelerate 1.15 `convert_model`; run on a CPU with both.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from __future__ import annotations

from fp8doctor.facts import Conversion, Facts, Network, Training
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

CONVERT_FIRST = Treatment(
    name="convert-first",
    summary="convert first, then add hooks and compile",
    code="convert_to_float8_training(model)\nmodel.up.register_forward_hook(hook)\nmodel.up.compile()",
)
KEEP_SUBCLASSES = Treatment(
    name="keep-subclasses",
    summary="convert plain nn.Linear only, so that a subclass keeps its forward",
    code="convert_to_float8_training(model, module_filter_fn=lambda module, name: type(module) is nn.Linear)",
)


@check(
    "MOD011",
    "hooks-or-subclass-lost",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def hooks_or_subclass_lost(facts: Facts) -> Finding | NotApplicable | None:
    seen = facts.training.conversion
    if seen is None:
        return NotApplicable(reason="the conversion was not watched: only one that a model file runs can be")
    if not seen.linears:
        return NotApplicable(reason="no Linear was replaced by an FP8 layer while the model file was loaded")
    lost = {"hooks": seen.without_hooks, "own forward": seen.without_forward, "compile": seen.without_compile}
    names = [name for each in (*lost.values(), seen.bypassed) for name in each]
    if not names:
        return None
    told = [
        f"the conversion dropped the {what} of {plural(len(each), 'Linear')}"
        for what, each in lost.items()
        if each
    ]
    told += (
        [f"{plural(len(seen.bypassed), 'FP8 layer')} inside a compiled wrapper never called"]
        if seen.bypassed
        else []
    )
    classes = (
        f" ({', '.join(kind.rpartition('.')[2] for kind in seen.lost_forwards)})"
        if seen.without_forward
        else ""
    )
    return Finding(
        severity="error" if seen.bypassed else "warning",
        title="; ".join(told),
        explanation=f"{plural(seen.linears, 'Linear')} became FP8 layers while the model file was loaded; "
        f"what {len(set(names))} of them had{classes} was not carried over, and nobody put it back."
        + (
            " A wrapper that torch.compile made around a Linear goes on calling that Linear, in 16 bits."
            if seen.bypassed
            else ""
        ),
        evidence={
            "converted": seen.linears,
            "without_hooks": len(seen.without_hooks),
            "without_forward": len(seen.without_forward),
            "without_compile": len(seen.without_compile),
            "bypassed": len(seen.bypassed),
            "classes": seen.lost_forwards,
            "first": names[0],
        },
        treatment=KEEP_SUBCLASSES if seen.without_forward else CONVERT_FIRST,
    )


def _converted(*without_hooks: str) -> Facts:
    nothing = {
        "without_forward": (),
        "lost_forwards": (),
        "without_compile": (),
        "bypassed": (),
        "unfrozen": (),
        "untied": (),
    }
    conversion = Conversion(linears=8, without_hooks=without_hooks, **nothing)
    return Facts(network=Network(), training=Training(conversion=conversion))


SICK = _converted("up")
HEALTHY = _converted()
