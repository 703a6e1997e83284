"""Files that an H100 wrote: every planted fault is named within 100 steps, and no healthy run is accused.

A GPT of 44 million parameters on the source of Python's library (torch 2.11, torchao 0.18, Transformer Engine
2.20), sampled every 10 or 15 steps. Faults were planted at step 150.
"""

import gzip
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fp8doctor import cli
from fp8doctor.health.record import Health, Sample, read_health
from fp8doctor.health.verdict import HealthVerdict, conclude
from fp8doctor.running.layer_sampler import COMPILED

RECORDED = Path(__file__).parent / "recorded"
EXAMPLE = Path(__file__).parents[2] / "examples" / "long_run.md"
"""Written by ``fp8doctor health poisoned_history.jsonl -o examples/long_run.md``."""


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_bytes(gzip.decompress((RECORDED / f"h100-{name}.jsonl.gz").read_bytes()))
    return path


def judged(name: str, folder: Path) -> tuple[Health, HealthVerdict]:
    health = read_health(unpacked(name, folder))
    return health, conclude(health)


HEALTHY = {
    "tensorwise": (33, 24, 25),
    "rowwise": (50, 24, 31),
    "te_delayed": (100, 24, 25),
    "llama_tensorwise": (9, 70, 25),
    "llama_te_delayed": (16, 70, 15),
}
"""Samples, layers, and the least SQNR in dB. The Llama, 150 million parameters in BF16 weights, on bytes,
is a model that no limit was chosen with."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_accused_of_nothing(name: str, tmp_path: Path) -> None:
    samples, layers, low = HEALTHY[name]
    health, verdict = judged(name, tmp_path)
    assert (len(health.samples), len(health.layers)) == (samples, layers)
    assert (verdict.status, verdict.conclusions, verdict.rise) == ("healthy", (), None)
    assert f"at least {low} dB" in verdict.summary
    for end in range(2, len(health.samples), 9):
        part = Health(health.name, health.headers, health.samples[:end])
        assert conclude(part).status == "healthy"


@pytest.mark.parametrize(
    ("name", "layer", "kind", "said"),
    [
        ("poisoned_history", "blocks.3.up", "poisoned_history", "47,603 times as large"),
        ("stale_history", "blocks.3.qkv", "poisoned_history", "since step 152"),
        ("underflow", "blocks.3.proj", "flushed", "91% of their gradient"),
    ],
)
def test_planted_faults_are_named(name: str, layer: str, kind: str, said: str, tmp_path: Path) -> None:
    health, verdict = judged(name, tmp_path)
    found = [fault for each in verdict.conclusions for fault in each.faults]
    assert layer in verdict.layers
    assert {fault.kind for fault in found} == {kind}
    assert all(150 <= fault.since <= 250 for fault in found)
    assert any(said in each.text for each in verdict.conclusions)
    before = tuple(each for each in health.samples if each[1].step <= 150)
    assert conclude(Health(health.name, health.headers[:1], before)).status == "healthy"


def test_a_rate_that_diverges_is_not_blamed_on_fp8(tmp_path: Path) -> None:
    _, verdict = judged("diverges", tmp_path)
    assert (verdict.status, verdict.conclusions) == ("diverges", ())
    assert "FP8 did not start it" in verdict.summary


@pytest.mark.parametrize("name", ["tensorwise", "diverges"])
def test_layers_of_which_only_weights_are_known_are_neither_sound_nor_cleared(
    name: str, tmp_path: Path
) -> None:
    health, _ = judged(name, tmp_path)
    (header,) = health.headers
    layers = tuple(replace(each, unseen=COMPILED) for each in header.layers)
    weights = [(replace(header, layers=layers), only_weights(sample)) for _, sample in health.samples]
    verdict = conclude(replace(health, headers=(replace(header, layers=layers),), samples=tuple(weights)))
    assert (verdict.status, verdict.conclusions) == ("diverges" if name == "diverges" else "unknown", ())
    assert "unknown: " in verdict.summary
    (one, *others) = layers
    seen = replace(header, layers=(replace(one, unseen=None), *others))
    verdict = conclude(replace(health, headers=(seen,)))
    assert verdict.status == ("diverges" if name == "diverges" else "healthy")
    said = f"{len(others)} layers" if name == "diverges" else f"1 of {len(layers)} layers"
    assert said in verdict.summary


def only_weights(sample: Sample) -> Sample:
    return replace(sample, layers=tuple((None, weight, None) for _, weight, _ in sample.layers))


@pytest.mark.slow
def test_every_format(tmp_path: Path) -> None:
    fault = unpacked("stale_history", tmp_path)
    run = CliRunner()
    text = run.invoke(cli.main, ["health", str(fault)])
    assert (text.exit_code, text.stderr) == (0, "")
    assert "FP8 loses too much in 1 layer of 24." in text.stdout
    assert "recipe=Float8CurrentScaling()" in text.stdout
    assert "The job was restarted 1 time." in text.stdout
    assert max(map(len, text.stdout.splitlines())) <= 100
    page = run.invoke(cli.main, ["health", str(unpacked("poisoned_history", tmp_path)), "--format", "html"])
    assert page.stdout.count('scope="row" class="name">blocks.') >= 24
    assert page.stdout.count('class="shade3"') >= 10
    markdown = run.invoke(
        cli.main, ["health", str(tmp_path / "poisoned_history.jsonl"), "--format", "markdown"]
    )
    assert markdown.stdout == EXAMPLE.read_text("utf-8")
    document = run.invoke(cli.main, ["health", str(fault), "--format", "json"]).stdout
    assert '"kind": "health"' in document
