"""MOD004 on real conversions that stopped half-way, each with its reason, and on filters that are as they
should be."""

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.utils import parametrizations
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_linear_utils
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization import quantize_
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from fp8doctor import inspect_model
from fp8doctor.checks.engagement.partial_conversion import SILENT
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from tests.checks.rules import Look, finding_of, found_by
from tests.examine.models import llama_8b

pytestmark = pytest.mark.slow

WIDTH = 2048
PARTIAL = "partial-conversion"


class Block(nn.Module):
    """A residual block with a narrow Linear between the wide ones, as a gate for each of 12 heads is."""

    def __init__(self, gate: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, gate)
        self.down = nn.Linear(WIDTH, WIDTH)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().bfloat16()


def three_blocks() -> nn.Module:
    return on_meta(lambda: nn.Sequential(*(Block() for _ in range(3))))


def fired(facts: Facts, reason: str) -> Finding:
    finding = found_by(PARTIAL, facts)
    assert finding.evidence["reasons"] == (reason,)
    assert finding.severity == "warning"
    return finding


def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": WIDTH, "n_head": 8, "vocab_size": 1024}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize(
    ("build", "reason"),
    [(gpt2, "conv1d-to-linear"), (lambda: nn.TransformerEncoderLayer(WIDTH, 16), "plain-linears")],
    ids=["Conv1D beside a converted head", "projections inside attention"],
)
def test_layers_that_are_no_linear(build: Callable[[], nn.Module], reason: str, look: Look) -> None:
    assert fired(look(convert_to_float8_training(on_meta(build))), reason)


def test_the_printed_filter_leaves_out_what_this_model_has_to_leave_out(look: Look) -> None:
    def build() -> nn.Module:
        wide = {f"up_{i}": nn.Linear(4096, 4096) for i in range(4)}
        return on_meta(lambda: nn.ModuleDict(wide | {"out": nn.Linear(4096, 50)}))

    model = convert_to_float8_training(build(), module_filter_fn=lambda module, name: name == "up_0")
    finding = fired(look(model), "convert-the-rest")
    model = build()
    exec(finding.treatment.code, {"model": model})
    assert [type(each) is nn.Linear for each in model.values()] == [False] * 4 + [True]
    assert finding_of(PARTIAL, look(model)) is None


def test_exact_names_behind_a_compiled_wrapper(look: Look) -> None:
    names = {f"{block}.{layer}" for block in range(3) for layer in ("up", "down")}
    model = three_blocks()
    for i in (1, 2):
        model[i] = torch.compile(model[i], backend="eager")
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in names)
    finding = fired(look(model), "convert-the-rest")
    assert (finding.evidence["first"], finding.evidence["missing_layers"]) == ("1.up", 4)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name.replace("_orig_mod.", "") in names
    )
    assert finding_of(PARTIAL, look(model)) is None


@pytest.mark.parametrize(("rows", "outcome"), [(35, "silent"), (16384, "fires")])
def test_layers_that_gain_less_than_the_model_can_tell_are_not_missed(rows: int, outcome: str) -> None:
    """Lightning's FP8 example trains on 35 tokens, with which converting more gains nothing."""
    width = 1024 if rows == 35 else 2048
    layer = on_meta(lambda: nn.TransformerEncoderLayer(width, 32, 4 * width, batch_first=True))
    convert_to_float8_training(layer, config=Float8LinearConfig(pad_inner_dim=True))
    batch = torch.empty(1, rows, width, dtype=torch.bfloat16, device="meta")
    report = inspect_model(layer, batch, trial=False, assume_gpu="H100")
    assert next(each.outcome for each in report.outcomes if each.code == "MOD004") == outcome


def test_torchtunes_lora_is_no_linear() -> None:
    """From facts alone: torchtune is not a dependency."""
    converted, other = SILENT.network.linears
    tuned = replace(other, use="none", stack="torch", kind="torchtune.modules.peft.lora.LoRALinear")
    network = replace(SILENT.network, linears=(converted, tuned))
    finding = found_by(PARTIAL, replace(SILENT, network=network))
    assert (finding.severity, finding.evidence["reasons"]) == ("info", ("plain-linears",))


@pytest.mark.parametrize(("part", "severity"), [("mlp", "info"), ("self_attn", "warning")])
def test_a_filter_of_the_users_own(look: Look, part: str, severity: str) -> None:
    """Leaving out a fifth is a choice and said; leaving out most is a warning."""
    model = convert_to_float8_training(llama_8b(), module_filter_fn=lambda module, name: part in name)
    finding = found_by(PARTIAL, look(model))
    assert (finding.severity, finding.evidence["reasons"]) == (severity, ("convert-the-rest",))
    convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
    assert finding_of(PARTIAL, look(model)) is None


def test_torchaos_own_filter_is_sensible(look: Look) -> None:
    """It leaves out k_proj and v_proj of an 8B Llama, and the head by name."""
    if not hasattr(float8_linear_utils, "_auto_filter_for_recipe"):
        pytest.skip("this torchao has no filter of its own")
    own = float8_linear_utils._auto_filter_for_recipe("rowwise", ["lm_head"])
    config = Float8LinearConfig.from_recipe_name("rowwise")
    facts = look(convert_to_float8_training(llama_8b(), module_filter_fn=own, config=config))
    left_out = {each.name.rpartition(".")[2] for each in facts.network.linears if each.use == "none"}
    assert left_out == {"k_proj", "v_proj", "lm_head"}
    assert finding_of(PARTIAL, facts) is None


def test_a_computed_weight_is_no_choice_of_a_filter(look: Look) -> None:
    """torchao raises on it, and takes a converted layer whose weight is computed."""
    model = nn.ModuleDict({f"up_{i}": nn.Linear(4096, 4096) for i in range(4)})
    for name in ("up_0", "up_1"):
        parametrizations.weight_norm(model[name])
    with pytest.raises(TypeError, match="cannot assign"):
        convert_to_float8_training(model)
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name in ("up_2", "up_3"))
    assert found_by(PARTIAL, look(model)).evidence["reasons"] == ("plain-linears",)
    parametrizations.weight_norm(model["up_2"])
    assert [each.use for each in look(model).linears()].count("training") == 2


def mixtral() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "vocab_size": 1024, "num_local_experts": 4}
    return on_meta(lambda: MixtralForCausalLM(MixtralConfig(num_experts_per_tok=2, **sizes)))


def test_experts_are_not_seen(look: Look) -> None:
    """Those of other classes are in research/zoo."""
    model = convert_to_float8_training(mixtral(), module_filter_fn=lambda module, name: name != "lm_head")
    finding = fired(look(model), "convert-experts")
    exec(finding.treatment.code, {"model": model})
    assert finding_of(PARTIAL, look(model)) is None


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_whose_product_the_wrapper_does_not_see_are_not_in_fp8(
    implementation: str, look: Look
) -> None:
    model = mixtral()
    experts = {"filter_fn": lambda module, _: type(module).__name__.endswith("Experts")}
    quantize_(model, Float8TrainingOpConfig(), **experts)
    assert [each.use for each in look(model).linears()].count("training") == 2
    model.set_experts_implementation(implementation)
    assert all(each.use == "none" for each in look(model).linears())
