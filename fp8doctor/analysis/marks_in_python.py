"""The lines that change what a user's own compile marks compile."""

from __future__ import annotations

from fp8doctor.analysis.layers import in_its_place, in_python
from fp8doctor.analysis.names_in_python import names_in_python
from fp8doctor.facts import CompileMark, Network

OF_THE_SOURCE = {
    "decorated_forward": "@torch.compile",
    "training_step": "training_step = torch.compile(training_step)",
}
"""Lines of marks that are no line about a module of their own."""


def unwrapped(marks: tuple[CompileMark, ...], network: Network) -> str:
    """Write the lines that take the wrappers off what has no forward of its own."""
    names = [mark.name for mark in marks if mark.form == "wrapped"]
    if len(names) == 1:
        module = in_python(names[0], network)
        return in_its_place(names[0], "{}._orig_mod", network) + f"   # or without torch.compile({module})"
    model = in_python("", network)
    return (
        f"for name in {' | '.join(names_in_python(names))}:   # or without torch.compile around them\n"
        f"    {model}.set_submodule(name, {model}.get_submodule(name)._orig_mod)"
    )


def without_backend(bare: tuple[CompileMark, ...], network: Network) -> str:
    """Write the lines that compile these as the user does, but for the backend."""
    forms: dict[str, list[str]] = {}
    for mark in bare:
        forms.setdefault(mark.form, []).append(mark.name)
    lines = "\n".join(_compiled_again(form, names, network) for form, names in forms.items())
    return f"{lines}   # without backend={bare[0].backend!r}"


def _compiled_again(form: str, names: list[str], network: Network) -> str:
    """Write the lines that compile these modules in one form; a loop where there are several."""
    if form in OF_THE_SOURCE:
        return OF_THE_SOURCE[form]
    if len(names) == 1:
        module = in_python(names[0], network)
        return {
            "wrapped": in_its_place(names[0], "torch.compile({})", network),
            "assigned_forward": f"{module}.forward = torch.compile({module}.forward)",
        }.get(form, f"{module}.compile()")
    model = in_python("", network)
    return f"for name in {' | '.join(names_in_python(names))}:\n    " + {
        "wrapped": f"{model}.set_submodule(name, torch.compile({model}.get_submodule(name)))",
        "assigned_forward": f"module = {model}.get_submodule(name)\n"
        "    module.forward = torch.compile(module.forward)",
    }.get(form, f"{model}.get_submodule(name).compile()")
