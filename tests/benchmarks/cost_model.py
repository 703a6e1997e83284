"""The modelled step held to steps measured on an H200, beside torchao's own roofline: ``python
tests/benchmarks/cost_model.py [FOLDER...]``

Prints Markdown. Every row of measured/h200_steps.json: its time, and its ratio to compiled BF16 of the same
job, as modelled by `fp8doctor.cost.step` and by ``torchao.testing.training.roofline_utils``. Tables 2.1 and
2.2 have bounds (`BOUND`, right sign, nearer than torchao); the others are shown. Then the reports of timed
models in FOLDERs (tests/patients/recorded, and recorded/ beside this file): what a user without a GPU would
have been told of each (`fp8doctor.analysis.modelled_speedup`) beside what its trial measured (bound: by how
much it says that it may be off), the time of each arm, and, where arms were profiled, its GEMMs and what runs
between them. A trial that calls its own times unreliable holds nothing. `CALIBRATED` names those that
constants come from.

torchao knows GEMMs and casts of Linears alone, no H200, and no difference between eager and compiled but
fusion. It is given its H100 with the H200's bandwidth, and fusion for compiled arms. So its errors are given
for the rows that it has something to say about, too: compiled FP8 without checkpointing.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.analysis.even import EVEN
from fp8doctor.analysis.modelled_speedup import OFF, modelled_speedup
from fp8doctor.cost import GpuSpec, gemm, gemm_ms, gpu_spec
from fp8doctor.cost.step import in_bf16, modelled_step, with_linears_compiled, with_recipe
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.diagnosis.expected_verdict import is_what_it_seems
from fp8doctor.facts import NOT_RECORDED, Arm, Blocks, Facts, Linear, Network, Workload, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured" / "h200_steps.json"
SWEEP = HERE / "measured" / "h200_sweep.json"
PATIENTS, JOBS = HERE.parent / "patients" / "recorded", HERE / "recorded"
"""Trials of patients, and of the jobs of `trial_jobs.py`, which no constant comes from."""

BOUND = 0.35
"""Largest error of time and ratio, as a share."""

BOUNDED = ("2.1", "2.2")
"""Tables that the bound holds for."""


CALIBRATED = (
    "decoder_468m",
    "decoder_468m_compiled",
    "llama_8b_float8",
    "llama_8b_lora_r32",
    "llama_8b_lora_r8",
    "lora_fp32",
    "te_checkpointed_inside",
    "vit_large",
)
"""Recorded patients of whose times some went into constants of `fp8doctor.cost`. The others are held out."""


@dataclass(frozen=True)
class Row:
    """One measured arm, with what was modelled of it."""

    table: str
    job: str
    arm: str
    ms: float
    modelled_ms: float
    ratio: float
    """Compiled BF16 / this arm, as measured."""
    modelled_ratio: float
    torchao_ratio: float
    torchao_says_something: bool

    @property
    def is_baseline(self) -> bool:
        return self.arm == "BF16 compiled"

    @property
    def is_even(self) -> bool:
        """Within what the verdict calls even, and what the same job differs by from one day to the next."""
        return abs(self.ratio - 1) < EVEN

    @property
    def right_sign(self) -> bool:
        return (self.ratio > 1) == (self.modelled_ratio > 1)

    @property
    def time_error(self) -> float:
        return self.modelled_ms / self.ms - 1

    @property
    def error(self) -> float:
        return self.modelled_ratio / self.ratio - 1

    @property
    def torchao_error(self) -> float:
        return self.torchao_ratio / self.ratio - 1


def measured_steps() -> list[dict[str, Any]]:
    """The rows as they are recorded."""
    steps: list[dict[str, Any]] = json.loads(MEASURED.read_text("utf-8"))["steps"]
    return steps


def facts_of(step: dict[str, Any]) -> Facts:
    """What examining the job of a row would find, as far as the cost model reads it."""
    return job(json.loads(MEASURED.read_text("utf-8"))["models"][step["model"]], step)


def rows() -> list[Row]:
    """Every measured step, with what was modelled of it."""
    measured = json.loads(MEASURED.read_text("utf-8"))
    jobs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for step in measured["steps"]:
        jobs.setdefault(
            (
                step["table"],
                step["model"],
                step["layers"],
                step["batch"],
                step["sequence"],
                step.get("lora_rank"),
            ),
            [],
        ).append(step)
    gpu = gpu_spec(measured["gpu"])
    found = []
    for (table, name, layers, batch, length, rank), steps in jobs.items():
        model = measured["models"][name]
        modelled, roofline = {}, {}
        for step in steps:
            facts = job(model, step)
            one = modelled_step(facts, gpu, loss=model["loss"])
            assert one is not None
            modelled[step["arm"]], roofline[step["arm"]] = one.step_ms, torchao_ms(facts)
        base = next(step for step in steps if step["arm"] == "BF16 compiled")
        label = f"{name}, {layers} layers, {batch} x {length}" + (f", LoRA {rank}" if rank else "")
        for step in steps:
            arm = step["arm"]
            found.append(
                Row(
                    table,
                    label,
                    arm,
                    step["ms"],
                    modelled[arm],
                    base["ms"] / step["ms"],
                    modelled[base["arm"]] / modelled[arm],
                    roofline[base["arm"]] / roofline[arm],
                    step["compiled"]
                    and step["fp8"] in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
                    and not step["checkpointing"],
                )
            )
    return found


def job(model: dict[str, Any], step: dict[str, Any]) -> Facts:
    """A measured step as the facts that examining its model gives, as far as the cost model reads them."""
    width, hidden, key = model["width"], model["hidden"], model["kv_heads"] * model["head_dim"]
    shapes = {
        "q_proj": (width, width),
        "k_proj": (width, key),
        "v_proj": (width, key),
        "o_proj": (width, width),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    rank, fp8 = step.get("lora_rank"), step["fp8"]
    te = fp8 == "delayed"
    linears = []
    for layer in range(step["layers"]):
        for name, (k, n) in shapes.items():
            path = f"layers.{layer}.{name}"
            skipped = step.get("without_ends") and not linears
            common = {
                "compiled": f"layers.{layer}" if step["compiled"] else None,
                "checkpointed": f"layers.{layer}" if step["checkpointing"] else None,
            }
            common |= {"features": {}, "gemms": 1, "role": "body"}
            linears.append(
                Linear(
                    name=f"{path}.base_layer" if rank else path,
                    in_features=k,
                    out_features=n,
                    requires_grad=not rank,
                    dtype="bfloat16",
                    adapter="base" if rank else None,
                    **in_precision(None if skipped else fp8),
                    **common,
                )
            )
            for adapter, (a, b) in {"lora_A": (k, rank), "lora_B": (rank, n)}.items() if rank else ():
                linears.append(
                    Linear(
                        name=f"{path}.{adapter}.default",
                        in_features=a,
                        out_features=b,
                        requires_grad=True,
                        dtype="float32",
                        adapter="adapter",
                        **in_precision(None),
                        **common,
                    )
                )
    body = sum(linear.in_features * linear.out_features for linear in linears if linear.requires_grad)
    words = model["vocabulary"] * width
    trained = body if rank else body + words * (1 if model["tied"] else 2)
    head = Linear(
        name="lm_head",
        in_features=width,
        out_features=model["vocabulary"],
        gemms=1,
        role="head",
        requires_grad=not rank,
        dtype="bfloat16",
        adapter=None,
        compiled=None,
        checkpointed=None,
        features={},
        **in_precision(fp8 if te else None),
    )
    return Facts(
        network=Network(
            linears=(*linears, head),
            trainable_parameters=trained,
            vocabulary=model["vocabulary"],
            blocks=(Blocks(name="layers", kind=model["block"]),),
        ),
        workload=Workload(
            tokens=step["batch"] * step["sequence"], sequence_length=step["sequence"], accumulate=1
        ),
    )


def in_precision(recipe: str | None) -> dict[str, Any]:
    if recipe is None:
        return {"use": "none", "stack": "torch", "recipe": None}
    return {
        "use": "training",
        "stack": "transformer_engine" if recipe == "delayed" else "torchao",
        "recipe": recipe,
    }


def torchao_gpu() -> str:
    """torchao's H100 with the H200's bandwidth, under the H200's name."""
    from torchao.testing.training import roofline_utils as roofline

    roofline.gpu_name_to_specs.setdefault(
        "NVIDIA H200", roofline.gpu_name_to_specs["NVIDIA H100"] | {"peak_mem_bw_bytes_sec": 4.8e12}
    )
    return "NVIDIA H200"


