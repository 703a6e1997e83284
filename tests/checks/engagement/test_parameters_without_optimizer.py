"""MOD007 on models that Accelerate, a Trainer, PEFT and torchao converted, and what the printed lines do."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from accelerate.utils import AORecipeKwargs
from msgspec.structs import replace
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from fp8doctor import inspect_model
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Package
from tests import prototypes
from tests.checks import models
from tests.checks.engagement.accelerated import Linear, prepare
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.examine.models import llama, lora
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer

OUTSIDE, UNTIED, UNSAVED = "parameters-without-optimizer", "tied-weights-untied", "cannot-be-saved"
BIAS = "bias-dropped"


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)


@pytest.mark.slow
def test_a_lora_base_that_accelerate_unfroze_is_frozen_again(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    """Research/fixes does so under all wrappers."""
    model = lora(llama())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model, optimizer = prepare(monkeypatch, model, sgd(model.parameters()))
    facts = look(model, optimizer=optimizer)
    assert found_by(OUTSIDE, facts).severity == "error"
    assert found_by(OUTSIDE, facts).evidence["trainable_lora_bases"] == 14
    names = {"model": model, "optimizer": optimizer}
    exec(fix_of(OUTSIDE, facts).code, names)
    assert outcome_of(OUTSIDE, look(names["model"], optimizer=optimizer)) == "silent"
    assert {name for name, each in names["model"].named_parameters() if each.requires_grad} == trained


def test_frozen_layers_that_a_watched_conversion_made_trainable(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    """Without LoRA: only who saw the conversion knows that they were frozen."""
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32))
        model, optimizer = prepare(monkeypatch, model, sgd(model.parameters()))
    finding = found_by(OUTSIDE, look(model, optimizer=optimizer, watched=watch))
    assert finding.evidence["first"] == ("0.weight", "0.bias")


@pytest.mark.parametrize("ordinary", [False, True])
def test_accelerate_wraps_the_weights_that_the_optimizer_holds(
    ordinary: bool, look: Look, forget_accelerate: None
) -> None:
    from accelerate import Accelerator

    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe] if ordinary else [])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    finding = finding_of(OUTSIDE, look(model, optimizer=optimizer))
    assert (finding is None) == ordinary
    if finding:
        assert (finding.evidence["outside_optimizer"], finding.evidence["wrapped_weights"]) == (2, 2)
        assert finding.treatment.name == "no-float8-all-gather"
    model(torch.ones(32, 32)).pow(2).mean().backward()
    weight = getattr(model[1].weight, "_tensor", model[1].weight)
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight, before) != ordinary, "the layer learns"


def test_an_optimizer_that_was_created_too_early(look: Look) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    early, zero = sgd(model.parameters()), ZeroOptimizer(sgd(model.parameters()))
    assert outcome_of(OUTSIDE, look(model)) == "not_applicable", "without an optimizer"
    assert outcome_of(OUTSIDE, look(model, optimizer=early)) == "silent"
    assert outcome_of(OUTSIDE, look(model, optimizer=zero)) == "silent", "DeepSpeed writes it back"
    model[1] = convert_to_float8_training(nn.Linear(32, 32))
    for optimizer in (early, zero):
        finding = found_by(OUTSIDE, look(model, optimizer=optimizer))
        assert finding.evidence["first"] == ("1.weight", "1.bias")
        assert finding.treatment.name == "optimizer-after-conversion"
        assert finding.treatment.kind == "sketch", "its arguments are the user's"
    script = {"model": model, "torch": torch}
    exec(fix_of(OUTSIDE, look(model, optimizer=early)).code.replace("...", "lr=0.25"), script)
    assert type(script["optimizer"]) is torch.optim.SGD
    assert outcome_of(OUTSIDE, look(model, optimizer=script["optimizer"])) == "silent"
    model[1] = nn.Linear(32, 32)
    assert fix_of(OUTSIDE, look(model, optimizer=early)).name == OPTIMIZER_LAST, "BF16 needs it too"
    model[0] = nn.Linear(32, 32)
    assert found_by(OUTSIDE, look(model, optimizer=early)).severity == "info", "without FP8"


def test_accelerate_unties_the_head(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    model = llama(tie_word_embeddings=True)
    assert outcome_of(UNTIED, look(model)) == "not_applicable"
    assert outcome_of(UNTIED, look(convert_to_float8_training(llama(tie_word_embeddings=True)))) == "silent"
    model, _ = prepare(monkeypatch, model, torch.optim.SGD(model.parameters()))
    assert found_by(UNTIED, look(model)).evidence["first"] == "lm_head.weight"
    model.tie_weights()
    assert outcome_of(UNTIED, look(model)) == "silent"
    adapted = lora(convert_to_float8_training(llama(tie_word_embeddings=True)), modules_to_save=["lm_head"])
    assert outcome_of(UNTIED, look(adapted)) == "silent", "PEFT leaves ties alone"


def test_a_tie_that_is_lost_under_watch(look: Look) -> None:
    with ConversionWatch() as watch:
        model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
        model[1].weight = model[0].weight
        model[1] = Linear(32, 64, bias=False)  # a new layer, as Accelerate makes it
    exec(fix_of(UNTIED, look(model, watched=watch)).code, {"model": model})
    assert model[1].weight is model[0].weight
    assert outcome_of(UNTIED, look(model, watched=watch)) == "silent"


def wrapped(model: nn.Module, all_gather: bool = True) -> nn.Module:
    """As Accelerate's torchao path converts on one device."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=all_gather, pad_inner_dim=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "lora_" not in name and "head" not in name
    )


