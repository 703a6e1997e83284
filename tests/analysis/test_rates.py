"""Tokens a second: of a recorded job's variants, and what no step of it can reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.rates import rates
from fp8doctor.diagnosis.diagnose import diagnose, replay
from fp8doctor.facts import NOT_RECORDED, Gpu, Trial
from fp8doctor.render.detail_tables import rates_in_words

RECORDED = Path(__file__).parents[1] / "patients" / "recorded"
WATCHED = Path(__file__).parents[1] / "running" / "recorded"


def test_the_claims_of_a_454m_are_held_to_the_peak() -> None:
    report = replay(RECORDED / "h200-decoder_454m.json.gz", assume_gpu="H100")
    found = report.rates
    assert found is not None
    assert found.bf16_peak_tokens_per_s == pytest.approx(364_000, rel=1e-3)
    assert found.fp8_peak_tokens_per_s == pytest.approx(2 * 364_000, rel=1e-3)
    list(rates_in_words(found, fp8=True, labels={}))[-1]
    as_is = next(each for each in found.variants if each.name == "as_is")
    assert (as_is.basis, as_is.tokens_per_s) == ("measured", report.verdict.tokens_per_s)
    assert report.to_dict()["rates"]["variants"][0]["step_ms"] > 0


def test_without_times_the_variants_are_modelled() -> None:
    facts = replace(replay(RECORDED / "h200-decoder_454m.json.gz").facts, trial=Trial(arms=()))
    found = rates(facts)
    assert found is not None
    assert {each.basis for each in found.variants} == {"modelled"}
    speed = {each.name: each.tokens_per_s for each in found.variants}
    assert speed["as_is"] < speed["bf16"] < speed["bf16_compiled"] < (found.bf16_peak_tokens_per_s or 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recording", "names"),
    [
        ("checkpointed_needlessly", ("as_is", "checkpointing-off", "bf16_without_checkpointing")),
        ("llama_8b_lora_r32", ("as_is", "without_adapters")),
    ],
)
def test_what_checkpointing_and_adapters_cost_is_modelled_as_it_was_measured(
    recording: str, names: tuple[str, ...]
) -> None:
    facts = replay(RECORDED / f"h200-{recording}.json.gz").facts
    found = rates(replace(facts, trial=Trial(arms=())))
    assert found is not None
    modelled = {each.name: each.step_ms for each in found.variants}
    measured = {arm.name: arm.step_ms for arm in facts.arms() if arm.tried}
    assert {name: modelled[name] for name in names} == {
        name: pytest.approx(measured[name], rel=0.06) for name in names
    }


def test_without_fp8_no_variant_in_fp8_is_modelled() -> None:
    facts = replay(RECORDED / "h200-lora_plain.json.gz").facts
    assert any(linear.adapter == "adapter" for linear in facts.network.linears)
    found = rates(replace(facts, trial=Trial(arms=())))
    assert found is not None
    assert {each.name for each in found.variants} == {"bf16", "bf16_compiled"}


@pytest.mark.parametrize("name", ["te_checkpointed", "emulated", "llama_kv_cache"])
def test_no_rate_is_modelled_of_fp8_that_is_not_what_it_seems(name: str) -> None:
    """The verdict expects nothing of these either."""
    facts = replay(RECORDED / f"h200-{name}.json.gz").facts
    found = diagnose(replace(facts, trial=NOT_RECORDED)).rates
    assert found is not None
    assert all(each.name.startswith("bf16") for each in found.variants)


def test_no_rate_is_modelled_of_a_step_that_raises() -> None:
    report = replay(RECORDED.parents[1] / "versions" / "recorded" / "cpu-ddp-torchao-0.12.0.json.gz")
    assert report.verdict.status == "step_raises"
    assert "modelled" not in report.verdict.summary
    assert report.rates is not None
    assert {each.name for each in report.rates.variants} == {"bf16", "bf16_compiled"}


def test_no_rate_is_modelled_of_fp8_that_does_not_run_though_its_check_is_ignored() -> None:
    facts = replace(replay(RECORDED / "h200-te_fused.json.gz").facts, trial=NOT_RECORDED)
    idle = tuple(replace(each, engaged=False) for each in facts.network.linears)
    report = diagnose(replace(facts, network=replace(facts.network, linears=idle)), ignore=("MOD002",))
    assert report.verdict.status == "fp8_not_engaged"
    assert report.rates is not None
    assert {each.name for each in report.rates.variants} == {"bf16", "bf16_compiled"}


def test_the_rate_of_a_watched_script_is_that_of_its_own_steps() -> None:
    """Its ranks wait for each other: 8.9 ms were modelled of the step that takes 64.4."""
    report = replay(WATCHED / "h200x2-fsdp2_few_rows.json.gz")
    assert report.rates is not None
    (own,) = report.rates.variants
    assert (own.name, own.basis) == ("as_is", "measured")
    assert own.step_ms == pytest.approx(64.4, abs=0.1)
    assert report.facts.workload.tokens is not None
    assert own.tokens_per_s == pytest.approx(1e3 * report.facts.workload.tokens / own.step_ms)


def test_a_model_without_linears_has_no_rate() -> None:
    facts = replay(RECORDED / "h200-decoder_454m.json.gz").facts
    frozen = replace(facts.network, linears=(), trainable_parameters=0)
    assert rates(replace(facts, network=frozen, trial=Trial(arms=()))) is None


def test_an_a100_has_no_peak_in_fp8() -> None:
    found = replay(RECORDED / "h200-decoder_454m.json.gz", assume_gpu="A100").rates
    assert found is not None
    assert found.fp8_peak_tokens_per_s is None
    assert "FP8 peak" not in list(rates_in_words(found, fp8=True, labels={}))[-1]


def test_amds_peaks_bound_a_rate_and_model_no_step() -> None:
    facts = replay(RECORDED / "h200-decoder_454m.json.gz").facts
    amd = Gpu(name="AMD Instinct MI300X", vendor="amd", architecture="gfx942", visible=True)
    found = rates(replace(facts, gpus=(amd,), trial=Trial(arms=())))
    assert found is not None
    assert found.variants == ()
    assert found.gpu == "MI300X"
    assert found.bf16_peak_tokens_per_s == pytest.approx(364_000 * 1307.4 / 989.4, rel=1e-3)
    assert found.fp8_peak_tokens_per_s == pytest.approx(2 * found.bf16_peak_tokens_per_s, rel=1e-3)
    assert (
        rates(replace(facts, gpus=(replace(amd, name="AMD Instinct MI210"),), trial=Trial(arms=()))) is None
    )


def test_experts_whose_rows_nobody_counted_give_no_peak() -> None:
    facts = replay(RECORDED / "h200-qwen3_moe_30b.json.gz").facts
    uncounted = replace(facts, workload=replace(facts.workload, rows={}), trial=Trial(arms=()))
    found = rates(uncounted)
    assert found is None or found.bf16_peak_tokens_per_s is None