def torchao_ms(facts: Facts) -> float:
    """The GEMMs and casts of all Linears as torchao's roofline estimates them."""
    return sum(
        torchao_layer_ms(
            facts.workload.tokens,
            linear.in_features,
            linear.out_features,
            linear.recipe,
            linear.compiled is not None,
        )
        for linear in facts.network.linears
    )


@functools.cache
def torchao_layer_ms(tokens: int, inner: int, outer: int, recipe: str | None, fused: bool) -> float:
    """The GEMMs and casts of one Linear, in 2 ms of sympy."""
    import torch
    from torchao.testing.training import roofline_utils as roofline

    gpu, shape = torchao_gpu(), (tokens, inner, outer)
    dtype = torch.float8_e4m3fn if recipe else torch.bfloat16
    recipe = "tensorwise" if recipe == "delayed" else recipe
    seconds = float(roofline.get_gemm_time_sympy(*shape, dtype, recipe, None, gpu))
    if recipe:
        seconds += float(roofline.get_float8_mem_sympy(*shape, recipe, None, fused, gpu))
    return 1e3 * seconds


def swept() -> dict[str, Any]:
    """The recorded sweep of `gemm_sweep.py`."""
    sweep: dict[str, Any] = json.loads(SWEEP.read_text("utf-8"))
    return sweep


