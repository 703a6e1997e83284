"""The model-file contract, and a sentence for everything that is not in it."""

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import fp8doctor.loading.model_file
from fp8doctor import inspect_model
from fp8doctor.errors import UserError
from fp8doctor.loading.model_file import load

BAD_INPUT = sorted((Path(__file__).parents[1] / "bad_input").glob("*.txt"))

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """`load` is made for a process of its own: what it leaves there is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model file, with torch imported, and return its name."""

    def write_file(text: str, name: str = "net.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\n" + textwrap.dedent(text), encoding="utf-8")
        return name

    return write_file


def mistake(target: str, **options: int) -> UserError:
    with pytest.raises(UserError) as caught:
        load(target, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert "importlib" not in caught.value.detail
    assert f"fp8doctor{os.sep}" not in caught.value.detail
    return caught.value


@pytest.mark.parametrize("path", BAD_INPUT, ids=lambda path: path.stem)
def test_every_bad_file_gets_the_sentence_in_its_first_line(path: Path, tmp_path: Path) -> None:
    text = path.read_text("utf-8")
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    options = {"layers": 2} if path.stem.startswith("layers") else {}
    assert str(mistake("model.py", **options)).startswith(text.partition("\n")[0].removeprefix("# "))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "model.py is empty"),
        (b"\x7fELF\0\0", "model.py"),
        ("name = 'Müller'\n".encode("latin-1"), "model.py, line 1: "),
        (b"# -*- coding: klingon -*-\n", "model.py: unknown encoding: klingon"),
        (b"x = " + b"(" * 1000 + b")" * 1000, "model.py"),
    ],
    ids=["empty", "binary", "latin-1", "unknown encoding", "deep"],
)
def test_bytes_that_are_no_python(data: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_bytes(data)
    assert str(mistake("model.py")).startswith(sentence)


@pytest.mark.parametrize("name", ["notes.txt", "weights.safetensors", "run.sh", "model.py.bak"])
@pytest.mark.parametrize("attribute", ["", ":model"])
def test_a_file_that_does_not_end_in_py_is_not_run(name: str, attribute: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("open('ran', 'w')\nimport torch\nmodel = torch.nn.Linear(8, 8)\n")
    assert str(mistake(name + attribute)).startswith(f"{name} is not a Python file, so it was not run; ")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("modle.py", "no such file: modle.py; did you mean model.py?"),
        ("folder", "folder is a folder; name the file in it"),
        ("model.py:", "nothing stands behind the colon of 'model.py:'; name the model"),
        ("model.py:a b", "'a b' is no name in Python"),
        ("notes.ipynb", "notes.ipynb is a notebook; call fp8doctor.inspect_model(model)"),
        ("saved.json", "saved.json is JSON: 'fp8doctor plan' reads a configuration, 'fp8doctor report'"),
        ("/dev/null", "/dev/null is not a regular file"),
        ("no\x1b[31m\nsuch.py", "no such file: no\\x1b[31m\\nsuch.py"),
        ("no_such_package.model:net", "no module called 'no_such_package.model' here"),
        ("", "no model was named"),
    ],
)
def test_targets_that_name_no_model_file(target: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\nmodel = torch.nn.Linear(8, 8)\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.ipynb").write_text("{}")
    (tmp_path / "saved.json").write_text("{}")
    assert str(mistake(target)).startswith(sentence)


def test_names_are_tried_in_the_order_of_the_contract(write: Write) -> None:
    functions = ["build_model", "get_model", "create_model", "make_model"]
    lines = [f"def {name}(): return torch.nn.Linear({at}, 8)" for at, name in enumerate(functions, 1)]
    lines += ["model = torch.nn.Linear(5, 8)", "other = torch.nn.Linear(6, 8)"]
    for first, name in enumerate([*functions, "model", "other"]):
        job = load(write("\n".join(lines[first:]), f"order{first}.py"))
        assert (job.target.attribute, job.model.in_features) == (name, first + 1)


CANDIDATES = """
    from torch.nn import Transformer

    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)

    class Net(torch.nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.block = Block(width)
"""
MORE = """
    class holder:
        inner = Net()

    instance = Net()

    def make():
        return Net()

    model = torch.nn.Linear(1, 1)
"""


@pytest.mark.parametrize("attribute", ["instance", "Net", "make", "holder.inner"])
def test_an_attribute_names_an_instance_a_class_a_function_or_a_part(attribute: str, write: Write) -> None:
    job = load(f"{write(CANDIDATES + MORE)}:{attribute}")
    assert (job.target.attribute, type(job.model).__name__) == (attribute, "Net")
    only = load(write(CANDIDATES, "only.py"))
    assert (only.target.attribute, type(only.model).__name__) == ("Net", "Net")


SIZABLE = """
import torch
def build_model(layers=8): return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
def build_optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_a_builder_that_takes_layers_can_be_asked_again(write: Write) -> None:
    job = load(write(SIZABLE))
    assert job.rebuild is not None
    model, optimizer = job.rebuild(2)
    assert (len(job.model), len(model)) == (8, 2)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert load(write("def build_model(): return torch.nn.Linear(8, 8)")).rebuild is None
    assert load(write("model = torch.nn.Linear(8, 8)")).rebuild is None


def test_a_model_too_large_to_be_built_is_examined_without_weights(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 8 * (8 * 8 + 8) * 4
    monkeypatch.setattr(fp8doctor.loading.model_file, "_most_weights", lambda: whole)
    assert not next(load(write(SIZABLE)).model.parameters()).is_meta
    monkeypatch.setattr(fp8doctor.loading.model_file, "_most_weights", lambda: whole - 1)
    job = load(write(SIZABLE))
    assert len(job.model) == 8
    assert all(parameter.is_meta for parameter in job.model.parameters())
    assert job.optimizer.param_groups[0]["params"] == list(job.model.parameters())
    assert not next(job.rebuild(2)[0].parameters()).is_meta  # type: ignore[misc]


def test_a_model_and_its_optimizer(write: Write) -> None:
    built = "m = torch.nn.Linear(8, 8)\n    return m, torch.optim.SGD(m.parameters())"
    job = load(write(f"def build_model():\n    {built}"))
    assert type(job.optimizer) is torch.optim.SGD
    assert job.workload.optimizer_source == "given"


OPTIONS = """
    model = torch.nn.Linear(64, 8)
    autocast = torch.bfloat16
    accumulate = 4
    def example_batch(): return {"input": torch.zeros(4, 16, 64)}
    def loss(output, batch): return output.sum()
    def build_optimizer(model): return torch.optim.AdamW(model.parameters())
    def training_step(model, batch): return model(**batch).sum()
"""


def test_everything_optional_is_taken(write: Write) -> None:
    job = load(write(OPTIONS))
    assert job.autocast is torch.bfloat16
    assert callable(job.loss)
    assert callable(job.training_step)
    assert type(job.optimizer) is torch.optim.AdamW
    assert job.batch["input"].shape == (4, 16, 64)
    work = job.workload
    assert (work.batch_size, work.sequence_length, work.tokens, work.accumulate) == (4, 16, 64, 4)
    sources = (work.batch_source, work.loss_source, work.optimizer_source, work.autocast_source)
    assert set(sources) == {"given"}
    assert "change example_batch() in net.py" in str(mistake("net.py", batch=16))


def test_without_options_everything_is_said_to_be_made_up(write: Write) -> None:
    work = load(write("model = torch.nn.Linear(64, 8)"), batch=32).workload
    assert (work.batch_source, work.optimizer_source) == ("made up", "made up")
    assert (work.autocast_source, work.accumulate, work.tokens) == ("none", 1, 32)
    assert str(work.note).startswith("synthetic: 32 x 64 random numbers")


def test_the_file_runs_under_its_own_name_with_its_folder_first(write: Write, tmp_path: Path) -> None:
    write("width = 16", "sub/helper.py")
    file = write(
        """
        import sys
        import helper
        if __name__ == "__main__":
            raise SystemExit("as a script")
        name, path, argv = __name__, sys.path[0], sys.argv
        registered = sys.modules[__name__].__dict__ is globals()
        model = torch.nn.Linear(helper.width, 8)
        model.seen = (name, path, argv, registered, __file__)
    """,
        "sub/decoder.py",
    )
    folder = tmp_path / "sub"
    itself = str(folder / "decoder.py")
    assert load(file).model.seen == ("decoder", str(folder), [itself], True, itself)


@pytest.mark.parametrize("name", ["json.py", "queue.py", "torch.py.py", "my-model.py", "list"])
def test_no_module_is_replaced(name: str, write: Write) -> None:
    import json

    before = dict(sys.modules)
    write("model = torch.nn.Linear(8, 8)\nmodel.name = __name__", name)
    job = load("./" + name)
    assert sys.modules["json"] is json
    assert all(sys.modules[each] is module for each, module in before.items())
    assert sys.modules[job.model.name].__file__ == os.path.abspath(name)


def test_modules_of_packages(write: Write) -> None:
    write("", "pkg/__init__.py")
    write("from .parts import Net\ndef build_model(): return Net()\nother = Net()", "pkg/net.py")
    write("class Net(torch.nn.Linear):\n    def __init__(self): super().__init__(8, 8)", "pkg/parts.py")
    job = load("pkg.net")
    assert (job.target.kind, job.target.name, job.target.attribute) == ("module", "pkg.net", "build_model")
    assert load("pkg.net:other").target.attribute == "other"
    assert load("pkg.parts").target.attribute == "Net"


def test_a_missing_module_is_told_apart_from_a_missing_import(write: Write) -> None:
    write("", "pkg2/__init__.py")
    write("import surely_not_installed", "pkg2/net.py")
    write("x = (", "pkg2/broken.py")
    assert str(mistake("pkg2.nte")).startswith("no module called 'pkg2.nte' here")
    inside = mistake("pkg2.net")
    assert str(inside).startswith("pkg2.net imports surely_not_installed, which this Python does not have")
    assert "pkg2/net.py" in inside.detail
    assert str(mistake("pkg2.broken")).startswith("pkg2.broken raised SyntaxError: '(' was never closed")


def test_the_detail_holds_the_frames_of_the_user(write: Write) -> None:
    inner = "def inner():\n    raise RuntimeError('deep')\n"
    error = mistake(write(f"{inner}def build_model():\n    return inner()"))
    lines = error.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "net.py" in lines[1]
    assert "in build_model" in lines[1]
    assert lines[-1] == "RuntimeError: deep"
    assert error.detail.count("File ") == 2
    huge = mistake(write("raise ValueError('begins ' + 'x' * 1_000_000 + ' ends')", "huge.py"))
    assert len(huge.detail) < 21_000
    assert huge.detail.endswith("ends")


def test_the_data_of_a_live_trainer_are_not_read(tmp_path: Path, forget_accelerate: None) -> None:
    """A stream that is read loses its row, and random states move."""
    transformers = pytest.importorskip("transformers")

    class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            raise AssertionError("the data were read")

    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = transformers.Trainer(torch.nn.Linear(8, 8), arguments, train_dataset=Stream())
    report = inspect_model(trainer, device="cpu", budget_s=10)
    assert report.facts.workload.batch_source == "made up"
