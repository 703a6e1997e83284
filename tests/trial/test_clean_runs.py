"""Clean runs leave every bit of the user's, and nothing that runs or lies around."""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor import inspect_model
from fp8doctor.stacks.torch_private import compiled_entries
from research.reliability.everything import differences, everything, settings
from tests.examine.models import llama, lora
from tests.trial.decoder import Decoder, job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_round")]


def float8() -> nn.Module:
    model: Any = job(blocks=2).model
    for block in model.blocks:
        block.compile()
    return model


def checkpointed() -> nn.Module:
    model = llama(tie_word_embeddings=True)
    model.gradient_checkpointing_enable()
    return model


CLEAN: dict[str, Callable[[], nn.Module]] = {
    "float8": float8,
    "wrapped": lambda: torch.compile(Decoder(2)),  # type: ignore[dict-item, return-value]
    "LoRA": lambda: lora(llama(), lora_dropout=0.1),
    "checkpointed": checkpointed,
}

STACKS = {
    *("torchao", "transformers", "peft", "accelerate", "transformer_engine", "unsloth", "bitsandbytes"),
    "deepspeed",
}


def entries(model: nn.Module) -> list[Any]:
    """Dynamo's, of each forward."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    return [compiled_entries(kind.forward.__code__) for kind in kinds if hasattr(kind.forward, "__code__")]


def processes() -> list[str]:
    """Of this process and its threads, the children."""
    tasks = Path("/proc/self/task").iterdir()
    return "".join((task / "children").read_text() for task in tasks).split()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_leaves_every_bit(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import torch._inductor.config

    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    # Inductor's own work is timed and proven elsewhere; every compiled frame is still captured, guarded and
    # cached.
    stance = torch.compiler.set_stance("default", force_backend="eager")
    try:
        model = CLEAN[name]()
        tokens = torch.randint(0, 64, (2, 8))
        batch: Any = {"input_ids": tokens, "labels": tokens} if hasattr(model, "config") else tokens
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for last in (False, True):
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            (output.loss if hasattr(output, "loss") else output.float().mean()).backward()
            optimizer.step()
            if not last:
                optimizer.zero_grad()
        before, mine, children = settings(), everything(model, optimizer, batch), processes()
        code = entries(model)
        running, loaded = {thread.ident for thread in threading.enumerate()}, set(sys.modules)
        capfd.readouterr()

        # All arms of one model; of the others those that come first.
        report = inspect_model(
            model, batch, optimizer=optimizer, device="cpu", budget_s=60 if name == "float8" else 4
        )

        printed = capfd.readouterr()
        assert report.facts.trial.harm == ()
        assert report.facts.trial.arms[0].tried
        assert differences(before, settings()) == []
        assert differences(mine, everything(model, optimizer, batch)) == []
        assert entries(model) == code
        assert {thread.ident for thread in threading.enumerate()} <= running
        assert len(processes()) <= len(children)
        assert (printed.out, printed.err) == ("", "")
        assert list(tmp_path.iterdir()) == []
        assert [path.name for path in temporary.iterdir() if "fp8doctor" in path.name] == []
        new = {each.partition(".")[0] for each in set(sys.modules) - loaded}
        assert new.isdisjoint(STACKS - {"torchao"})
    finally:
        stance.__exit__(None, None, None)
