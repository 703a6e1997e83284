"""Apply one printed fix to a script, in a fresh process, and observe what it does."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import textwrap
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.examine import examine
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.report import Report
from fp8doctor.trial import with_forward
from research.fixes.scripts import SCRIPTS, Script, wrapped

STEPS = 12
"""Training steps after which the loss must have fallen and every trained weight must have changed."""

FALLEN = 0.9
"""Largest last loss, as a share of the first, that counts as fallen. A convention of these tests."""

IN_PLACE_OF = {
    "forward": ("    output = model(",),
    "convert": ("convert_to_float8_training(", "quantize_(", "# leave out the conversion to FP8"),
    "prepare": ("accelerator.prepare(",),
    "accelerator": ("accelerator = Accelerator(",),
    "optimizer": ("\noptimizer = torch.optim",),
}
"""Part of a script -> lines of a fix that a user writes in its place, not at the end."""

RIGHT_AFTER = "# right after the conversion"
"""Comment of a fix whose lines a user writes there, before the model is wrapped."""

SERIOUS = ("error", "warning")

SAYS_SO = "parameters-without-optimizer"
"""The finding about weights that do not train, which a fix for another finding leaves as they are."""

OF_ITS_SIZE = ("SHP002", "gemms-too-small")
"""Findings that are true of layers as small as these once they really run in FP8."""

AFTER_WRAPPING = re.compile(r"# after \w+:\n")
"""What follows stands behind the wrapping, and the conversion in front of it is left out."""

LEFT_OUT = {"# leave out your own torch.compile": "compile"}
"""Comment of a fix -> the part of the script that a user then deletes."""

Effect = dict[str, Any]


def place_of(code: str) -> str:
    """Name the part of a script that a fix replaces; ``fix`` if a user writes it at the end."""
    marks = {} if AFTER_WRAPPING.search(code) else IN_PLACE_OF
    return next((part for part, lines in marks.items() if any(each in code for each in lines)), "fix")


def with_fix(script: Script, fix: Treatment | None) -> tuple[str, dict[str, str]]:
    """Return the script's text and its environment variables with a fix applied as printed."""
    parts, variables = script.parts(), dict(script.variables)
    if fix is not None and fix.kind == "shell":
        for line in fix.code.splitlines():
            verb, *names = shlex.split(line, comments=True) or [""]
            for each in names if verb in ("export", "unset") else ():
                name, _, value = each.partition("=")
                variables = {**variables, name: value} if verb == "export" else without(variables, name)
    elif fix is not None:
        parts |= {part: "" for comment, part in LEFT_OUT.items() if comment in fix.code}
        parts |= {"convert": ""} if AFTER_WRAPPING.search(fix.code) else {}
        late = RIGHT_AFTER in fix.code
        parts |= {"convert": f"{script.convert}\n{fix.code}"} if late else {place_of(fix.code): fix.code}
    text = "import torch\ntorch.manual_seed(0)\n" + "\n".join(
        f"{code}{FROZEN_NOW if name == 'wrap' else ''}" for name, code in parts.items()
    )
    forward = parts.get("forward", script.forward)
    step = TRAINING_STEP.format(textwrap.indent(forward.strip(), "    ")) if forward else ""
    return text + MODEL_FILE + step, variables


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {each: value for each, value in variables.items() if each != name}


FROZEN_NOW = "\nfrozen_before = [id(each) for each in model.parameters() if not each.requires_grad]\n"

MODEL_FILE = """
def build_model():
    return model, optimizer


def example_batch():
    return batch
"""


TRAINING_STEP = """

def training_step(model, batch):
{}
    return output.float().square().mean()
"""


def started(script: Script, fix: Treatment | None = None) -> Job:
    """Run the script up to its training loop, with a fix applied."""
    text, variables = with_fix(script, fix)
    os.environ.update(variables)
    with tempfile.TemporaryDirectory() as folder:  # of its own: the folder of a file is on sys.path
        file = Path(folder, "train.py")
        file.write_text(text)
        return load(str(file))


def facts_of(job: Job, script: Script) -> Facts:
    return msgspec.structs.replace(with_forward(job, examine(job)), assumed_gpu=script.gpu)


