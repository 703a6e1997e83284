"""A training script named as a model file is recognized by its text; a model file never is taken for one."""

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
    "a main without a guard": NET + inside("main", LOOP) + "\nmain()\n",
    "a loop behind two functions": NET + inside("epoch", LOOP) + inside("main", "epoch()") + "\nmain()\n",
    "a Trainer": "from transformers import Trainer\n" + inside("main", "Trainer(m).train()") + "\nmain()\n",
    "a Trainer by name": "trainer = SFTTrainer(m)\nself_trainer.train()",
    "Lightning": "trainer = L.Trainer()\ntrainer.fit(module, loader)",
    "Accelerate": LOOP.replace("loss.backward()", "accelerator.backward(loss)"),
    "a function of another file": "from lib import train\ntrain(args)",
}

MODEL_FILES = {
    "a class": NET,
    "a function and trained weights": NET + inside("build_model", "return Net()") + LOOP,
    "an imported function": "from lib import build_model\n" + LOOP,
    "an assigned function": "build_model = partial(Net, 3)\n" + LOOP,
    "a loop under the guard": NET + inside("main", LOOP) + GUARD,
    "a training step": NET + inside("training_step", "loss = 1\nloss.backward()\noptimizer.step()"),
    "a mode": NET + "model = Net()\nmodel.train()\n",
    "a loop that converts": NET + "model = Net()\nfor block in model.modules():\n    block.compile()\n",
    "a Trainer that is built": "trainer = Trainer(model)\n",
    "no Python": "def f(:",
}


def source(folder: Path, text: str, attribute: str | None = None) -> Source:
    (folder / "train.py").write_text(text)
    return Source(folder / "train.py", None, attribute)


def refused(given: Source) -> str:
    try:
        refuse_script(given)
    except UserError as error:
        return str(error) if "training script" in str(error) else ""
    return ""


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'fp8doctor run train.py ARGS...'" in refused(source(tmp_path, SCRIPTS[kind]))
    assert not refused(source(tmp_path, SCRIPTS[kind], attribute="model"))


def test_the_line_of_the_training_is_named(tmp_path: Path) -> None:
    assert "(line 2)" in refused(source(tmp_path, LOOP))


def test_a_model_file(tmp_path: Path) -> None:
    assert [kind for kind, text in MODEL_FILES.items() if refused(source(tmp_path, text))] == []
    files = [*(ROOT / "tests" / "patients").glob("*.py"), *(ROOT / "tests" / "bad_input").glob("*.txt")]
    assert len(files) > 30
    assert [file.name for file in files if refused(Source(file, None, None))] == []


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{LOOP}")
    with pytest.raises(UserError, match="is a training script"):
        examine_in_worker(str(file), progress=lambda text: None)
    assert not (tmp_path / "ran").exists()
