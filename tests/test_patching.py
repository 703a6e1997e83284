"""Fixes placed in scripts: what the changed script does, and which places are refused."""

import difflib
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.float8.float8_linear import Float8Linear

from fp8doctor import load_report
from fp8doctor.cli.fix import Script, placed
from fp8doctor.diagnosis.document import Step
from fp8doctor.errors import UserError
from fp8doctor.finding import Treatment
from research.fixes.scripts import SCRIPTS

ROOT = Path(__file__).parents[1]
RECORDED = [*ROOT.glob("tests/patients/recorded/*.json.gz"), *ROOT.glob("tests/running/recorded/*.json.gz")]

BLOCKS = "for block in model.blocks:\n    block.compile()"
CONVERT = """config = Float8LinearConfig.from_recipe_name("rowwise")
convert_to_float8_training(model, config=config)"""


def step(name: str, code: str) -> Step:
    return Step(code="", mends=(), title=name, treatment=Treatment(name=name, summary=name, code=code))


def fixed(script: str, *steps: Step) -> str:
    """Return the script with these fixes, all of which have to be placed."""
    source = Script(script.encode(), "train.py")
    found = placed(steps, source)
    assert [each.reason for each in found] == [""] * len(steps)
    return source.edited([each.edit for each in found if each.edit])


def refused(script: str, name: str, code: str) -> str:
    (found,) = placed([step(name, code)], Script(script.encode(), "train.py"))
    assert not found.edit
    return found.reason


@functools.cache
def all_fixes() -> tuple[Step, ...]:
    """Return every fix of every recording once."""
    steps = [each for file in RECORDED for each in load_report(file).prescription]
    return tuple({each.treatment.code: each for each in steps}.values())


def all_scripts() -> dict[str, str]:
    files = [
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("tests/patients/*.py"),
        *ROOT.glob("tests/running/ranks/*.py"),
    ]
    texts = {file.name: file.read_text() for file in files}
    return texts | {name: "".join(each.parts().values()) for name, each in SCRIPTS.items()}


@pytest.mark.slow
@pytest.mark.gate("plain_loop.py", "trainer.py", "lora.py", "fsdp2.py", "accelerate")
@pytest.mark.parametrize("name", sorted(all_scripts()))
def test_no_fix_breaks_or_reformats_a_real_script(name: str) -> None:
    text = all_scripts()[name]
    for each in all_fixes():
        source = Script(text.encode(), name)
        (found,) = placed([each], source)
        assert bool(found.edit) != bool(found.reason)
        if found.edit:
            changed = source.edited([found.edit])
            compile(changed, name, "exec")
            gone = [line for line in difflib.ndiff(text.splitlines(), changed.splitlines()) if line[0] == "-"]
            assert len(gone) <= 1  # the end of the last line
            (again,) = placed([each], Script(changed.encode(), name))
            assert "for block" not in each.treatment.code or again.reason


MODEL = """
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 16)
"""
AROUND = {
    "": ("", 0),
    "def main():\n": ("\nresult.append(main())\n", 1),
    "if True:\n    with torch.no_grad():\n": ("\n", 2),
}


def script_of(around: str, tabs: bool, crlf: bool, end: bool) -> str:
    after, depth = AROUND[around]
    optimizer = "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)"
    body = f"config = 1   # mine\nnet = Model()\nresult.append(net)\n{optimizer}"
    lines = "\n".join(f"{'    ' * depth}{line}" if line else "" for line in body.split("\n"))
    text = f"{MODEL}result = []\n{around}{lines}{after}"
    text = text.replace("    ", "\t") if tabs else text
    text = text.rstrip("\n") + ("\n" if end else "")
    return text.replace("\n", "\r\n") if crlf else text


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(AROUND)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.permutations([("convert-rowwise", CONVERT), ("compile-blocks", BLOCKS)]),
)
def test_the_changed_script_does_what_the_fixes_say(
    around: str, tabs: bool, crlf: bool, end: bool, plan: list[tuple[str, str]]
) -> None:
    changed = fixed(script_of(around, tabs, crlf, end), *(step(name, code) for name, code in plan))
    assert (changed.index("from_recipe_name(") < changed.index(".compile(")) == (plan[0][1] == CONVERT)
    assert ("\r\n" in changed) == crlf
    assert "\n" not in changed.replace("\r\n", "") or not crlf
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(changed, "train.py", "exec"), names)
    model = names["result"][0]
    taken = [each for each in model.modules() if isinstance(each, Float8Linear)]
    assert len(taken) == 5
    for each in taken:
        assert each.config.cast_config_input.scaling_granularity.name == "AXISWISE"
    assert all(each._compiled_call_impl is not None for each in model.blocks)


OPTIMIZED = "import torch\nmodel = build()\noptimizer = torch.optim.AdamW(model.parameters())\n"


def test_a_wrapped_model_is_compiled_after_it_is_wrapped() -> None:
    wraps = "model, optimizer = accelerator.prepare(model, optimizer)\n"
    script = f"{OPTIMIZED}{wraps}for batch in data:\n    pass\n"
    assert f"{wraps}for block in model.blocks" in fixed(script, step("compile-blocks", BLOCKS))


LOOP = "import torch\nfor lr in rates:\n    torch.optim.SGD(net.parameters())\n"
LEAVE = "# leave out the conversion to FP8\n" + BLOCKS
CONVERTED = OPTIMIZED.replace("build()", "convert_to_float8_training(build())")
REFUSED = {
    "several models": (f"{OPTIMIZED}other = torch.optim.SGD(head.parameters())", "compile-blocks", BLOCKS),
    "line 5 compiles already": (f"{OPTIMIZED}if flag:\n    torch.compile(model)", "compile-blocks", BLOCKS),
    "line 2 converts already": (CONVERTED, "convert-base-first", CONVERT),
    "no line trains one": ("import torch\nmodel = build()\n", "compile-blocks", BLOCKS),
    "line 4 may wrap model": (f"{OPTIMIZED}model = my_own(model)\n", "compile-blocks", BLOCKS),
    "loop": (LOOP, "compile-blocks", BLOCKS),
    "several statements": (OPTIMIZED.replace("\nopt", "; opt"), "compile-blocks", BLOCKS),
    "a fix of this kind": (OPTIMIZED, "pad-dimensions", "nn.Linear(1008, 4000)"),
    "place a fix": (OPTIMIZED, "compile-a", "export A=1"),
    "not place": (OPTIMIZED, "convert-a", LEAVE),
    "not place a": (OPTIMIZED, "convert-b", 'accelerator = Accelerator(mixed_precision="fp8")\nmodel(0)'),
}
"""Part of the reason -> a script, and a fix that has no certain place in it."""


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_certain_place(why: str) -> None:
    assert why in refused(*REFUSED[why])


def test_letters_beyond_ascii_do_not_move_an_edit() -> None:
    optimizer = "optimizer = torch.optim.AdamW(model.parameters())"
    script = f"name = 'é'; import torch\nmodel = build('éé')\n{optimizer}  # é"
    assert fixed(script, step("compile-blocks", BLOCKS)) == script.replace(
        "optimizer =", f"{BLOCKS}\noptimizer ="
    )


@pytest.mark.parametrize("script", [b"def f(:\n", b"\xff\xfe\n", b"\xef\xbb\xbfx = 1", b"a\0b"])
def test_what_is_not_python(script: bytes) -> None:
    with pytest.raises(UserError, match=r"train\.py"):
        Script(script, "train.py")