def frozen(job: Job) -> list[str]:
    """Return the names of parameters that do not train, without what wrappers put before them."""
    named = job.model.named_parameters(remove_duplicate=False)
    return sorted(
        re.sub(r"(?<![^.])(_orig_mod|module|base_layer)\.", "", name)
        for name, each in named
        if not each.requires_grad
    )


def trained(job: Job) -> dict[str, torch.Tensor]:
    """Copy every weight that trains, without the wrapper that holds it."""
    named = {
        name: each for name, each in job.model.named_parameters() if each.requires_grad and each.ndim > 1
    }
    inside = {name: getattr(each, "_tensor", getattr(each, "_data", each)) for name, each in named.items()}
    return {name: each.detach().clone() for name, each in inside.items()}


def learning(job: Job) -> dict[str, Any]:
    """Train, and return the first loss and the last, and the names of the weights that did not change."""
    before, losses = trained(job), []
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.training_step(job.model, job.batch) if job.training_step else job.model(**job.batch).loss
        loss.backward()
        job.optimizer.step()
        losses.append(loss.item())
    unchanged = [name for name, each in trained(job).items() if torch.equal(each, before[name])]
    return {"losses": [losses[0], losses[-1]], "unchanged": unchanged}


def found_in(report: Report) -> dict[str, str | None]:
    """Return the names of the findings, and their codes, with the severity of each."""
    return {key: each.severity for each in report.findings for key in (each.code, each.name)}


def printed(script: Script, explored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the findings of a script, and every fix that is printed for them.

    ``explored`` names treatments that the trial proposes by itself, whose lines are printed too.
    """
    job = started(script)
    facts = facts_of(job, script)
    report = Report.of(diagnose(facts))
    found: list[tuple[Treatment, tuple[str, ...]]] = [
        (each.treatment, (each.code, each.name)) for each in report.findings if each.treatment
    ]
    found += [(fix, ()) for name in explored if (fix := describe(name, facts))]
    fixes: dict[str, dict[str, Any]] = {}
    for fix, keys in found:
        new = {"name": fix.name, "code": fix.code, "kind": fix.kind, "for": [], "explored": False}
        one = fixes.setdefault(fix.code, new)
        one["for"] += keys
        one["explored"] |= not keys
    return {"codes": found_in(report), "fixes": list(fixes.values()), "frozen": frozen(job)}


def effect(script: Script, fix: Treatment) -> Effect:
    """Return what a fix did: the findings after it, what is frozen, and how the training went."""
    job = started(script, fix)
    report = Report.of(diagnose(facts_of(job, script)))
    with torch.compiler.set_stance("default" if torch.cuda.is_initialized() else "force_eager"):
        return {"codes": found_in(report), "frozen": frozen(job), **learning(job)}


def defects(effect: Effect, codes: Collection[str], *before: dict[str, Any]) -> list[str]:
    """Say what a fix for findings with these codes did wrong to scripts that were like this before.

    The first is the one that the fix was applied to, another the one that it was printed for.
    """
    if "raised" in effect:
        return [effect["raised"]]
    first, last = effect["losses"]
    found = [f"{code} is still found" for code in codes if code in effect["codes"]]
    for code, severity in effect["codes"].items():
        if code in OF_ITS_SIZE:
            continue
        if severity in SERIOUS and not any(each["codes"].get(code) in SERIOUS for each in before):
            found.append(f"{code} is new, {severity}")
    if effect["frozen"] != before[0]["frozen"]:
        found.append(f"frozen parameters: {len(before[0]['frozen'])} before, {len(effect['frozen'])} after")
    if not last < FALLEN * first:
        found.append(f"the loss does not fall: {first:.3f} at first, {last:.3f} after {STEPS} steps")
    if effect["unchanged"] and SAYS_SO not in effect["codes"]:
        found.append(f"{len(effect['unchanged'])} weights do not change, as {effect['unchanged'][0]}")
    return found


def answered(order: str) -> str:
    """Carry out an order, which is JSON: print for a script, or apply a fix to it; ``raised`` says what it
    raised."""
    name, how, first, *fix = json.loads(order)
    torch.set_num_threads(1)
    script = wrapped(SCRIPTS[name], how, first)
    try:
        answer = effect(script, Treatment(**fix[0])) if fix else printed(script)
    except BaseException as error:
        traceback.print_exc()
        answer = {"raised": f"{type(error).__name__}: {error}"}
    return json.dumps(answer)