def gemm_rows(sweep: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, int, int], float]]:
    """Kind, role, (M, K, N) of the GEMM itself, and ms, of every GEMM that was swept."""
    for kind, role, m, k, n, ms in sweep["gemms"]:
        yield (
            kind,
            role,
            {"output": (m, k, n), "input_gradient": (m, n, k), "weight_gradient": (k, m, n)}[role],
            ms,
        )


def gemm_errors(sweep: dict[str, Any], gpu: GpuSpec) -> list[tuple[str, int, float, float]]:
    """What they are, how many, and the mean error of the model's time and of torchao's."""
    import torch
    from torchao.testing.training import roofline_utils as roofline

    errors: dict[str, list[tuple[float, float]]] = {}
    for kind, role, shape, ms in gemm_rows(sweep):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
        theirs = 1e3 * float(roofline.get_individual_gemm_time_sympy(*shape, dtype, None, torchao_gpu()))
        ours = gemm_ms(*shape, gpu, fp8=kind != "bf16", pace=gemm.BACK_TO_BACK) or theirs
        size = "narrow" if min(shape) < 256 else "under 0.05 ms" if ms < 0.05 else "larger"
        pair = abs(ours / ms - 1), abs(theirs / ms - 1)
        for label in (f"{kind}, {size}", f"{kind}, {role}", "all"):
            errors.setdefault(label, []).append(pair)
    return [
        (label, len(pairs), *(statistics.mean(each) for each in zip(*pairs, strict=True)))
        for label, pairs in sorted(errors.items())
    ]


@dataclass(frozen=True)
class Recorded:
    """One arm of a trial that was recorded on an H200, and the same modelled from the facts of that
    recording."""

    patient: str
    arm: str
    ms: float
    modelled_ms: float
    gemms: tuple[float, float] | None
    """Measured and modelled; None where the arm was not profiled."""
    between: tuple[float, float] | None
    """The same of casts, loss and what else is neither GEMM nor attention nor optimizer: compiled, casts are
    fused with it."""

    @property
    def error(self) -> float:
        return self.modelled_ms / self.ms - 1

    @property
    def use(self) -> str:
        return use(self.patient)


