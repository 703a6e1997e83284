"""Which arms the facts of a real job ask for, on which base, and that each of them really runs."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.diagnosis.diagnose import hypotheses
from fp8doctor.diagnosis.document import Step, read_saved
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Gpu, Target, Workload
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.recipes import FASTEST
from fp8doctor.trial.copies.step import Place, Variant, VariantPlan, as_it_is
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import VariantPlanner, plan_variants
from tests.examine.models import Stacked, llama
from tests.stand_ins import transformer_engine as te
from tests.trial.conducted import conduct

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round", "one_thread")]

TESTS = Path(__file__).parents[1]
PATIENTS = TESTS / "patients" / "recorded"
TOKENS = {"input_ids": torch.arange(32).reshape(2, 16), "labels": torch.arange(32).reshape(2, 16)}
OFF = "checkpointing-off"
BASELINES = {"as_is": None, "bf16": None, "bf16_compiled": None, "bf16_again": "bf16"}


def job(model: nn.Module, **fields: Any) -> Job:
    return Job(
        **{
            "model": model.train(),
            "target": Target(),
            "workload": Workload(accumulate=1),
            "batch": TOKENS,
            **fields,
        }
    )


def float8(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: "head" not in name and "lora" not in name
    )


def plans(of: Job, *proposed: str) -> dict[str, VariantPlan]:
    cures = [Treatment(name=name, summary="s", code="c") for name in proposed]
    steps = [Step(code="AAA001", mends=("AAA001",), title="t", treatment=each) for each in cures]
    return {plan.name: plan for plan in plan_variants(examine(of), steps, of)}


def test_eager_fp8_with_its_cure_is_explored_on_top_of_it() -> None:
    found = plans(job(float8(Stacked().bfloat16())), "compile-blocks")
    recipes = {"recipe-rowwise": "prescribed", "recipe-rowwise-with-gw-hp": "prescribed"}
    assert {name: plan.base for name, plan in found.items()} == {
        **BASELINES,
        "prescribed": "as_is",
        **recipes,
    }
    assert list(found)[:4] == ["as_is", "bf16", "prescribed", "bf16_compiled"]
    assert [name for name, plan in found.items() if plan.place is Place.REST] == list(recipes)
    assert found["prescribed"].treatments == ("compile-blocks",)
    assert found["recipe-rowwise"].treatments == ("recipe-rowwise",)


def test_bf16_with_the_changes_that_help_it_too_comes_before_the_prescription() -> None:
    """Its build is the shorter one. FP8 left a Gemma 2B with LoRA no time for it, its best end (H100)."""
    model = float8(llama(attn_implementation="eager").bfloat16())
    of = job(model)
    found = plans(of, "compile-blocks", "attention-sdpa")
    assert list(found)[2:4] == ["bf16_prescribed", "prescribed"]
    alike = found["bf16_prescribed"]
    assert (alike.treatments, alike.base, alike.fp8) == (("attention-sdpa",), "bf16_compiled", False)
    made = alike.make(Variant(model=copy.deepcopy(model), batch=TOKENS)).model
    assert made.config._attn_implementation == "sdpa"
    assert not [each for each in made.modules() if "Float8" in type(each).__name__]
    assert "bf16_prescribed" not in plans(of, "compile-blocks")


def test_checkpointing_that_memory_does_not_need_is_off_in_the_plan_and_its_bf16() -> None:
    """Alone it came last, and no budget reached it: LoRA of a 3B, 8.4 of 140 GiB used (H200)."""
    model = float8(llama(use_cache=False).bfloat16())
    model.gradient_checkpointing_enable()
    of = job(model)
    for gib, planned in ((140.0, True), (0.001, False)):
        gpu = Gpu(name="a GPU", vendor="nvidia", compute_capability="9.0", memory_gib=gib, visible=True)
        rows = {layer.name: (32,) for layer in examine(of).network.linears}
        work = Workload(accumulate=1, batch_size=2, sequence_length=16, tokens=32, rows=rows)
        facts = msgspec.structs.replace(examine(of), gpus=(gpu,), workload=work)
        found = {plan.name: plan for plan in plan_variants(facts, hypotheses(facts), of)}
        for name in ("prescribed", "bf16_without_checkpointing"):
            assert (
                name in found and found[name].place is Place.PLAN and OFF in found[name].treatments
            ) == planned


def test_bf16_with_checkpointing_is_tried_in_fp8_without_it_and_with_a_fused_optimizer() -> None:
    """A Helium, checkpointed in BF16: 321 ms, in FP8 202, without checkpointing 162 (H200)."""
    model = llama(use_cache=False).bfloat16()
    model.gradient_checkpointing_enable()
    found = plans(job(model, optimizer=torch.optim.AdamW(model.parameters())))
    fp8, bf16 = found["float8_tensorwise_without_checkpointing"], found["bf16_with_checkpointing-off"]
    assert (bf16.base, bf16.treatments) == ("bf16_compiled", ("fused-optimizer", OFF))
    assert fp8.treatments == (*bf16.treatments, "convert-tensorwise", "compile-blocks")
    assert {fp8.place, bf16.place} == {Place.NO_CHECKPOINTING}
    assert found["float8_tensorwise"].treatments[0] == "fused-optimizer"


def on_gpu(facts: Facts, compute_capability: str, cuda: str) -> Facts:
    gpu = Gpu(name="a GPU", vendor="nvidia", compute_capability=compute_capability, visible=True)
    software = msgspec.structs.replace(facts.software, cuda=cuda)
    return msgspec.structs.replace(facts, gpus=(gpu,), software=software)


@pytest.mark.parametrize(
    ("compute_capability", "cuda", "own", "tried"),
    [
        ("9.0", "13.0", te.DelayedScaling, ["te-current", "te-block"]),
        ("9.0", "12.8", te.DelayedScaling, ["te-current"]),
        ("10.0", "13.0", te.MXFP8BlockScaling, ["te-delayed", "te-current", "te-block"]),
        ("8.0", "13.0", te.DelayedScaling, []),
        ("9.0", "13.0", None, ["te-current", "te-block"]),
    ],
)
def test_transformer_engine_is_tried_in_the_recipes_that_are_legal_here(
    compute_capability: str, cuda: str, own: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    of = job(nn.Sequential(te.Linear(32, 32), te.Linear(32, 32)))
    if own:
        with te.autocast(recipe=own()):
            of.model(torch.ones(4, 32))
    found = {plan.name: plan for plan in plan_variants(on_gpu(examine(of), compute_capability, cuda), [], of)}
    assert [name for name in found if name.startswith("te-")] == tried
    assert {found[name].base for name in tried} <= {"as_is" if own else "prescribed"}
    assert own or found["prescribed"].treatments == ("te-autocast",)


def test_a_model_compiled_as_one_is_tried_block_by_block() -> None:
    model = float8(Stacked().bfloat16(), "rowwise")
    model.compile()
    found = plans(job(model))
    assert {name: plan.base for name, plan in found.items()} == {
        **BASELINES,
        "bf16_as_compiled": None,
        "compile-blocks": "as_is",
        "recipe-tensorwise": "compile-blocks",
        "recipe-rowwise-with-gw-hp": "compile-blocks",
    }
    assert list(found)[-3:] == ["compile-blocks", "recipe-tensorwise", "recipe-rowwise-with-gw-hp"]
    by_block = {name for name, plan in found.items() if plan.by_block}
    assert by_block == {"bf16_compiled", *list(found)[-3:]}
    cured = plans(job(model), "compile-blocks")["recipe-tensorwise"]
    assert (cured.base, cured.by_block) == ("prescribed", True)
    assert not plans(job(model), "compile-model")["recipe-tensorwise"].by_block


def test_the_fastest_recipe_decides_where_it_is_on_top_of_the_plan() -> None:
    model = float8(Stacked().bfloat16(), "rowwise")
    cured = plans(job(model), "compile-blocks")
    assert [name for name, plan in cured.items() if plan.place is Place.PLAN] == [FASTEST[0], "prescribed"]
    model.compile()
    assert not plans(job(model))[FASTEST[0]].place.decides  # changes another form of the step


def test_own_blocks_around_layers_of_transformer_engine_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ViT of torch's attention and te.LayerNormMLP, eager: 107 ms, compiled by block 94 (H200). So another
    recipe has to win there: of a Phi in te.Linear, eager 138 ms, by block 108 where its own took 112."""
    te.install(monkeypatch)

    class Block(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    of = job(nn.Sequential(*(Block(nn.Linear(32, 32), te.LayerNormMLP(32, 48)) for _ in range(3))))
    with te.autocast():
        of.model(torch.ones(4, 32))
    found = plans(of)
    assert found["compile-blocks"].place.decides
    assert {found[name].base for name in ("compile-blocks", "te-current")} == {"as_is", "compile-blocks"}
    assert found["te-current"].by_block


@pytest.mark.parametrize(("width", "fixed"), [(64, True), (32, False)])
def test_towers_of_one_class_are_compiled_for_their_own_sizes(width: int, fixed: bool) -> None:
    """Else torch compiles the second one for any size: FP8 took 207 ms in the place of 140 (H200)."""

    class Block(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    model = nn.ModuleList(
        nn.ModuleList(Block(nn.Linear(each, each)) for _ in range(2)) for each in (32, width)
    )
    for block in (*model[0], *model[1]):
        block.compile()
    fix = describe("compile-blocks", examine(job(model.bfloat16())))
    assert fix is not None
    assert (".compile(dynamic=False)" in (fix.code or "")) is fixed
    assert ("float8_tensorwise_as_compiled" in plans(job(model.bfloat16()))) is fixed


def test_fp8_is_tried_in_every_form_in_which_bf16_is() -> None:
    """A student compiled by block, an eager teacher: only BF16 was timed with both compiled (H200).
    FP8 with both compiled is the faster one."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = float8(Stacked().bfloat16()), Stacked().bfloat16()

    model = Pair()
    for block in model.student.get_submodule("blocks").children():
        block.compile()
    found = plans(job(model))
    forms = {"bf16_as_compiled", "bf16_compiled", "compile-blocks"}
    assert forms <= set(found)
    assert found["compile-blocks"].by_block
    for block in model.teacher.get_submodule("blocks").children():
        block.compile()
    assert forms & set(plans(job(model))) == {"bf16_compiled"}


OTHER = "float8_rowwise_with_gw_hp"


def test_a_model_without_fp8_is_tried_in_two_recipes() -> None:
    found = plans(job(Stacked().bfloat16()))
    assert list(found) == [
        "as_is",
        "float8_tensorwise",
        "bf16_compiled",
        "bf16_again",
        "float8_rowwise_with_gw_hp",
    ]
    assert found["float8_rowwise_with_gw_hp"].treatments == ("convert-rowwise_with_gw_hp", "compile-blocks")
    in_fp32 = plans(job(Stacked()))["float8_rowwise_with_gw_hp"]
    assert in_fp32.treatments == ("autocast-bf16", "convert-rowwise_with_gw_hp", "compile-blocks")


def test_a_conversion_takes_along_what_helps_bf16_too_and_so_does_its_bf16() -> None:
    found = plans(job(llama(attn_implementation="eager").bfloat16()), "attention-sdpa")
    assert found["float8_tensorwise"].treatments[:2] == ("attention-sdpa", "convert-tensorwise")
    alike = found["bf16_prescribed"]
    assert (alike.treatments, alike.base) == (("attention-sdpa",), "bf16_compiled")
    assert found["attention-sdpa"].base == "as_is"


def test_a_bf16_user_gets_fp8_before_other_forms_of_bf16() -> None:
    """Seen on an H200: three forms of BF16 were timed, one of them twice, and no FP8, with 30 s left. One
    graph of FP8 compiles for minutes there: it decides nothing that FP8 by block does not."""
    found = plans(job(torch.compile(Stacked().bfloat16(), backend="eager")))
    last = [
        "float8_rowwise_with_gw_hp",
        "float8_tensorwise_as_compiled",
        "float8_rowwise_with_gw_hp_as_compiled",
    ]
    assert list(found) == ["as_is", "float8_tensorwise", "bf16_compiled", "bf16", "bf16_again", *last]
    assert [name for name, plan in found.items() if not plan.place.decides] == last


@pytest.mark.parametrize(
    ("folder", "recorded", "expected"),
    [
        ("patients", "h200-few_tokens", True),
        ("patients", "h200-llama_8b_float8", False),
        ("sharded", "h100-fsdp2_torchao", False),
    ],
)
def test_one_graph_is_planned_if_the_host_is_expected_to_set_the_pace(
    folder: str, recorded: str, expected: bool
) -> None:
    """For it all is cut shallower, so not where the cost model knows nothing."""
    facts = read_saved(TESTS / folder / "recorded" / f"{recorded}.json.gz")[0]
    planned = VariantPlanner(facts, job(Stacked().bfloat16())).whole(
        VariantPlan("as_is", as_it_is, fp8=True), {}
    )
    assert [each.name for each in planned] == (["bf16_whole", "compile-model"] if expected else [])
    assert all(each.if_host_waits and each.place is Place.OTHER_BF16 for each in planned)


def test_fp32_without_autocast_is_compared_with_bf16_and_tried_in_it() -> None:
    found = plans(job(float8(Stacked())))
    assert found["bf16"].treatments == found["bf16_compiled"].treatments == ("autocast-bf16",)
    assert [name for name, plan in found.items() if plan.place is Place.REST] == ["autocast-bf16"]
    under = plans(job(float8(Stacked()), autocast=torch.bfloat16))
    assert under["bf16"].treatments == ()
    assert not any(plan.place is Place.REST for plan in under.values())


SEEN: list[torch.dtype] = []


class Told(Stacked):
    """Tells the dtype of its output."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        SEEN.append((output := super().forward(tokens)).dtype)
        return output


@pytest.mark.parametrize("name", ["bf16", "autocast-bf16"])
def test_fp32_arms_run_in_bf16(name: str) -> None:
    of = job(float8(Told()), batch=torch.arange(32).reshape(2, 16))
    plan = plans(of)[name]
    SEEN.clear()
    (arm,) = conduct(of, ["blocks"], [plan], TrialRun(torch.device("cpu"), Budget(600))).arms
    assert arm.tried
    assert SEEN[0] is torch.float32, "the first step is as it is"
    assert {*SEEN[1:]} == {torch.bfloat16}
    assert {parameter.dtype for parameter in of.model.parameters()} == {torch.float32}