@pytest.mark.slow
def test_what_saves_a_model_decides(look: Look, forget_accelerate: None, tmp_path: Path) -> None:
    from accelerate import Accelerator

    assert found_by(UNSAVED, look(wrapped(llama()))).severity == "error", "it has save_pretrained"
    assert finding_of(UNSAVED, look(wrapped(llama(), all_gather=False))) is None
    plain = look(wrapped(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))))
    assert finding_of(UNSAVED, plain) is None, "torch.save takes these weights"
    adapted = wrapped(lora(llama()))
    assert finding_of(UNSAVED, look(adapted)) is None, "the base is not saved with its adapters"
    adapted.save_pretrained(tmp_path)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    model = accelerator.prepare(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
    assert found_by(UNSAVED, look(model)).severity == "warning", "another format may be asked for"
    with pytest.raises(RuntimeError, match="invalid python storage"):
        accelerator.save_model(model, str(tmp_path))


class Net(nn.Module):
    """As Qwen2: a bias in one projection, none in the other, and a head that stays in 16 bits."""

    def __init__(self, biases: tuple[bool, bool]) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(64, 64, bias=each) for each in biases)
        self.head = nn.Linear(64, 64)


def built(*biases: bool) -> nn.Module:
    torch.manual_seed(0)
    return Net(biases or (True, False)).bfloat16()  # type: ignore[arg-type]


def is_body(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "head"


def mxfp8(model: nn.Module) -> nn.Module:
    return models.mxfp8(model, emulated=True, keep=("head",))  # type: ignore[no-any-return]


def test_mxfp8_layers_lose_their_bias(look: Look) -> None:
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    nn.init.constant_(layer.bias, 100.0)
    models.mxfp8(layer, emulated=True)
    if layer(torch.zeros(32, 64, dtype=torch.bfloat16) + 1e-3).float().mean() > 50:
        pytest.skip("this torchao adds the bias")
    model = mxfp8(built())
    state = torch.random.get_rng_state()
    report = inspect_model(model, trial=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found_by(BIAS, report.facts).evidence["first"] == "up"
    assert report.verdict.status == "layers_do_not_learn"
    code = fix_of(BIAS, report.facts).code
    assert "layer.bias is None" in code, "the real kernel does not lose it either"
    assert finding_of(BIAS, look(mxfp8(built(False, False)))) is None
    float8 = built()
    quantize_(float8, prototypes.float8(float8_linear_recipe="tensorwise"), filter_fn=is_body)
    assert outcome_of(BIAS, look(float8)) == "not_applicable"


def test_the_bias_goes_by_the_version(look: Look) -> None:
    facts = look(mxfp8(built()))
    for version, outcome in (("0.18.0", "fires"), ("0.19.0", "unknown")):
        packages = {"torchao": Package(version=version, imported=True)}
        there = replace(facts, software=replace(facts.software, packages=packages))
        assert outcome_of(BIAS, there) == outcome
