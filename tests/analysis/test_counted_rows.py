"""What is concluded from the rows that each layer was seen to multiply: a diffusion transformer whose
conditioning sees one row a sample, and stays in BF16 on purpose."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import convert_to_float8_training

from fp8doctor import cost
from fp8doctor.analysis.layers import flops_share_pct, shares_are_known
from fp8doctor.checks.engagement.partial_conversion import partial_conversion
from fp8doctor.checks.shapes.unaligned_dimensions import unaligned_dimensions
from fp8doctor.cost.step_cost import modelled_step
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Linear, Target, Trial, Workload, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding
from fp8doctor.loading.job import Job
from fp8doctor.render import text
from fp8doctor.render.header import model
from fp8doctor.render.timing import timing
from tests.checks.arms import ran, timed
from tests.looked import looked

SAMPLES, TOKENS, WIDTH = 4, 4096, 2048


class Block(nn.Module):
    """A block of a DiT: the sizes are those that matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.adaln = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)


def dit() -> Facts:
    with torch.device("meta"):
        model = nn.ModuleList(Block() for _ in range(2)).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: "adaln" not in name)
    work = Workload(
        batch_source="given", batch_size=SAMPLES, tokens=TOKENS, sequence_length=None, accumulate=1
    )
    return examine(Job(model=model, target=Target(kind="live", name="DiT"), workload=work))


def conditioning(linear: Linear) -> bool:
    return linear.name.endswith("adaln")


def counted(facts: Facts, fact: str = "trial") -> Facts:
    rows = {each.name: (SAMPLES if conditioning(each) else TOKENS,) for each in facts.linears()}
    if fact == "workload":
        return msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, rows=rows))
    return msgspec.structs.replace(facts, trial=Trial(device="cuda", gpu=None, arms=(), rows=rows))


def test_without_counted_rows_a_third_seems_to_be_missing() -> None:
    finding = partial_conversion(dit())
    assert isinstance(finding, Finding)


@pytest.mark.parametrize("fact", ["trial", "workload"])
def test_conditioning_in_bf16_is_not_missing(fact: str) -> None:
    facts = counted(dit(), fact)
    assert partial_conversion(facts) is None
    share = flops_share_pct(filter(conditioning, facts.linears()), facts)
    assert share == pytest.approx(100 / (1 + TOKENS / SAMPLES * 2), rel=1e-6)
    assert flops_share_pct(facts.linears(), facts) == pytest.approx(100)


def test_a_branch_that_never_runs_has_no_share() -> None:
    facts = dit()
    rows = {each.name: (TOKENS,) for each in facts.linears() if each.name.endswith(("up", "down"))}
    facts = msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, rows=rows))
    idle = [each for each in facts.linears() if each.name not in rows]
    assert flops_share_pct(idle, facts) == 0
    assert flops_share_pct(facts.linears(), facts) == pytest.approx(100)


def test_the_trial_goes_before_fake_tensors() -> None:
    facts = counted(dit())
    layer = facts.linears()[0]
    wrong = msgspec.structs.replace(facts.workload, rows={layer.name: (1, 2)})
    facts = msgspec.structs.replace(facts, workload=wrong)
    assert (cost.rows_of(layer, facts), cost.calls_of(layer, facts)) == (SAMPLES, 1)


def test_the_step_is_modelled_with_them() -> None:
    by_tokens, by_rows = modelled_step(dit()), modelled_step(counted(dit()))
    assert by_tokens is not None
    assert by_rows is not None
    assert by_rows.families_ms["gemm_fp8"] == by_tokens.families_ms["gemm_fp8"]
    assert by_rows.families_ms["gemm_16bit"] < by_tokens.families_ms["gemm_16bit"] / 5


def test_a_layer_that_is_called_twice_counts_twice() -> None:
    facts = counted(dit())
    rows = facts.trial.rows | {"0.up": (TOKENS, TOKENS)}
    twice = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, rows=rows))
    once, more = (modelled_step(each) for each in (facts, twice))
    assert once is not None
    assert more is not None
    up = 4 * WIDTH * WIDTH
    whole = 2 * 12 * WIDTH * WIDTH
    assert more.families_ms["gemm_fp8"] / once.families_ms["gemm_fp8"] == pytest.approx(
        1 + up / whole, rel=0.1
    )


