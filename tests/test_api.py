"""`inspect_model` says what it finds, refuses in a sentence, and leaves no trace."""

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

import fp8doctor
from fp8doctor import inspect_model, load_report
from fp8doctor.cli.pages import DEMO
from fp8doctor.report import Report
from research.reliability.everything import differences, everything, settings
from tests.looked import looked


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.scale


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of training: gradients, optimizer state, hooks, mixed flags."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randint(100, (2, 16))).mean().backward()
    optimizer.step()
    model.blocks[0].eval()
    model.embed.weight.requires_grad_(False)
    model.blocks[1].register_forward_hook(lambda module, args, output: output)
    model.register_full_backward_pre_hook(lambda module, gradient: None)
    return model, optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": torch.zeros(2, 16, dtype=torch.int64)}, {"select": "NOSUCH"}, {"autocast": "bf16"}],
    ids=str,
)
def test_no_trace_is_left_when_it_returns_and_when_it_raises(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained()
    mine, process = everything(model, optimizer), settings()
    try:
        inspect_model(model, optimizer=optimizer, **options)
    except (TypeError, ValueError):
        assert options
    assert differences(mine, everything(model, optimizer)) == []
    assert differences(process, settings()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_model_trains_on_as_if_nothing_had_been(capfd: pytest.CaptureFixture[str]) -> None:
    losses = []
    for inspected in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            if inspected:
                inspect_model(model, optimizer=optimizer)
            loss = model(torch.randint(100, (2, 16))).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert capfd.readouterr().out == ""


def test_it_reports_on_what_it_was_given() -> None:
    model, optimizer = trained()
    batch = torch.zeros(2, 16, dtype=torch.int64)
    report = inspect_model(
        model,
        batch,
        loss=lambda output, batch: output.mean(),
        optimizer=optimizer,
        autocast=torch.bfloat16,
        accumulate=4,
    )
    assert isinstance(report, Report)
    facts = report.facts
    assert (facts.target.kind, facts.target.name) == ("live", "Net")
    given = ("batch_source", "loss_source", "optimizer_source", "autocast_source")
    assert {getattr(facts.workload, name) for name in given} == {"given"}
    assert (facts.workload.tokens, facts.workload.accumulate) == (32, 4)
    assert facts.training.optimizer == "torch.optim.adamw.AdamW"
    assert len(facts.network.linears) == 4


def test_without_a_batch_one_is_made_up_and_said_to_be() -> None:
    workload = inspect_model(Net()).facts.workload
    assert (workload.batch_source, workload.tokens, workload.loss_source) == ("made up", 16384, "mean")
    assert workload.note == "synthetic: 8 x 2048 random tokens of a vocabulary of 100"


def test_the_name_of_the_model_is_that_inside_its_wrappers() -> None:
    assert inspect_model(torch.compile(Net())).facts.target.name == "Net"


def test_an_optimizer_that_would_have_to_be_built_is_not_built() -> None:
    def build(parameters: Any) -> torch.optim.Optimizer:
        raise AssertionError("called")

    facts = inspect_model(Net(), optimizer=build).facts
    assert (facts.workload.optimizer_source, facts.training.optimizer) == ("made up", None)


def test_the_assumed_gpu_is_kept_by_its_name() -> None:
    assert inspect_model(Net(), assume_gpu="rtx 4090").facts.assumed_gpu == "RTX4090"
    assert inspect_model(Net()).facts.assumed_gpu is None


@pytest.mark.parametrize("codes", ["CMP, SHP", ["CMP", "SHP"], ("CMP,SHP",)])
def test_codes_are_selected_and_ignored(codes: Any) -> None:
    assert {outcome.code[:3] for outcome in inspect_model(Net(), select=codes).outcomes} == {"CMP", "SHP"}
    ignored = {outcome.code[:3] for outcome in inspect_model(Net(), ignore=codes).outcomes}
    assert ignored
    assert not ignored & {"CMP", "SHP"}


Call = Callable[[], object]

REFUSED: dict[str, tuple[type[Exception], Call]] = {
    "class Net": (TypeError, lambda: inspect_model(Net)),
    "fp8doctor model.py": (TypeError, lambda: inspect_model("model.py")),
    "NoneType": (TypeError, lambda: inspect_model(None)),
    "ReLU": (ValueError, lambda: inspect_model(nn.ReLU())),
    "not list": (TypeError, lambda: inspect_model(Net(), [1, 2])),
    "loss": (TypeError, lambda: inspect_model(Net(), loss=3)),  # type: ignore[arg-type]
    "training_step": (TypeError, lambda: inspect_model(Net(), training_step="step")),  # type: ignore[arg-type]
    "optimizer": (TypeError, lambda: inspect_model(Net(), optimizer="adamw")),
    "autocast has": (TypeError, lambda: inspect_model(Net(), autocast=True)),
    "torch.bfloat16": (ValueError, lambda: inspect_model(Net(), autocast=torch.float8_e4m3fn)),
    "accumulate has to be 1": (ValueError, lambda: inspect_model(Net(), accumulate=0)),
    "accumulate has to be a whole": (TypeError, lambda: inspect_model(Net(), accumulate=1.5)),  # type: ignore[arg-type]
    "A100": (ValueError, lambda: inspect_model(Net(), assume_gpu="TPU")),
    "assume_gpu": (TypeError, lambda: inspect_model(Net(), assume_gpu=100)),  # type: ignore[arg-type]
    "XYZ": (ValueError, lambda: inspect_model(Net(), select="XYZ")),
    "select": (TypeError, lambda: inspect_model(Net(), select=3)),  # type: ignore[arg-type]
    "ignore": (TypeError, lambda: inspect_model(Net(), ignore=[3])),  # type: ignore[list-item]
    "budget_s": (ValueError, lambda: inspect_model(Net(), budget_s=-1)),
    "layers": (ValueError, lambda: inspect_model(Net(), layers=0)),
    "no list of repeated blocks": (ValueError, lambda: inspect_model(nn.Linear(2, 2), layers=1)),
    "nowhere.json": (ValueError, lambda: load_report("nowhere.json")),
    "not a regular file": (ValueError, lambda: load_report("/")),
    "neither.json": (ValueError, lambda: fp8doctor.compare("neither.json", DEMO)),
    "no.jsonl": (ValueError, lambda: fp8doctor.load_health("no.jsonl")),
    "H300": (ValueError, lambda: fp8doctor.plan(DEMO, "H300")),
    "model.py": (ValueError, lambda: fp8doctor.plan("model.py")),
    "int cannot be planned": (ValueError, lambda: fp8doctor.plan(3)),
    "not str": (TypeError, lambda: load_report(DEMO).prescription.apply("model.pt")),  # type: ignore[arg-type]
    "no/such": (ValueError, lambda: load_report(DEMO).save("no/such/folder.json")),
    "severity": (ValueError, lambda: load_report(DEMO).raise_for("grave")),  # type: ignore[arg-type]
}
"""What the sentence names -> the kind of exception, and the call."""


@pytest.mark.parametrize("named", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(named: str) -> None:
    """Below the caller's line stands one of ours, which notebooks leave out."""
    kind, call = REFUSED[named]
    with pytest.raises(kind) as caught:
        call()
    (sentence,) = str(caught.value).splitlines()
    assert named in sentence
    frames = [each.filename for each in traceback.extract_tb(caught.value.__traceback__)]
    assert [Path(each).name for each in frames if "fp8doctor/" in each and "/tests/" not in each] == [
        "errors.py"
    ]
    assert caught.value.__suppress_context__


@pytest.fixture
def trainers(tmp_path: Path, forget_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers with TrainingArguments that write into a folder of the test, on a CPU."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    own = {"use_cpu": True, "report_to": []}

    def arguments(**settings: Any) -> Any:
        return transformers.Seq2SeqTrainingArguments(str(tmp_path), **own, **settings)

    return SimpleNamespace(
        Trainer=transformers.Trainer, Seq2Seq=transformers.Seq2SeqTrainer, arguments=arguments
    )


def llama() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=64))


def test_a_trainer_brings_its_model_its_optimizer_and_its_arguments(trainers: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    arguments = trainers.arguments(bf16=True, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    facts = inspect_model(trainers.Trainer(model, arguments, optimizers=(optimizer, None))).facts
    assert (facts.target.name, facts.training.optimizer) == ("Net", "torch.optim.sgd.SGD")
    assert (facts.training.trainer.bf16, facts.training.autocast) == (True, "bfloat16")
    assert (facts.workload.batch_size, facts.workload.accumulate) == (2, 4)
    assert facts.workload.autocast_source == "given"
    assert facts.training.accelerate.mixed_precision == "bf16"


@pytest.mark.parametrize(("asked", "by_hand"), [(True, False), (True, True), (False, False)])
def test_what_a_trainer_turns_on_in_train_only_is_told(asked: bool, by_hand: bool, trainers: Any) -> None:
    """`inspect_model` does not begin the training of others."""
    model = llama()
    if by_hand:
        model.gradient_checkpointing_enable()
    trainer = trainers.Trainer(model, trainers.arguments(gradient_checkpointing=asked))
    said = " ".join(str(inspect_model(trainer, trial=False)).split())
    assert ("checkpointing off until train()" in said) == (asked and not by_hand)


@dataclasses.dataclass
class Graph:
    """A batch of a user's own class."""

    nodes: torch.Tensor
    edges: torch.Tensor


class OnGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_nodes, self.of_edges = nn.Linear(32, 16), nn.Linear(48, 16)

    def forward(self, batch: Graph) -> torch.Tensor:
        return self.of_nodes(batch.nodes).mean() + self.of_edges(batch.edges).mean()


@pytest.mark.slow
def test_a_batch_of_a_users_own_class_is_the_one_argument() -> None:
    batch = Graph(torch.ones(64, 32), torch.ones(256, 48))
    facts = looked(convert_to_float8_training(OnGraphs()), batch).facts
    assert facts.workload.rows == {"of_nodes": (64,), "of_edges": (256,)}


@pytest.mark.slow
def test_a_list_is_for_a_training_step_to_take_apart() -> None:
    """A DataLoader makes a list of pairs."""

    def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)))
    pair = [torch.ones(64, 32), torch.ones(64, 16)]
    assert looked(model, pair, training_step=step).facts.workload.rows == {"0": (64,)}
    with pytest.raises(TypeError, match="not list"):
        inspect_model(model, pair, trial=False)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_scripted_part_is_named_and_the_model_still_examined(how: str, whole: bool) -> None:
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    part = torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.ones(2, 16))
    model = part if whole else nn.Sequential(nn.Linear(16, 16), part)
    report = inspect_model(model, torch.ones(8, 16), device="cpu", budget_s=1, progress=False)
    assert report.facts.trial.arms == ()
    assert "torch.jit" in report.facts.trial.reason
    assert report.verdict.status in ("no_fp8", "open")


class Lazy(nn.Module):
    """A model whose first layer has no size before a batch has gone through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch)


@pytest.mark.parametrize("batch", [None, torch.randn(4, 4)])
def test_a_lazy_model_that_was_not_run_is_looked_at_and_not_timed(batch: torch.Tensor | None) -> None:
    report = inspect_model(Lazy(), batch, device="cpu", budget_s=1, progress=False)
    assert len(report.facts.network.linears) == 1
    assert (report.facts.trial.reason or "").startswith("its parameter layers.0.weight has no size before")
    assert not report.facts.trial.arms


@pytest.mark.slow
@pytest.mark.parametrize("trial", [True, False])
def test_a_model_that_is_nested_too_deep_is_refused_in_a_sentence(trial: bool) -> None:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(3000):
        outer = nn.Module()
        outer.inner, model = model, outer
    with pytest.raises(ValueError, match=r"nests its modules deeper .* sys\.setrecursionlimit"):
        inspect_model(model, device="cpu", trial=trial, progress=False)