@dataclass(frozen=True)
class Told:
    """Best BF16 / FP8 as it is: what the trial measured, and what would have been told without it."""

    patient: str
    measured: float
    modelled: float | None
    """None where nothing would have been told."""
    may_be_off: float
    """Share that was said with it, the bound of its error."""
    reliable: bool
    """Whether the trial relied on its own times; one that did not holds nothing."""

    @property
    def use(self) -> str:
        return use(self.patient)

    @property
    def is_held(self) -> bool:
        return self.modelled is not None and self.reliable

    @property
    def error(self) -> float:
        return (self.modelled or 0.0) / self.measured - 1

    @property
    def sign(self) -> str:
        """Whether faster and slower were told apart: ``even`` beside one that is, ``untold`` where what was
        told is closer to 1 than it may be off."""
        if self.modelled is None:
            return ""
        if abs(self.measured - 1) < EVEN:
            return "even"
        if (self.measured > 1) == (self.modelled > 1):
            return "right"
        return "untold" if abs(self.modelled - 1) < self.may_be_off else "wrong"

    @property
    def is_missed(self) -> bool:
        return self.is_held and (abs(self.error) > self.may_be_off or self.sign == "wrong")


def use(patient: str) -> str:
    """What the patient is to the constants."""
    return "calibrated" if patient in CALIBRATED else "held out"


GEMMS = ("gemm_fp8", "gemm_16bit", "gemm_fp32")
BETWEEN = ("cast", "pointwise", "norm", "copy", "loss")
"""Families of `fp8doctor.facts.Breakdown`."""


def reports(folders: Sequence[Path]) -> Iterator[tuple[str, Facts, dict[str, Arm]]]:
    """Every timed model of the folders: its name, its facts, and the arms that were timed."""
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        if "facts" not in json.loads(path.read_bytes()):
            continue
        facts = read_saved(path)[0]
        if recorded(facts, "trial.arms") and facts.trial.gpu and "H200" in facts.trial.gpu:
            yield (
                f"{'job ' if path.parent == JOBS else ''}{path.stem.removeprefix('h200-')}",
                facts,
                {arm.name: arm for arm in facts.trial.arms if arm.tried and arm.step_ms},
            )


def recorded_arms(folders: Sequence[Path] = (PATIENTS, JOBS)) -> Iterator[Recorded]:
    """The arms that are variants of the whole model, where the model has a number for them."""
    for patient, facts, arms in reports(folders):
        for arm in arms.values():
            variant = as_facts(facts, arm)
            one = modelled_step(variant, gpu_spec("H200")) if variant else None
            if one is None or not arm.step_ms:
                continue
            parts = arm.breakdown.families_ms if recorded(arm, "breakdown") and arm.breakdown else None
            gemms, between = (
                (
                    sum(parts.get(each, 0.0) for each in names),
                    sum(one.families_ms.get(each, 0.0) for each in names),
                )
                if parts
                else None
                for names in (GEMMS, BETWEEN)
            )
            yield Recorded(patient, arm.name, arm.step_ms, one.step_ms, gemms, between)


def told(folders: Sequence[Path] = (PATIENTS, JOBS)) -> Iterator[Told]:
    """Every timed model with FP8, without what its trial found."""
    for patient, facts, arms in reports(folders):
        best = min((arms[name].step_ms or 0.0 for name in BF16_BASELINES if name in arms), default=None)
        if (
            best is None
            or "as_is" not in arms
            or all(linear.use != "training" for linear in facts.network.linears)
        ):
            continue
        untimed = without_trial(facts)
        says = modelled_speedup(untimed) if is_what_it_seems(diagnose(untimed).findings) else None
        yield Told(
            patient,
            best / (arms["as_is"].step_ms or 0.0),
            says and says.as_is,
            says.may_be_off if says else OFF,
            facts.trial.reliable,
        )


