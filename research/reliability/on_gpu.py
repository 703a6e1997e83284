"""Inspect patients in this process on a GPU and compare every bit of them before and after:
``python -m research.reliability.on_gpu FILE [PATIENT ...]``

Each patient runs in a process of its own, takes one real training step with an AdamW of its own, keeps the
gradients of a second one, and is inspected with a trial. What is compared is read without fp8doctor: BLAKE2
digests of parameters, buffers, gradients, the optimizer's state and settings, the batch, what Transformer
Engine keeps at its modules, and the random states. Two more inspections have a training step that steps that
very optimizer: they show that the digests would change, or that the step was refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESEARCH = Path(__file__).parents[1]

NAMES = (
    "decoder_468m",
    "decoder_454m_compiled",
    "vit",
    "lora",
    "lora_fp32",
    "encoder_decoder",
    "gpu/fp32_matmul",
    "gpu/trained_decoder",
    "gpu/te_autocast",
    "gpu/te_fused",
    "gpu/te_transformer",
    "gpu/accelerate_te",
    "gpu/te_without_autocast",
)

HOSTILE = ("decoder_468m", "gpu/te_autocast")
"""Patients that are inspected once more with a training step that steps the user's own optimizer."""

BUDGET_S = 25.0
"""Seconds of each trial, enough to warm up, capture and time several arms of these patients on an H200."""

AT_ONCE = 3
"""Processes that share the GPU: digests do not depend on time."""

LIMIT_S = 200
"""Longest time of one patient, s."""

PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "accelerate", "peft")


def path_of(patient: str) -> Path:
    """Find a patient's file. Those that need a GPU lay in a folder of that name when this was recorded."""
    of_gpu = patient.removeprefix("gpu/")
    folder = RESEARCH if of_gpu != patient else RESEARCH.parent / "tests"
    return folder / "patients" / f"{of_gpu}.py"


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor within containers, by its path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from tensors(each, f"{name}[{index}]")


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors without a subclass that a tensor is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain(getattr(tensor, name))
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        for value in vars(tensor).values():
            if isinstance(value, torch.Tensor):
                yield from plain(value)
    else:
        yield tensor.detach()


def bytes_of(tensor: torch.Tensor) -> str:
    seen = hashlib.blake2b(digest_size=16)
    for part in plain(tensor):
        seen.update(part.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return seen.hexdigest()


def state(model: torch.nn.Module, optimizer: Any, batch: Any) -> dict[str, str]:
    """Every item by its name, in a short text."""
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"module {name}"] = f"{type(module).__qualname__} {module.training} {sorted(vars(module))}"
        found[f"hooks {name}"] = str([len(module._forward_hooks), len(module._forward_pre_hooks)])
        kept = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers")}
        for path, tensor in tensors(kept, f"{name} keeps "):
            found[path] = bytes_of(tensor)
        scaling = {
            key: vars(each) for key, each in kept.get("fp8_meta", {}).items() if hasattr(each, "scale")
        }
        for path, tensor in tensors(scaling, f"{name} scales "):
            found[path] = bytes_of(tensor)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        grad = None if tensor.grad is None else bytes_of(tensor.grad)
        found[name] = f"{id(tensor)} {tensor.requires_grad} {bytes_of(tensor)} grad {grad}"
    for path, tensor in tensors(batch, "batch"):
        found[path] = bytes_of(tensor)
    for index, held in enumerate(optimizer.state.values()):
        for path, tensor in tensors(held, f"optimizer {index}"):
            found[path] = bytes_of(tensor)
    found["optimizer settings"] = str(
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    )
    found["random states"] = " ".join(
        (bytes_of(torch.get_rng_state()), bytes_of(torch.cuda.get_rng_state()), str(hash(random.getstate())))
    )
    return found


def stepping(job: Any, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """A training step that steps the caller's own optimizer, as scripts with globals do."""

    def training_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = scalar(model, batch, job.loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().requires_grad_()

    return training_step


def scalar(model: torch.nn.Module, batch: Any, loss: Callable[..., torch.Tensor] | None) -> torch.Tensor:
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    if loss is not None:
        return loss(output, batch)
    return output.loss if getattr(output, "loss", None) is not None else mean(output)


def mean(output: Any) -> torch.Tensor:
    held = dict(output) if hasattr(output, "keys") else output
    return next(each for _, each in tensors(held, "")).float().mean()


def inspected(patient: str, hostile: bool) -> dict[str, Any]:
    """What one patient's inspection left changed, and what its trial did."""
    from fp8doctor import inspect_model
    from fp8doctor.loading.model_file import load

    job = load(str(path_of(patient)))
    model = job.model
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = job.optimizer or torch.optim.AdamW(trained, lr=1e-5)
    scalar(model, job.batch, job.loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    scalar(model, job.batch, job.loss).backward()
    torch.cuda.synchronize()
    before = state(model, optimizer, job.batch)
    report = inspect_model(
        model,
        job.batch,
        loss=None if hostile else job.loss,
        training_step=stepping(job, optimizer) if hostile else None,
        optimizer=optimizer,
        autocast=job.autocast,
        budget_s=BUDGET_S,
    )
    after = state(model, optimizer, job.batch)
    names = before.keys() | after.keys()
    trial = report.facts.trial
    return {
        "patient": patient,
        "hostile": hostile,
        "items": len(before),
        "changed": sorted(name for name in names if before.get(name) != after.get(name)),
        "timed": [f"{arm.name} {arm.step_ms:.2f} ms" for arm in trial.arms if arm.tried],
        "not_timed": [f"{arm.name}: {arm.reason}" for arm in trial.arms if not arm.tried],
        "harm": list(trial.harm),
        "reason": trial.reason,
    }


def in_a_process(patient: str, hostile: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "-", patient, *(["--hostile"] if hostile else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"patient": patient, "hostile": hostile, "failed": f"took longer than {LIMIT_S} s"}
    if done.returncode:
        return {"patient": patient, "hostile": hostile, "failed": done.stderr[-2000:]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row of the page for each inspection."""
    return [
        (
            each["patient"].removeprefix("gpu/") + (", steps its own optimizer" if each["hostile"] else ""),
            f"{each['items']:,}",
            str(len(each["changed"])),
            str(len(each["timed"])) if each["timed"] else f"refused: {each['reason']}",
        )
        for each in document["inspections"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", help="where the results go; '-' prints those of one patient")
    parser.add_argument("patients", nargs="*", default=NAMES)
    parser.add_argument("--hostile", action="store_true", help="only for '-'")
    options = parser.parse_args()
    if options.file == "-":
        print(json.dumps(inspected(options.patients[0], options.hostile)))
        return
    orders = [(each, False) for each in options.patients]
    orders += [(each, True) for each in HOSTILE if each in options.patients]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda order: in_a_process(*order), orders))
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: installed(name) for name in PACKAGES},
        "budget_s": BUDGET_S,
        "inspections": results,
    }
    Path(options.file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
