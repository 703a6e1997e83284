"""Apply one printed fix to a script, in a fresh process, and observe what it does."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8doctor.analysis.fp8_weights import trained_fp8_weights
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.examine import examine
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.report import Report
from fp8doctor.trial import with_calls, with_rows
from tests.fixes.scripts import SCRIPTS, Script, wrapped

STEPS = 100
"""Training steps after which the loss must have fallen."""

FALLEN = 0.9
"""Largest last loss, as a share of the first, that counts as fallen. A convention of these tests."""

IN_PLACE_OF = {
    "forward": ("    output = model(",),
    "convert": ("convert_to_float8_training(", "quantize_(", "# leave out the conversion to FP8"),
    "prepare": ("accelerator.prepare(",),
    "accelerator": ("accelerator = Accelerator(",),
    "optimizer": ("\noptimizer = torch.optim", "\noptimizer = AdamW8bit("),
}
"""Part of a script -> lines of a fix that a user writes in its place, not at the end."""

RIGHT_AFTER = "# right after the conversion"
"""Comment of a fix whose lines a user writes there, before the model is wrapped."""

LEFT_OUT = {"# leave out your own torch.compile": "compile"}
"""Comment of a fix -> the part of the script that a user then deletes."""

Effect = dict[str, Any]


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
        code = fix.code
        parts |= {part: "" for comment, part in LEFT_OUT.items() if comment in fix.code}
        part = next(
            (part for part, marks in IN_PLACE_OF.items() if any(each in fix.code for each in marks)), ""
        )
        if RIGHT_AFTER in fix.code:
            part, code = "convert", f"{script.convert}\n{fix.code}"
        parts |= {part or "fix": code}
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
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(text)
    try:
        return load(file.name)
    finally:
        Path(file.name).unlink()


def report_on(job: Job) -> Report:
    return Report.of(diagnose(with_rows(job, with_calls(job, examine(job)))))


def frozen(job: Job) -> list[str]:
    """Return the names of parameters that do not train, without what wrappers put before them."""
    named = job.model.named_parameters(remove_duplicate=False)
    return sorted(
        re.sub(r"(?<![^.])(_orig_mod|module|base_layer)\.", "", name)
        for name, each in named
        if not each.requires_grad
    )


def losses(job: Job) -> list[float]:
    """Train and return the first loss and the last."""
    found = []
    for _ in range(STEPS):
        job.optimizer.zero_grad()
        loss = job.training_step(job.model, job.batch) if job.training_step else job.model(**job.batch).loss
        loss.backward()
        job.optimizer.step()
        found.append(loss.item())
    return [found[0], found[-1]]


def printed(script: Script, explored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the findings of a script, and every fix that is printed for them.

    ``explored`` names treatments that the trial proposes by itself, whose lines are printed too.
    """
    job = started(script)
    facts = with_rows(job, with_calls(job, examine(job)))
    report = Report.of(diagnose(facts))
    found = [(each.treatment, each.code) for each in report.findings if each.treatment]
    found += [(fix, None) for name in explored if (fix := proposed(name, facts))]
    fixes: dict[str, dict[str, Any]] = {}
    for fix, code in found:
        new = {"name": fix.name, "code": fix.code, "kind": fix.kind, "for": [], "explored": False}
        one = fixes.setdefault(fix.code, new)
        one["for"] += [code] if code else []
        one["explored"] |= code is None
    return {
        "codes": [finding.code for finding in report.findings],
        "fixes": list(fixes.values()),
        "frozen": frozen(job),
    }


def proposed(name: str, facts: Facts) -> Treatment | None:
    """Return the lines of a treatment that no finding of an untimed script prints."""
    if name == "fp8-weights":
        return trained_fp8_weights(facts.network.linears, facts)
    return describe(name, facts)


def effect(script: Script, fix: Treatment) -> Effect:
    """Return what a fix did: the findings after it, what is frozen, and the losses of the training."""
    job = started(script, fix)
    report = report_on(job)
    with torch.compiler.set_stance("default" if torch.cuda.is_initialized() else "force_eager"):
        trained = losses(job)
    return {"codes": [each.code for each in report.findings], "frozen": frozen(job), "losses": trained}


def defects(effect: Effect, codes: list[str], frozen: list[str]) -> list[str]:
    """Say what a fix for findings with these codes did wrong."""
    if "raised" in effect:
        return [effect["raised"]]
    first, last = effect["losses"]
    found = [f"{code} is still found" for code in codes if code in effect["codes"]]
    if effect["frozen"] != frozen:
        found.append(f"frozen parameters: {len(frozen)} before, {len(effect['frozen'])} after")
    if not last < FALLEN * first:
        found.append(f"the loss does not fall: {first:.3f} at first, {last:.3f} after {STEPS} steps")
    return found


def answered(order: str) -> str:
    """Carry out an order, which is JSON: print for a script, or apply a fix to it; ``raised`` says what it
    raised."""
    name, how, *fix = json.loads(order)
    torch.set_num_threads(1)
    script = wrapped(SCRIPTS[name], how)
    assert script is not None
    try:
        answer = effect(script, Treatment(**fix[0])) if fix else printed(script)
    except BaseException as error:
        traceback.print_exc()
        answer = {"raised": f"{type(error).__name__}: {error}"}
    return json.dumps(answer)
