"""What released wheels do in ENV005's pairs: ``python -m research.versions.known_versions FOLDER``

Downloads each wheel into FOLDER, unpacks it, and runs a few lines with it in front of the installed packages,
on a CPU. Writes known_versions.md beside this file. Transformer Engine, which needs a GPU, is the stand-in of
the tests; up to 2.8 it has a module ``fp8`` that its package shows, from 2.9 on ``quantization``. The network
is used here and in no test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".md")

MODEL = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

ON_A_GPU = """
import accelerate.state
accelerate.state.check_cuda_fp8_capability = lambda: True  # up to 1.8 it asks a GPU that is not there
"""

TE = """
import importlib.machinery, sys, types
import pytest
from tests.stand_ins import transformer_engine as stand_in
from tests.checks.engagement.accelerated import LayerNorm, Linear
flavour = "{flavour}"
library = stand_in.install(pytest.MonkeyPatch(), flavour)
package = sys.modules["transformer_engine"]
package.__spec__, package.pytorch = importlib.machinery.ModuleSpec("transformer_engine", None), library
package.common = sys.modules["transformer_engine.common"]
library.Linear, library.LayerNorm, library.fp8_autocast = Linear, LayerNorm, stand_in.autocast
name = "transformer_engine.pytorch.fp8"
state = sys.modules.setdefault(name, types.ModuleType(name))
state.check_mxfp8_support = lambda: (False, "")
if flavour == "fp8":
    library.fp8 = state
"""

TAKEN = """
for name in ("accelerator", "utils.transformer_engine", "utils.imports", "utils.dataclasses", "state"):
    module = importlib.import_module(f"accelerate.{name}")
    if hasattr(module, "is_transformer_engine_available"):
        module.is_transformer_engine_available = lambda: True
"""

BY_ENVIRONMENT = (
    ON_A_GPU
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, _ = accelerator.prepare(model, optimizer)
modules = [f"{type(layer).__module__.partition('.')[0]}.{type(layer).__name__}" for layer in model]
converted = sum(not module.startswith("torch.") for module in modules)
result = f"mixed_precision {accelerator.mixed_precision}, {converted} of {len(modules)} layers converted"
"""
)
BY_ARGUMENT = BY_ENVIRONMENT.replace("cpu=True", "cpu=True, mixed_precision='fp8'")
WITH_TE = TE + "import accelerate.accelerator, importlib\n" + TAKEN + BY_ENVIRONMENT
ADAPTERS = "import peft\npeft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=['0']))"
ADAPTERS_ON_TE = TE + "model = torch.nn.Sequential(Linear(64, 64))\n" + ADAPTERS
OPERATORS = """
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
class Count(TorchDispatchMode):
    calls = 0
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls += 1
        return function(*arguments, **(keywords or {}))
said = []
for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
    linears = (torch.nn.Linear(64, 64, bias=False).bfloat16() for _ in range(2))
    layers = convert_to_float8_training(torch.nn.Sequential(*linears),
        config=Float8LinearConfig.from_recipe_name(recipe))
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    with Count() as count:
        layers(x).sum().backward()
    said.append(f"{recipe} {count.calls}")
result = "operators of two Linears: " + ", ".join(said)
"""

TRAINER = """
import os, tempfile
import transformers
from fp8doctor import inspect_model
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))
{arguments}
report = inspect_model(transformers.Trainer(model=net, args=arguments), trial=False)
found = [f"{finding.code} {finding.title}" for finding in report.findings if finding.code == "ENV001"]
precision = report.facts.training.accelerate.mixed_precision
result = f"mixed_precision {precision}; fp8doctor: {found[0] if found else 'no ENV001'}"
"""
FP8_HERE = '\nos.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"\n'
ARGUMENTS = "arguments = transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True)"
BF16 = (
    FP8_HERE
    + "arguments = transformers.TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=True)"
)
SFT = FP8_HERE + "import trl\narguments = trl.SFTConfig(output_dir=tempfile.mkdtemp(), use_cpu=True)"

TRANSFORMERS_4 = (
    "transformers==4.57.1",
    "huggingface_hub==0.36.0",
    "tokenizers==0.22.1",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "certifi==2026.10.18",
    "charset_normalizer==3.5.2",
)
TRANSFORMERS_5 = ("transformers==5.23.0",)
TRL = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "pyarrow==26.0.1",
    "pandas==3.1.1",
    "multiprocess==0.70.19",
    "dill==0.4.1",
    "xxhash==4.1.0",
)

FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
NAMED = FP8 | {"ACCELERATE_FP8_BACKEND": "TE"}

