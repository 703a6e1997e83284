"""How time and memory grow with the size: ``python research/benchmarks/scale.py [--only PART] [--factor F]``.

Every size runs in a process of its own, which prepares its input and then measures each stage: seconds of the
processor and of the clock, and its peak memory above what it held before the first stage. The exponent is the
slope of their logarithms: 1 is linear, 2 quadratic. Prints Markdown, and exits with 1 if an exponent is above
1.1. ``--factor 0.02`` tries the program at a fiftieth of each size; such exponents say nothing.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from research.benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[2]

MOST = 1.1
"""Largest exponent that counts as linear."""

NOISE = {"cpu": 0.5, "mib": 40.0}
"""Seconds and MiB of the largest size below which an exponent stands in brackets and is not judged: a fixed
cost, or the noise of a shared machine, is as large."""

FOLDER = Path(os.environ.get("SCALE_FOLDER", tempfile.gettempdir()))


class Meter:
    """What the stages of one size took."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self.before_mib = math.inf
        self.peak_mib = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        gc.collect()
        self.before_mib = min(self.before_mib, _status("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        cpu, wall = sum(os.times()[:4]), time.perf_counter()
        yield
        self.stages[stage] = sum(os.times()[:4]) - cpu, time.perf_counter() - wall
        self.peak_mib = max(self.peak_mib, _status("VmHWM"))


def _status(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def de_bruijn(symbols: int) -> list[int]:
    """Each pair of numbers below ``symbols`` once, as neighbours."""
    return [each for a in range(symbols) for each in (a, *(x for b in range(a + 1, symbols) for x in (a, b)))]


def linears(count: int, kind: str) -> Any:
    """A chain of Linears on the meta device: alike in blocks of eight, or no two of one shape."""
    import torch
    from torch import nn
    from torchao.float8 import convert_to_float8_training

    widths = [1024] * (count + 1)
    if kind == "distinct":
        widths = [16 * (each + 4) for each in de_bruijn(math.isqrt(count) + 2)[: count + 1]]
    with torch.device("meta"):
        layers = [nn.Linear(here, there) for here, there in pairwise(widths)]
        blocks = nn.ModuleList(nn.Sequential(*layers[at : at + 8]) for at in range(0, count, 8))
        model = nn.Sequential(*blocks)
        convert_to_float8_training(model)
        if kind == "hooks":
            for module in model.modules():
                module.register_forward_hook(lambda module, inputs, output: None)
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            plain = type("Chain", (nn.Module,), {"forward": lambda self, x: self.blocks(x)})()
            plain.blocks = model
            model = get_peft_model(plain, LoraConfig(r=16, target_modules=r".*\.\d+\.\d+"))
    return model, torch.empty(4096, widths[0], device="meta")


def inspected(meter: Meter, model: Any, batch: Any = None) -> None:
    """Examine, diagnose and render a model."""
    from fp8doctor import inspect_model
    from fp8doctor.diagnosis.diagnose import diagnose

    inspect_model(linears(8, "alike")[0], trial=False)
    with meter("inspect_model"):
        report = inspect_model(model, batch, trial=False, assume_gpu="H100")
    with meter("diagnose alone"):
        diagnose(report.facts)
    rendered(meter, report)


def rendered(meter: Meter, document: Any) -> None:
    for stage in ("text", "HTML", "JSON"):
        with meter(stage):
            getattr(document, f"to_{stage.lower()}")()


def deepseek(blocks: int) -> Any:
    """DeepSeek-V3 with its three dense blocks and so many of its 58 with experts, on the meta device."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        return DeepseekV3ForCausalLM(
            DeepseekV3Config(num_hidden_layers=3 + blocks, use_cache=False)
        ).bfloat16()


def moe(blocks: int, meter: Meter) -> None:
    """Examine and plan DeepSeek-V3."""
    from fp8doctor import plan
    from fp8doctor.planned import facts_of

    model = deepseek(blocks)
    facts_of({"model_type": "llama", "num_hidden_layers": 1}, 1, 4096)
    with meter("examine"):
        facts = facts_of(model, 1, 4096)
    with meter("plan"):
        made = plan(facts, ("H100", "B200"), dp=256, ep=64)
    rendered(meter, made)


def moe_of_linears(blocks: int, meter: Meter) -> None:
    """Examine DeepSeek-V3 with three Linears for each of its 256 experts in a block."""
    import torch
    from torch import nn
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

    model = deepseek(blocks)
    config = model.config
    for block in model.model.layers[config.first_k_dense_replace :]:
        with torch.device("meta"):
            each = [
                DeepseekV3MLP(config, config.moe_intermediate_size) for _ in range(config.n_routed_experts)
            ]
            block.mlp.experts = nn.ModuleList(each).bfloat16()
    inspected(meter, model)


def ranks(count: int, meter: Meter) -> None:
    """Gather recorded reports from processes over the channel of ``fp8doctor run``, and report."""
    from fp8doctor.cli.run import of_many
    from fp8doctor.diagnosis.diagnose import diagnose, replay
    from fp8doctor.report import Report
    from fp8doctor.running.rank_reports import RankReports, rank_place
    from fp8doctor.running.script_messages import ScriptState

    facts = replay(ROOT / "tests/running/recorded/h200x2-fsdp2_few_rows.json.gz").facts
    job = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": str(os.getpid())}
    places = [rank_place({**job, "RANK": str(rank)}) for rank in range(count)]
    own = ScriptState(facts, complete=True, torch=True, ended=True, all_steps=40)
    with meter("gather"):
        collector = RankReports(places[0])
        for place in places[1:]:
            if not os.fork():
                sender = RankReports(place)
                sender.changed(ScriptState(torch=True, running=True))
                sender.changed(ScriptState(facts, complete=True, torch=True, running=True))
                sender.ended(own, patient=False)
                os._exit(0)
        collector.ended(own, patient=False)
        for _ in places[1:]:
            os.wait()
    assert own.ranks is not None
    assert [each.end for each in own.ranks.processes] == ["ended"] * count, own.notes
    with meter("diagnose"):
        document = diagnose(of_many(facts, count, own.ranks))
    rendered(meter, Report.of(document))


def message(megabytes: int, meter: Meter) -> None:
    """Send the facts of a watched script to the process that reports: 1 MB is about 2,000 Linears."""
    from fp8doctor.pipes import Channel, lines_of
    from fp8doctor.running.script_messages import Message

    read, write = os.pipe()
    with meter("send and read"):
        if not (child := os.fork()):
            Channel(write).send(Message(note="a" * (megabytes << 20)))
            os._exit(0)
        os.close(write)
        looks = lines_of(read, lambda: bool(os.waitpid(child, os.WNOHANG)[0]), 0.01)
        assert sum(len(each) for each in looks if isinstance(each, bytes)) > megabytes << 20


def command(*words: str) -> int:
    from fp8doctor.cli import main

    with redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        try:
            main(list(words), standalone_mode=False)
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def trace(count: int, meter: Meter) -> None:
    """Read a trace whose steps are one composed step, shifted."""
    from research.benchmarks.trace_speed import Composer

    one = Composer(2000)
    whole = "".join(one.text())
    head, tail = whole[: whole.index("[\n") + 2], whole[whole.rindex("\n  ]") :]
    length = max(one.now, one.gpu) + 100
    path = FOLDER / f"scale-{os.getpid()}.json"
    with path.open("w") as file:
        file.write(head)
        for step in range(max(1, round(count / (len(one.events) + 1)))):
            mark = Composer(0, now=0.0)
            mark.event(
                "user_annotation",
                f"ProfilerStep#{step}",
                900.0,
                length - 1,
                '"pid": 4242, "tid": 4242',
                '"External id": 0',
            )
            if step:
                file.write(",\n")
            file.write(shifted(",\n".join([*mark.events, *one.events]), step, length, one.identity + 1))
        file.write(tail)
    for form in ("text", "html", "json"):
        with meter(f"trace, {form}"):
            assert command("trace", str(path), "--format", form) == 0
    path.unlink()


def shifted(events: str, step: int, length: float, numbers: int) -> str:
    """The events of a later step: time stamps, identities and correlations of their own."""
    later = re.sub(
        r'("ts": )([\d.]+)', lambda found: f"{found[1]}{float(found[2]) + step * length:.3f}", events
    )
    return re.sub(
        r'("(?:External id|Sequence number|correlation|id)": ?)([1-9]\d*)',
        lambda found: f"{found[1]}{int(found[2]) + step * numbers}",
        later,
    )


def health(meter: Meter, samples: int, copies: int = 1) -> None:
    """Read a recorded run with planted faults, its samples repeated, and its layers copied."""
    recorded = ROOT / "tests/health/recorded/h100-underflow.jsonl.gz"
    text = gzip.decompress(recorded.read_bytes()).decode()
    header, *lines = (json.loads(line) for line in text.splitlines())
    lines = [each for each in lines if each["type"] == "sample"]
    names = (each | {"name": f"{copy}.{each['name']}"} for copy in range(copies) for each in header["layers"])
    path = FOLDER / f"scale-{os.getpid()}.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(header | {"layers": list(names)}) + "\n")
        for number in range(samples):
            line = lines[number % len(lines)]
            line = line | {"step": number + 1, "layers": line["layers"] * copies}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    for form in ("text", "html", "json"):
        with meter(f"health, {form}"):
            assert command("health", str(path), "--format", form) == 0
    path.unlink()


LINEARS = (1250, 2500, 5000, 10_000)
BLOCKS = (5, 13, 28, 58)

PARTS: dict[str, tuple[str, tuple[int, ...], Callable[[int, Meter], None]]] = {
    "alike": ("Linears", LINEARS, lambda size, meter: inspected(meter, *linears(size, "alike"))),
    "distinct": ("Linears", LINEARS, lambda size, meter: inspected(meter, *linears(size, "distinct"))),
    "hooks": ("Linears", LINEARS, lambda size, meter: inspected(meter, *linears(size, "hooks"))),
    "lora": ("Linears", LINEARS, lambda size, meter: inspected(meter, *linears(size, "lora"))),
    "moe": ("blocks of experts", BLOCKS, moe),
    "moe_of_linears": ("blocks of experts", BLOCKS, moe_of_linears),
    "ranks": ("ranks", (8, 16, 32, 64), ranks),
    "message": ("MB", (4, 8, 16, 32), message),
    "trace": ("events", (125_000, 250_000, 500_000, 1_000_000), trace),
    "health": ("samples", (12_500, 25_000, 50_000, 100_000), lambda size, meter: health(meter, size)),
    "health_layers": ("copies", (50, 100, 200, 400), lambda size, meter: health(meter, 30, size)),
}
"""What a size counts, the sizes, and what runs. A recorded run of health has 24 layers."""


def exponent(sizes: list[int], amounts: list[float]) -> float:
    """Least-squares slope of the logarithms."""
    x, y = ([math.log(max(each, 1e-3)) for each in values] for values in (sizes, amounts))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def rows_of(part: str, factor: float) -> tuple[list[list[Any]], list[str]]:
    """Run one part at its sizes; also what grows faster than linearly."""
    unit, sizes, _ = PARTS[part]
    wanted = [max(at + 4, round(size * factor)) for at, size in enumerate(sizes)]
    found = []
    for size in wanted:
        ran = subprocess.run(
            [sys.executable, __file__, "--one", part, str(size)], capture_output=True, text=True, timeout=3600
        )
        if ran.returncode:
            sys.exit(f"{part} of {size:,}: {ran.stderr[-2000:]}")
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    amounts = {
        f"{stage}, {unit_of}": [each["stages"][stage][at] for each in found]
        for stage in found[0]["stages"]
        for at, unit_of in enumerate(("s of CPU", "s"))
    }
    amounts["peak, MiB"] = [each["mib"] for each in found]
    rows, missed = [[part, unit, *(f"{each:,}" for each in wanted), ""]], []
    for name, values in amounts.items():
        slope = exponent(wanted, values)
        counts = values[-1] >= NOISE["mib" if name.endswith("MiB") else "cpu"]
        rows.append(
            [
                "",
                name,
                *(f"{each:,.0f}" if each >= 100 else f"{each:.2f}" for each in values),
                f"{slope:.2f}" if counts else f"({slope:.2f})",
            ]
        )
        if counts and slope > MOST and not name.endswith(", s"):
            missed.append(f"{part}: {name}: {slope:.2f}")
    return rows, missed


def main() -> int:
    """Print the table; 1 if something grows faster than linearly."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--one", nargs=2, metavar=("PART", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        part, size = options.one
        meter = Meter()
        PARTS[part][2](int(size), meter)
        print(json.dumps({"stages": meter.stages, "mib": meter.peak_mib - meter.before_mib}))
        return 0
    packages = ("torch", "torchao", "transformers", "peft", "msgspec", "jinja2")
    print(f"{datetime.now(UTC):%Y-%m-%d} · {machine(packages)}\n")
    table, missed = [], []
    for part in options.only:
        rows, above = rows_of(part, options.factor)
        table += rows
        missed += above
        print(tabulate(rows, tablefmt="plain"), file=sys.stderr, flush=True)
    print(
        tabulate(
            table, ("part", "stage", *4 * ("size",), "exponent"), tablefmt="github", disable_numparse=True
        )
    )
    print("\n".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