def test_the_first_lines_say_what_most_of_the_work_is_done_with() -> None:
    facts = counted(dit())
    assert model(facts).endswith("4096 rows")
    images = msgspec.structs.replace(facts.workload, tokens=None)
    assert model(msgspec.structs.replace(facts, workload=images)).endswith(", 4096 rows")
    frames = msgspec.structs.replace(facts.workload, sequence_length=8192, tokens=4 * 8192)
    model(msgspec.structs.replace(facts, workload=frames))


def test_tokens_that_no_fp8_layer_multiplies_need_no_padding() -> None:
    ragged = msgspec.structs.replace(dit().workload, tokens=TOKENS + 1)
    facts = msgspec.structs.replace(dit(), workload=ragged)
    assert isinstance(unaligned_dimensions(facts), Finding)
    assert unaligned_dimensions(counted(facts)) is None


def test_a_made_up_batch_decides_on_the_rows_of_experts() -> None:
    facts = counted(dit())
    experts = tuple(
        msgspec.structs.replace(each, role="experts") if conditioning(each) else each
        for each in facts.linears()
    )
    facts = msgspec.structs.replace(facts, network=msgspec.structs.replace(facts.network, linears=experts))
    made_up = msgspec.structs.replace(facts.workload, batch_source="made up")
    for work, _said in ((facts.workload, 0), (made_up, 1)):
        shown = timing(timed(msgspec.structs.replace(facts, workload=work), ran("as_is")))
        assert shown is not None


@pytest.mark.parametrize("fact", ["name", "flops_share_pct"])
def test_a_layer_of_which_a_fact_is_missing_costs_no_report(fact: str) -> None:
    facts = counted(dit())
    first, *others = facts.network.linears
    linears = (msgspec.structs.replace(first, **{fact: NOT_RECORDED}), *others)
    report = diagnose(
        msgspec.structs.replace(facts, network=msgspec.structs.replace(facts.network, linears=linears))
    )
    assert not {each.code for each in report.outcomes if each.outcome == "crashed"}
    assert "4096 rows" in text.render(report) or fact == "name"


class OfModalities(nn.Module):
    """Experts of which each has the tokens of its modality, and nothing says how many a token visits."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(512, 512)
        self.modality_experts = nn.ModuleDict(
            {each: nn.Linear(512, 2048) for each in ("image", "text", "sound")}
        )

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        both = self.qkv(torch.cat([image, text], 1))
        image, text = both.split([image.shape[1], text.shape[1]], 1)
        return self.modality_experts["image"](image).mean() + self.modality_experts["text"](text).mean()


def of_modalities() -> Facts:
    batch = {"image": torch.ones(2, 192, 512), "text": torch.ones(2, 64, 512)}
    model = convert_to_float8_training(OfModalities())
    return looked(model, batch, assume_gpu="h100").facts


@pytest.mark.slow
def test_rows_tell_what_experts_do_not() -> None:
    facts = of_modalities()
    assert not recorded(facts.network.linears[0], "flops_share_pct")
    work = [512 * 512, 384 * 2048, 128 * 2048, 0]
    assert shares_are_known(facts)
    assert [flops_share_pct([each], facts) for each in facts.linears()] == pytest.approx(
        [100 * each / sum(work) for each in work]
    )


@pytest.mark.slow
def test_without_their_rows_no_share_is_known() -> None:
    facts = of_modalities()
    rows = {"qkv": facts.workload.rows["qkv"]}
    facts = msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, rows=rows))
    assert not shares_are_known(facts)
    assert flops_share_pct(facts.linears(), facts) == 0.0


class Masked(nn.Module):
    """Every expert sees every token, and the router's choice is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.gate = 2, nn.Linear(512, 4)
        self.experts = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        each = (
            expert(x) * ((chosen == i) * weights).sum(-1, keepdim=True)
            for i, expert in enumerate(self.experts)
        )
        return sum(each, torch.zeros_like(x)).mean()


@pytest.mark.slow
def test_masked_experts_do_the_work_of_all_tokens() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512), Masked()), torch.ones(256, 512)
    with FlopCounterMode(display=False) as counter:
        model(x.requires_grad_()).backward()
    done = sum(counter.get_flop_counts()["Global"].values())
    converted = convert_to_float8_training(model, module_filter_fn=lambda layer, name: "gate" not in name)
    facts = looked(converted, x.detach()).facts
    experts = [each for each in facts.linears() if each.role == "experts"]
    assert flops_share_pct(experts, facts) == pytest.approx(100 * 4 * 6 * 256 * 512 * 512 / done)
