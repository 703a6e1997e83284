"""The conversion dropped hooks, a forward or a compile

What it finds. When FP8 layers replaced your Linears, their hooks, forward or compile were lost.

Why it matters. A converter creates a new layer with the old weight and leaves the rest behind, without a
warning. That includes forward and backward hooks (logging, activation scaling, offloading), and the forward
of your own nn.Linear subclass (scaling, a fused bias, LoRA). It also includes `linear.compile()`, without
which that layer's casts are not compiled. `torch.compile(linear)` is worse: the wrapper keeps calling the old
Linear, and the FP8 layer never runs. The model computes something else, or the same more slowly.

Fix. Convert first, then add hooks and compile. Keep layers with their own forward out (torchao 0.18).

    model.up.compile()                 # before: the conversion drops it
    convert_to_float8_training(model)

    from torch import nn
    from torchao.float8 import convert_to_float8_training
    keep = lambda module, name: type(module) is nn.Linear  # after: subclasses stay
    convert_to_float8_training(model, module_filter_fn=keep)
    model.up.compile()

When to ignore it. If you no longer need the hooks, or your forward did the same as nn.Linear's.

How it is detected, and limits. fp8doctor watches the conversion while it loads your model file, and compares
each replaced Linear with its FP8 layer. Other ways of loading are not covered.

References. torchao 0.18 `Float8Linear.from_float` and accelerate 1.15 `convert_model` take over weight and
bias only. https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from __future__ import annotations

from fp8doctor.diagnosis.treatments import convert_again
from fp8doctor.facts import Conversion, Facts, Network, Training
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

CONVERT_FIRST = Treatment(
    name="convert-first",
    summary="convert first, then add hooks and compile",
    code="convert_to_float8_training(model)\nmodel.up.register_forward_hook(hook)\nmodel.up.compile()",
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
        return NotApplicable(reason="fp8doctor sees a conversion only while it loads a model file")
    if not seen.linears:
        return NotApplicable(reason="no Linear was replaced by an FP8 layer while the model file was loaded")
    lost = {"hooks": seen.without_hooks, "own forward": seen.without_forward, "compile": seen.without_compile}
    names = [name for each in (*lost.values(), seen.bypassed) for name in each]
    if not names:
        return None
    said = [
        f"the conversion dropped the {what} of {plural(len(each), 'Linear')}"
        for what, each in lost.items()
        if each
    ]
    if seen.bypassed:
        said.append(f"{plural(len(seen.bypassed), 'FP8 layer')} inside a compiled wrapper never called")
    classes = (
        f" ({', '.join(kind.rpartition('.')[2] for kind in seen.lost_forwards)})"
        if seen.without_forward
        else ""
    )
    return Finding(
        severity="error" if seen.bypassed else "warning",
        title="; ".join(said),
        explanation=f"{plural(seen.linears, 'Linear')} became FP8 layers while the model file was loaded. "
        f"{len(set(names))} of them{classes} lost something that nobody put back."
        + (
            " A torch.compile wrapper around a Linear keeps calling that Linear, in 16 bits."
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
        treatment=keep_subclasses(facts) if seen.without_forward else CONVERT_FIRST,
    )


def keep_subclasses(facts: Facts) -> Treatment:
    """Convert plain Linears only, and leave out what the script leaves out now."""
    return Treatment(
        name="keep-subclasses",
        summary="convert plain nn.Linear only, so a subclass keeps its forward",
        code=convert_again(facts, only="type(layer) is nn.Linear"),
    )


def _converted(*without_hooks: str) -> Facts:
    lost = "without_forward lost_forwards without_compile bypassed unfrozen untied".split()
    conversion = Conversion(linears=8, without_hooks=without_hooks, **dict.fromkeys(lost, ()))
    return Facts(network=Network(), training=Training(conversion=conversion))


FIRES = _converted("up")
SILENT = _converted()
