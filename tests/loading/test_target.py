"""A training script named as a model file is recognized by its text; a model file never is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8doctor.errors import UserError
from fp8doctor.loading.target import Source, refuse_script
from fp8doctor.worker.parent import examine_in_worker

ROOT = Path(__file__).resolve().parents[2]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return self.up(x)
"""

LOOP = """
for batch in loader:
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
"""


def inside(function: str, text: str) -> str:
    return f"def {function}():\n" + "".join(f"    {line}\n" for line in text.splitlines())


GUARD = "\nif __name__ == '__main__':\n    main()\n"

SCRIPTS = {
    "a loop at the top level": NET + "model = Net()\n" + LOOP,
    "a loop in main": NET + inside("main", "model = Net()\n" + LOOP) + GUARD,
    "a main without a guard": NET + inside("main", LOOP) + "\nmain()\n",
    "a loop behind two functions": NET + inside("epoch", LOOP) + inside("main", "epoch()") + GUARD,
    "a Trainer": "from transformers import Trainer\n" + inside("main", "Trainer(m).train()") + GUARD,
    "a Trainer by name": inside("main", "trainer = SFTTrainer(m)\nself_trainer.train()") + GUARD,
    "Lightning": inside("main", "trainer = L.Trainer()\ntrainer.fit(module, loader)") + GUARD,
    "Accelerate": inside("main", LOOP.replace("loss.backward()", "accelerator.backward(loss)")) + GUARD,
    "a function of another file": "from lib import train\n" + inside("main", "train(args)") + GUARD,
    "a function imported in main": inside("main", "from lib import build_model\n" + LOOP) + GUARD,
    "epochs": inside("main", "while True:\n    " + LOOP.replace("\n", "\n    ").rstrip(" ")) + GUARD,
    "settings in objects": "class Settings:\n    width = 8\n\n\nsettings, paths = Settings(), Settings()\n"
    + inside("main", LOOP)
    + GUARD,
}

MODEL_FILES = {
    "two models of a GAN": NET + "maker, judge = Net(), Net()\n" + inside("main", LOOP) + GUARD,
    "a class": NET,
    "a class that is tried": NET + GUARD.replace("main()", "print(Net()(torch.ones(1, 16)))"),
    "a function and a loop": NET + inside("build_model", "return Net()") + inside("main", LOOP) + GUARD,
    "a function and trained weights": NET + inside("build_model", "return Net()") + LOOP,
    "a model outside of main": NET + "model = Net()\n" + inside("main", LOOP) + GUARD,
    "another name outside of main": NET + "net = Net()\n" + inside("main", LOOP) + GUARD,
    "an imported function": "from lib import build_model\n" + inside("main", LOOP) + GUARD,
    "an assigned function": "build_model = partial(Net, 3)\n" + inside("main", LOOP) + GUARD,
    "a function of two kinds": "try:\n    from a import get_model\nexcept ImportError:\n    get_model = Net\n"
    + inside("main", LOOP)
    + GUARD,
    "an imported model": "from lib import model\n" + inside("main", LOOP) + GUARD,
    "an annotated model": NET + "model: nn.Module = make()\n" + inside("main", LOOP) + GUARD,
    "a model and its optimizer": "model, optimizer = make()\n" + inside("main", LOOP) + GUARD,
    "a model on meta": "with torch.device('meta'):\n    model = make()\n" + inside("main", LOOP) + GUARD,
    "a model of torch": "mlp = nn.Sequential(nn.Linear(1, 1))\n" + inside("main", LOOP) + GUARD,
    "a network": "net = resnet18()\n" + inside("main", LOOP) + GUARD,
    "a training step": NET + inside("training_step", "loss = 1\nloss.backward()\noptimizer.step()"),
    "a loop that nobody runs": NET + inside("main", LOOP),
    "a mode": NET + "model = Net()\nmodel.train()\n",
    "a loop that converts": NET + "model = Net()\nfor block in model.modules():\n    block.compile()\n",
    "a Trainer that is built": "trainer = Trainer(model)\n",
    "no Python": "def f(:",
}


def source(folder: Path, text: str, attribute: str | None = None) -> Source:
    (folder / "train.py").write_text(text)
    return Source(folder / "train.py", None, attribute)


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        refuse_script(source(tmp_path, SCRIPTS[kind]))
    assert "'fp8doctor run train.py ARGS...'" in str(refused.value)
    refuse_script(source(tmp_path, SCRIPTS[kind], attribute="model"))


def test_the_line_of_the_training_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it trains as soon as it is loaded \(line 2\)"):
        refuse_script(source(tmp_path, LOOP))


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (SCRIPTS["a loop at the top level"], "name its model: '{path}:model'"),
        (SCRIPTS["a loop in main"], "name its model: '{path}:Net'"),
        (LOOP, "write a build_model()"),
    ],
    ids=["a name", "a class", "neither"],
)
def test_what_is_told_to_be_named_is_there(tmp_path: Path, text: str, ends: str) -> None:
    with pytest.raises(UserError) as refused:
        refuse_script(source(tmp_path, text))
    assert str(refused.value).endswith(ends.format(path=tmp_path / "train.py"))


@pytest.mark.parametrize("kind", MODEL_FILES)
def test_a_model_file(tmp_path: Path, kind: str) -> None:
    refuse_script(source(tmp_path, MODEL_FILES[kind]))


def test_the_model_files_of_this_project(tmp_path: Path) -> None:
    files = [*(ROOT / "tests" / "patients").glob("*.py"), *(ROOT / "tests" / "bad_input").glob("*.txt")]
    assert len(files) > 30
    for file in files:
        refuse_script(Source(file, None, None))


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{LOOP}")
    with pytest.raises(UserError, match="is a training script"):
        examine_in_worker(str(file), progress=lambda text: None)
    assert not (tmp_path / "ran").exists()