CASES: tuple[tuple[str, str, dict[str, str], tuple[tuple[str, ...], ...]], ...] = (
    (
        "FP8 by environment, torchao",
        BY_ENVIRONMENT,
        FP8,
        tuple((f"accelerate=={each}",) for each in ("1.5.2", "1.7.0", "1.8.0", "1.8.1", "1.9.0", "1.13.0")),
    ),
    (
        "FP8 by argument, torchao",
        BY_ARGUMENT,
        {},
        tuple((f"accelerate=={each}",) for each in ("1.7.0", "1.8.0", "1.8.1", "1.9.0")),
    ),
    (
        "FP8 by argument with a recipe, torchao",
        BY_ARGUMENT.replace(
            "mixed_precision='fp8'", "mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()]"
        ).replace(
            "from accelerate import Accelerator",
            "from accelerate import Accelerator\nfrom accelerate.utils import AORecipeKwargs",
        ),
        {},
        (("accelerate==1.7.0",),),
    ),
    (
        "Transformer Engine up to 2.8",
        WITH_TE.replace("{flavour}", "fp8"),
        NAMED,
        tuple((f"accelerate=={each}",) for each in ("1.11.0", "1.12.0")),
    ),
    (
        "Transformer Engine from 2.9",
        WITH_TE.replace("{flavour}", "quantization"),
        NAMED,
        tuple((f"accelerate=={each}",) for each in ("1.10.1", "1.11.0", "1.12.0", "1.13.0")),
    ),
    (
        "adapters",
        ADAPTERS,
        {},
        (
            ("peft==0.18.1", "torchao==0.17.0"),
            ("peft==0.18.1", "torchao==0.18.0"),
            ("peft==0.19.0", "torchao==0.18.0"),
        ),
    ),
    (
        "adapters on te.Linear",
        ADAPTERS_ON_TE.replace("{flavour}", "quantization"),
        {},
        (("peft==0.18.1", "torchao==0.17.0"), ("peft==0.19.0", "torchao==0.17.0")),
    ),
    (
        "FP8 by environment, before TrainingArguments",
        ON_A_GPU + TRAINER.replace("{arguments}", FP8_HERE + ARGUMENTS),
        {},
        (TRANSFORMERS_4, TRANSFORMERS_5),
    ),
    (
        "FP8 by environment, after TrainingArguments",
        ON_A_GPU + TRAINER.replace("{arguments}", ARGUMENTS + FP8_HERE),
        {},
        (TRANSFORMERS_4, TRANSFORMERS_5),
    ),
    (
        "FP8 by environment, TrainingArguments(bf16=True)",
        ON_A_GPU + TRAINER.replace("{arguments}", BF16),
        {},
        (TRANSFORMERS_4, TRANSFORMERS_5),
    ),
    ("FP8 by environment, SFTConfig as it is", ON_A_GPU + TRAINER.replace("{arguments}", SFT), {}, (TRL,)),
    (
        "eager Float8Linear, forward and backward",
        OPERATORS,
        {},
        tuple((f"torchao=={each}",) for each in ("0.11.0", "0.13.0", "0.16.0", "0.18.0")),
    ),
)
"""What is tried, the lines, the variables, and the wheels of each run."""


def unpacked(folder: Path, requirement: str) -> Path:
    """The folder of a wheel's contents, downloaded where it is not there yet."""
    place = folder / requirement
    if not place.exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                requirement,
                "-d",
                folder / "wheels",
            ],
            check=True,
            timeout=3600,
        )
        name, _, version = requirement.partition("==")
        zipfile.ZipFile(next((folder / "wheels").glob(f"{name}-{version}-*.whl"))).extractall(place)
    return place


def outcome(program: str, variables: dict[str, str], folders: list[Path]) -> str:
    """``works``, what the program says, or the last line of its error."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")
    } | variables
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*folders, ROOT)))
    code = f"result = 'works'\n{MODEL}{program}\nprint('said:', result)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1].partition(" (")[0][:120]
    return done.stdout.rpartition("said: ")[2].strip()


def rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    for what, program, variables, runs in CASES:
        for wheels in runs:
            yield (
                what,
                ", ".join(wheels).replace("==", " "),
                outcome(program, variables, [unpacked(folder, wheel) for wheel in wheels]),
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    table = tabulate(
        rows(folder), headers=("what", "wheels", "outcome"), tablefmt="github", disable_numparse=True
    )
    beside = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("torch", "torchao", "transformers", "accelerate", "peft")
    )
    said = (
        f"Made by `python -m research.versions.known_versions FOLDER`, {datetime.now(UTC):%Y-%m-%d}, on a "
        f"CPU, beside {beside}."
    )
    TABLE.write_text(f"# What released wheels do in known pairs\n\n{said}\n\n{table}\n", "utf-8")
    print(table)


if __name__ == "__main__":
    main()