def without_trial(facts: Facts) -> Facts:
    """Take out what was timed, but not the rows that the trial counted: without one a forward on fake tensors
    counts them."""
    rows = facts.trial.rows if recorded(facts, "trial.rows") else {}
    workload = facts.workload if recorded(facts, "workload.rows") else replace(facts.workload, rows=rows)
    return replace(facts, trial=NOT_RECORDED, workload=workload)


COMPILED_BY = {"compile-blocks", "compile-layers"}
"""Treatments after which every Linear but the head is compiled."""


def as_facts(facts: Facts, arm: Arm) -> Facts | None:
    """What the arm ran; None for arms whose change the facts cannot express."""
    if arm.name == "as_is":
        return facts
    if arm.name in ("bf16", "bf16_compiled"):
        return with_linears_compiled(in_bf16(facts), yes=arm.name == "bf16_compiled")
    recipes = {
        "recipe-tensorwise": "tensorwise",
        "recipe-rowwise": "rowwise",
        "recipe-rowwise-with-gw-hp": "rowwise_with_gw_hp",
    }
    treatments = set(arm.treatments)
    for base in facts.trial.arms:
        treatments |= set(base.treatments) if base.name == arm.base else set()
    if not treatments or not treatments <= {*recipes, *COMPILED_BY}:
        return None
    if treatments & COMPILED_BY:
        facts = with_linears_compiled(facts, yes=True)
    for name in treatments & recipes.keys():
        facts = with_recipe(facts, recipes[name])
    return facts


def sign(row: Row) -> str:
    """Whether faster and slower are told apart; a row that is even has no sign to get right."""
    if row.is_baseline:
        return ""
    return ("right" if row.right_sign else "wrong") + (" (even)" if row.is_even else "")


def mean(errors: Iterator[float]) -> float:
    return statistics.mean(abs(error) for error in errors)


def percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def main() -> int:
    """Print the tables; 1 when a bound is missed."""
    every = rows()
    missed = []
    for table in dict.fromkeys(row.table for row in every):
        here = [row for row in every if row.table == table]
        print(f"\n## Table {table}\n")
        header = (
            "job",
            "arm",
            "ms",
            "modelled",
            "error",
            "ratio",
            "modelled",
            "error",
            "sign",
            "torchao",
            "error",
        )
        cells = [
            (
                row.job,
                row.arm,
                f"{row.ms:.1f}",
                f"{row.modelled_ms:.1f}",
                percent(row.time_error),
                f"{row.ratio:.2f}",
                f"{row.modelled_ratio:.2f}",
                "" if row.is_baseline else percent(row.error),
                sign(row),
                f"{row.torchao_ratio:.2f}",
                "" if row.is_baseline else percent(row.torchao_error),
            )
            for row in here
        ]
        print(tabulate(cells, header, tablefmt="github", disable_numparse=True))
    print("\n## Mean error of the ratio\n")
    lines = []
    for label, chosen in (
        ("2.1 and 2.2", [row for row in every if row.table in BOUNDED]),
        ("the others", [row for row in every if row.table not in BOUNDED]),
    ):
        held = [row for row in chosen if not row.is_baseline]
        modest = [row for row in held if row.torchao_says_something]
        for what, some in ((f"{label}, every arm", held), (f"{label}, compiled torchao arms", modest)):
            ours, theirs = mean(row.error for row in some), mean(row.torchao_error for row in some)
            signs = (
                sum(row.right_sign for row in some),
                sum((row.ratio > 1) == (row.torchao_ratio > 1) for row in some),
            )
            lines.append(
                (
                    what,
                    len(some),
                    f"{100 * ours:.1f} %",
                    f"{signs[0]} of {len(some)}",
                    f"{100 * theirs:.1f} %",
                    f"{signs[1]} of {len(some)}",
                )
            )
            if label == "2.1 and 2.2" and ours >= theirs:
                missed.append(f"{what}: torchao is nearer")
        if label == "2.1 and 2.2":
            missed += [
                f"{row.job} {row.arm}: {percent(row.error)}"
                for row in held
                if abs(row.error) > BOUND or not (row.right_sign or row.is_even)
            ]
            missed += [
                f"{row.job} {row.arm}: time {percent(row.time_error)}"
                for row in chosen
                if abs(row.time_error) > BOUND
            ]
    print(
        tabulate(
            lines,
            ("rows", "count", "fp8doctor", "right sign", "torchao", "right sign"),
            tablefmt="github",
            disable_numparse=True,
        )
    )
    folders = tuple(map(Path, sys.argv[1:])) or (PATIENTS, JOBS)
    said = list(told(folders))
    print_told(said)
    missed += [f"{row.patient}: told {percent(row.error)}" for row in said if row.is_missed]
    print_arms(list(recorded_arms(folders)))
    print("\n## Mean error of a GEMM's time\n")
    lines = [
        (label, count, f"{100 * ours:.0f} %", f"{100 * theirs:.0f} %")
        for label, count, ours, theirs in gemm_errors(swept(), gpu_spec("H200"))
    ]
    print(
        tabulate(lines, ("GEMMs", "count", "fp8doctor", "torchao"), tablefmt="github", disable_numparse=True)
    )
    print("\n" + (f"Missed: {'; '.join(missed)}" if missed else "Every bound held."))
    return bool(missed)


