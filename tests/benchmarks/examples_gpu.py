"""The examples on one GPU, healthy and misconfigured:
``examples_gpu.py OUT [NAME ...] [--te FOLDER] [--part told|same] [--tiny]``

Part ``told`` runs each of the jobs below under ``fp8doctor run`` and keeps OUT/NAME.json, and in
OUT/NAME.txt what was printed. A healthy job may be told nothing that is a warning, a misconfigured
one has to be told one of its codes first. Part ``same`` trains some of them with deterministic
algorithms twice, with Python alone and under ``fp8doctor run``: losses and weights have to be the
same bits. FOLDER holds Transformer Engine, which only its own jobs may see. Jobs whose packages are
missing are left out, and the table says so. ``--tiny`` tries the script itself on a CPU. Prints
Markdown; exits with 1 when a job is told, or trains, otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.facts import recorded
from fp8doctor.report import load_report
from tests.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]

LONGEST_S = 180
"""Of a job, with its compilation and its report."""

BLOCKS = "--width 4096 --layers 6 --steps 40"
LLAMA = "--hidden 4096 --layers 4 --vocabulary 32000 --batch 4 --length 2048 --steps 40"
"""Sizes at which FP8 pays on an H200: 8192 tokens, GEMMs of 4096 and 16384."""

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
FP8_BY_TORCHAO, FP8_BY_TE = ({**FP8, "ACCELERATE_FP8_BACKEND": backend} for backend in ("AO", "TE"))
TRL = "trl.scripts.sft"


@dataclass(frozen=True)
class Job:
    """A script with its arguments, and what has to be told of it."""

    name: str
    command: str
    sizes: str
    first: tuple[str, ...] = ()
    """Codes of which one has to come first; none of a healthy job."""
    variables: dict[str, str] = field(default_factory=dict)
    needs: str = "torchao"


PLAIN = f"{BLOCKS} --vocabulary 32000 --batch 4 --length 2048"
SHARDED = f"{BLOCKS} --rows 8192"
JOBS = (
    Job("plain", "plain_loop.py", PLAIN),
    Job("plain_eager", "plain_loop.py --no-compile", PLAIN, ("CMP001",)),
    Job(
        "plain_small",
        "plain_loop.py",
        "--width 512 --layers 8 --vocabulary 32000 --batch 2 --length 256 --steps 40",
        ("SHP002", "SHP003", "STP001"),
    ),
    Job("trainer", "trainer.py --float8", LLAMA),
    Job("trainer_overridden", "trainer.py", LLAMA, ("ENV001",), FP8),
    Job("trainer_eager", "trainer.py --float8 --no-compile", LLAMA, ("CMP001",)),
    Job("trainer_fp8_ao", "trainer.py --no-bf16", LLAMA, ("MOD007",), FP8_BY_TORCHAO),
    Job("trainer_fp8_te", "trainer.py --no-bf16", LLAMA, (), FP8_BY_TE, "transformer_engine"),
    Job("trainer_overridden_ao", "trainer.py", LLAMA, ("ENV001",), FP8_BY_TORCHAO),
    Job("trainer_overridden_te", "trainer.py", LLAMA, ("ENV001",), FP8_BY_TE, "transformer_engine"),
    Job("te", "accelerate_te.py", LLAMA, needs="transformer_engine"),
    Job("te_overridden", "accelerate_te.py --precision bf16", LLAMA, ("ENV001",), FP8, "transformer_engine"),
    Job("te_checkpointed", "accelerate_te.py --checkpointing", LLAMA, ("CKP002",), {}, "transformer_engine"),
    Job("lora", "lora.py", LLAMA),
    Job("lora_adapters_too", "lora.py --adapters-too", LLAMA, ("SHP002",)),
    Job("lora_eager", "lora.py --no-compile", LLAMA, ("CMP001",)),
    Job("fsdp2", "fsdp2.py", SHARDED),
    Job("fsdp2_bf16_all_gather", "fsdp2.py --bf16-all-gather", SHARDED, ("DST001",)),
    Job("fsdp2_no_precompute", "fsdp2.py --no-precompute", SHARDED, ("DST002",)),
    Job("sft", "sft.py --float8", LLAMA, needs="trl"),
    Job("sft_overridden", "sft.py", LLAMA, ("ENV001",), FP8, "trl"),
    Job("foreign_trl", f"-m {TRL}", "", ("ENV001",), FP8, "trl"),
    Job("foreign_accelerate", "-m accelerate.test_utils.scripts.test_script", "", ("ENV001", "MOD001"), FP8),
)
SAME = ("plain", "trainer", "te", "lora", "fsdp2", "sft")

NARROW, SHORT = ["--width", "1024"], ["--hidden", "1024", "--length", "512"]
"""Sizes of part ``same``, whose weights are written to a disk."""

FOREIGN_DATA = """
import json, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from sft import tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM
folder, hidden, length = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
config = LlamaConfig(
    hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=4, vocab_size=8192, use_cache=False,
    num_attention_heads=max(1, hidden // 128), num_key_value_heads=max(1, hidden // 512),
    eos_token_id=1, pad_token_id=0, bos_token_id=None,
)
LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
tokenizer_of(8192).save_pretrained(folder / "model")
(folder / "data").mkdir()
rows = [{"text": " ".join(f"w{random.randrange(3, 8192)}" for _ in range(length))} for _ in range(160)]
(folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""
"""A model and a dataset of random numbers for TRL's own script, which reads both from a folder."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="jobs, all by default")
    parser.add_argument("--te", type=Path, help="folder that holds Transformer Engine")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", choices=("told", "same"))
    arguments = parser.parse_intermixed_args()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in JOBS if not arguments.names or job.name in arguments.names]
    packages = ("torch", "transformers", "accelerate", "peft", "torchao")
    print(f"{gpu()} · {machine(packages)}\n", flush=True)
    failed = False
    for part, table, among in (("told", told, JOBS), ("same", same, [j for j in JOBS if j.name in SAME])):
        if arguments.part not in (None, part):
            continue
        rows = []
        for job in (each for each in among if each in jobs):
            if missing(job, arguments.te):
                rows.append({"job": job.name, "held": f"not run: no {job.needs}"})
                continue
            rows.append({"job": job.name, **table(job, out, arguments)})
            print(f"{part} {rows[-1]}", file=sys.stderr, flush=True)
            failed |= rows[-1]["held"] == "NO"
            (out / f"{part}.md").write_text(tabulate(rows, headers="keys", tablefmt="github") + "\n")
        print(tabulate(rows, headers="keys", tablefmt="github") + "\n", flush=True)
    return int(failed)


def missing(job: Job, te: Path | None) -> bool:
    if job.needs == "transformer_engine" and te is not None:
        return False
    return importlib.util.find_spec(job.needs) is None


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def command(
    job: Job, work: Path, arguments: argparse.Namespace, *more: str
) -> tuple[list[str], dict[str, str]]:
    """What follows ``python`` or ``fp8doctor run``, and the environment."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if job.needs == "transformer_engine" and arguments.te is not None:
        paths.insert(1, str(arguments.te))
    cache = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "NO_COLOR": "1"}
    environment = {**os.environ, **cache, **job.variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    script, *switches = job.command.split()
    if script == "-m":
        words = [script, *switches]
        if switches == [TRL]:
            words += foreign_arguments(work, environment, arguments.tiny)
        return words, environment
    sizes = ["--steps", "20"] if arguments.tiny else job.sizes.split()
    return [str(ROOT / "examples" / script), *switches, *sizes, *more], environment


def foreign_arguments(work: Path, environment: dict[str, str], tiny: bool) -> list[str]:
    hidden, length = ("64", "16") if tiny else ("2048", "1024")
    subprocess.run(
        [sys.executable, "-c", FOREIGN_DATA, str(ROOT / "examples"), str(work), hidden, length],
        env=environment,
        check=True,
        stdout=sys.stderr,
        timeout=3600,
    )
    line = (
        f"--model_name_or_path {work}/model --dataset_name {work}/data --output_dir {work}/out "
        "--max_steps 30 --per_device_train_batch_size 4 --report_to none --save_strategy no --logging_steps 1"
    )
    return [*line.split(), *(["--use_cpu"] if tiny else [])]


def ran(
    words: list[str], environment: dict[str, str], work: Path, text: Path | None = None
) -> tuple[str, float, int]:
    """What a command printed on stdout, its seconds, its exit code."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        out, err, code = "", f"not done after {LONGEST_S} s: {late}", -1
    if code:
        print(f"{' '.join(words)}\n{out[-1500:]}\n{err[-3000:]}", file=sys.stderr, flush=True)
    if text is not None:
        text.write_text(f"$ {' '.join(words)}\n{out[-20000:]}\n{err[-20000:]}\n")
    return out, time.monotonic() - began, code


def told(job: Job, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the job under fp8doctor, and compare what it was told with what it has to be told."""
    work, report = out.parent / f"{out.name}_work" / job.name, out / f"{job.name}.json"
    work.mkdir(parents=True)
    words, environment = command(job, work, arguments)
    ours = ["-m", "fp8doctor", "run", "--save", str(report)]
    _, seconds, code = ran([*ours, *words], environment, work, out / f"{job.name}.txt")
    if not report.exists():
        return {"s": round(seconds), "exit": code, "held": "NO"}
    document = load_report(report)
    grave = [each.code for each in document.findings if each.severity != "info"]
    others = [each.code for each in document.findings if each.severity == "info"]
    steps = sorted(document.facts.observed.steps_ms) if recorded(document.facts, "observed") else []
    order = [step.code for step in document.prescription if step.code in grave] or grave or others
    held = bool(order and order[0] in job.first) if job.first else not grave
    return {
        "s": round(seconds),
        "exit": code,
        "step ms": round(steps[len(steps) // 2], 2) if steps else None,
        "first": order[0] if order else "-",
        "all": " ".join(grave + [f"({each})" for each in others]),
        "wanted": " or ".join(job.first) or "nothing",
        "verdict": document.verdict.status,
        "held": "yes" if held and code == 0 else "NO",
    }


def same(job: Job, out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with and without fp8doctor, deterministic, and compare losses and weights."""
    found = []
    for name, ours in (("plain", []), ("watched", ["-m", "fp8doctor", "run", "-o", "report.txt"])):
        work = out.parent / f"{out.name}_work" / f"{job.name}_{name}"
        work.mkdir(parents=True)
        smaller = [] if arguments.tiny else NARROW if "--width" in job.sizes else SHORT
        switches = ("--deterministic", "--output", "weights.pt")
        words, environment = command(job, work, arguments, *smaller, *switches)
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        printed, seconds, code = ran([*ours, *words], environment, work)
        losses = [line for line in printed.splitlines() if line.startswith("loss ")]
        weights = work / "weights.pt"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else str(code)
        weights.unlink(missing_ok=True)
        found.append((losses, printed, digest, code, seconds))
    (losses, printed, digest, code, _), (_, our_printed, our_digest, our_code, _) = found
    printed, our_printed = without_times(printed), without_times(our_printed)
    compared = bool(losses) and (printed, digest, code) == (our_printed, our_digest, our_code) and code == 0
    return {
        "losses": len(losses),
        "stdout": "same" if printed == our_printed else "differs",
        "weights": digest[:12],
        "weights under run": our_digest[:12],
        "s": " + ".join(f"{each[-1]:.0f}" for each in found),
        "held": "yes" if compared else "NO",
    }


def without_times(printed: str) -> str:
    """Leave out the lines in which a Trainer tells how fast it was."""
    return "".join(line for line in printed.splitlines(True) if "_per_second" not in line)


if __name__ == "__main__":
    sys.exit(main())
