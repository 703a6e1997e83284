"""MOD003 on the real classes of transformers and torchao, a plain float8 parameter, and 4 and 8 bits."""

from collections.abc import Callable

import pytest
import torch
import torchao.dtypes
import torchao.quantization
from msgspec.structs import replace
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from fp8doctor.facts import Converter, Package, recorded
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.examine.models import StoredLinear, low_rank

STORED, QUANTIZED = "fp8-storage-only", "quantized-base"


@pytest.fixture(autouse=True)
def _no_recommended_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", lambda: None)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256), nn.Linear(256, 256)).bfloat16()


def huggingface() -> nn.Module:
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "vocab_size": 512}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
        settings = FineGrainedFP8Config()
        return replace_with_fp8_linear(
            model, modules_to_not_convert=["lm_head"], quantization_config=settings
        )


@pytest.mark.parametrize(
    ("installed", "unsloth", "severity"),
    [
        ("4.57.3", False, "error"),
        ("5.21.1", False, "error"),
        ("5.21.1", True, "warning"),
        ("5.22.0", False, "warning"),
    ],
)
def test_an_fp8_linear_without_a_backward(look: Look, installed: str, unsloth: bool, severity: str) -> None:
    facts = look(huggingface())
    packages = {"transformers": Package(version=installed, imported=True)}
    packages |= {"unsloth": Package(version="2026.10.9", imported=True)} if unsloth else {}
    finding = found_by(STORED, replace(facts, software=replace(facts.software, packages=packages)))
    assert (finding.severity, finding.evidence["stored_linears"]) == (severity, 14)
    assert recorded(finding, "breaks") is (severity == "error"), "layers do not learn"


def test_weights_of_torchao_and_plain_parameters(look: Look) -> None:
    quantize_(model := mlp(), Float8WeightOnlyConfig())
    assert found_by(STORED, look(model)).evidence["stored_linears"] == 2
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert found_by(STORED, look(model)).evidence["stored_linears"] == 1


@pytest.mark.parametrize(
    ("gpu", "rows", "grown", "fits"),
    [("H100", 64, 1, True), (None, 64, 1, False), ("H100", 63, 1, False), ("H100", 64, 2**24, False)],
)
def test_bf16_weights_are_loaded_only_where_they_fit_and_convert(
    look: Look, gpu: str | None, rows: int, grown: int, fits: bool
) -> None:
    facts = replace(look(huggingface()), assumed_gpu=gpu)
    dtypes = {name: count * grown for name, count in facts.network.dtypes.items()}
    network = replace(facts.network, dtypes=dtypes)
    workload = replace(facts.workload, rows={each.name: (rows,) for each in network.linears})
    finding = found_by(STORED, replace(facts, network=network, workload=workload))
    assert (finding.treatment is not None) is fits


def test_a_model_that_is_not_trained_is_only_told(look: Look) -> None:
    finding = found_by(STORED, look(huggingface().requires_grad_(False)))
    assert (finding.severity, finding.treatment) == ("info", None)


class Diffusion(nn.Module):
    """A block, and the embedding of a time step, which sees one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed, self.head = nn.Linear(64, 64), nn.Linear(64, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules=r"blocks\.\d+\.\d+"))


def test_a_lora_on_stored_weights_converts_the_base_alone(look: Look) -> None:
    """Not the adapters, nor the conditioning, whose rows the FP8 GEMM of a weight gradient cannot take."""
    stored = Diffusion().bfloat16()
    quantize_(stored, Float8WeightOnlyConfig())
    facts = look(adapted(stored), tokens=64)
    rows = {each.name: (4,) if "time_embed" in each.name else (64,) for each in facts.network.linears}
    facts = replace(facts, workload=replace(facts.workload, rows=rows), assumed_gpu="H100")
    model = adapted(Diffusion().bfloat16())
    exec(fix_of(STORED, facts).code, {"model": model, "torch": torch})
    converted = [name for name, each in model.named_modules() if type(each).__name__ == "Float8Linear"]
    assert [name.endswith(".base_layer") for name in converted] == [True] * 4
    assert finding_of(STORED, look(model, tokens=64)) is None


def test_a_job_that_stores_its_base_and_checkpoints_is_short_of_memory(look: Look) -> None:
    blocks = [low_rank(StoredLinear(64, 64), "lora_down", "lora_up") for _ in range(2)]
    for model, gpu, fix in (
        (nn.Sequential(*map(checkpoint_wrapper, blocks)), "H100", "compile-stored"),
        (nn.Sequential(*map(checkpoint_wrapper, blocks)), "A100", None),
        (torch.compile(nn.Sequential(*blocks)), "A100", "stored-without-compile"),
        (nn.Sequential(*blocks), "H100", "train-in-fp8"),
    ):
        finding = found_by(
            STORED, replace(look(model, tokens=64, batch=torch.zeros(64, 64).bfloat16()), assumed_gpu=gpu)
        )
        assert (finding.treatment and finding.treatment.name) == fix


def blocks(quantized: Callable[[nn.Linear], None] | None = None) -> nn.Sequential:
    """Two Linears, the second converted, the first quantized if asked for."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16()
    model[1] = convert_to_float8_training(model[1])
    if quantized:
        quantized(model[0])
    return model


def nf4(linear: nn.Linear) -> None:
    home = torchao.quantization if hasattr(torchao.quantization, "to_nf4") else torchao.dtypes
    linear.weight = nn.Parameter(home.to_nf4(linear.weight.data), requires_grad=False)


def int8(linear: nn.Linear) -> None:
    newer = "version" in vars(Int8WeightOnlyConfig)["__dataclass_fields__"]
    quantize_(linear, Int8WeightOnlyConfig(set_inductor_config=False, **({"version": 2} if newer else {})))


@pytest.mark.parametrize("quantize", [nf4, int8])
def test_torchao_weights_beside_fp8(look: Look, quantize: Callable[[nn.Linear], None]) -> None:
    evidence = found_by(QUANTIZED, look(blocks(quantize))).evidence
    assert (evidence["quantized_linears"], evidence["converted"]) == (1, 0)
    assert finding_of(QUANTIZED, look(convert_to_float8_training(blocks()))) is None
    if quantize is nf4:
        model = convert_to_float8_training(blocks(quantize))
        assert found_by(QUANTIZED, look(model)).evidence["converted"] == 1, "it was taken all the same"
        with pytest.raises(NotImplementedError, match="NF4Tensor dispatch"):
            model(torch.ones(16, 256, dtype=torch.bfloat16))


def test_a_conversion_that_found_only_quantized_layers(look: Look) -> None:
    """QLoRA whose filter took nothing: it was told to convert the base."""
    facts = look(nn.Sequential(blocks(int8)[0]))
    asked = Converter(called=True, replaced=0)
    called = replace(facts, training=replace(facts.training, converter=asked))
    assert outcome_of(QUANTIZED, facts) == "not_applicable"
    assert found_by(QUANTIZED, called).evidence["asked_by"] == "convert_to_float8_training"