def print_told(rows: list[Told]) -> None:
    """Best BF16 / FP8 as it is, per patient."""
    print("\n## Best BF16 / FP8 as it is, of recorded patients\n")
    cells = [
        (
            row.patient,
            row.use,
            f"{row.measured:.3f}",
            f"{row.modelled:.3f}" if row.modelled else "nothing",
            percent(row.error) if row.modelled else "",
            percent(row.may_be_off).lstrip("+") if row.modelled else "",
            row.sign if row.reliable else "the trial is unreliable",
        )
        for row in rows
    ]
    print(
        tabulate(
            cells,
            ("patient", "use", "measured", "told", "error", "may be off by", "sign"),
            tablefmt="github",
            disable_numparse=True,
        )
    )
    print()
    for label in ("calibrated", "held out"):
        some = [row for row in rows if row.is_held and row.use == label]
        errors = [abs(row.error) for row in some]
        right = sum(row.sign in ("right", "even") for row in some)
        print(
            f"Told and {label}: {len(some)}, error in the median {100 * statistics.median(errors):.1f} %, "
            f"in the mean {100 * statistics.mean(errors):.1f} %, at most {100 * max(errors):.0f} %; "
            f"sign right or even: {right}.\n"
        )


def print_arms(arms: list[Recorded]) -> None:
    """Time, GEMMs and what lies between, per arm."""
    print("\n## Arms of recorded trials (ms)\n")
    cells = [
        (
            a.patient,
            a.arm,
            a.use,
            f"{a.ms:.1f}",
            f"{a.modelled_ms:.1f}",
            percent(a.error),
            *pair(a.gemms),
            *pair(a.between),
        )
        for a in arms
    ]
    header = (
        "patient",
        "arm",
        "use",
        "step",
        "modelled",
        "error",
        "GEMMs",
        "modelled",
        "error",
        "casts, pointwise, loss",
        "modelled",
        "error",
    )
    print(tabulate(cells, header, tablefmt="github", disable_numparse=True))
    for label in ("calibrated", "held out"):
        some = [each for each in arms if each.use == label]
        times = {
            "step": [(each.ms, each.modelled_ms) for each in some],
            "GEMMs": [each.gemms for each in some if each.gemms],
            "casts, pointwise, loss": [each.between for each in some if each.between],
        }
        errors = {
            what: [abs(modelled / ms - 1) for ms, modelled in pairs if ms] for what, pairs in times.items()
        }
        said = "; ".join(
            f"{what}: {100 * statistics.median(found):.1f} % over {len(found)}"
            for what, found in errors.items()
            if found
        )
        print(f"\nMedian error, {label}: {said}.")


def pair(times: tuple[float, float] | None) -> tuple[str, str, str]:
    return (
        (f"{times[0]:.1f}", f"{times[1]:.1f}", percent(times[1] / times[0] - 1))
        if times and times[0]
        else ("", "", "")
    )


if __name__ == "__main__":
    sys.exit(main())
