"""What a helper imports early is what the target imports, as it imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8doctor.loading.target import Source, locate
from fp8doctor.worker.early_imports import early_imports

BOTH = ("torch._inductor.compile_fx", "transformers.modeling_utils")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\nfrom transformers import LlamaForCausalLM", BOTH),
        ("import torch.nn as nn, os", BOTH[:1]),
        ("from transformers.models import llama", BOTH[1:]),
        ("import torchvision", ()),
        ("from .torch import nn", ()),
        ("def build_model():\n    import torch", ()),
        ("import os\nos.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'\nimport torch", ()),
        ("import torch\nimport os\nos.environ['HF_HOME'] = 'here'\nimport transformers", BOTH[:1]),
        ("import unsloth, torch", ()),
        ("import torch, unsloth", ()),
        ('"""A model."""\nfrom __future__ import annotations\nimport os\nimport torch', BOTH[:1]),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch, transformers", ()),
        ("import sys\nsys.path.insert(0, 'src')\nimport transformers", ()),
        ("import torch\ntorch.manual_seed(0)\nimport transformers", BOTH[:1]),
        ("import torch\ndef broken(:", ()),
        ("\0", ()),
    ],
)
def test_it_is_what_the_file_says(text: str, found: tuple[str, ...], tmp_path: Path) -> None:
    (file := tmp_path / "model.py").write_text(text)
    assert early_imports(locate(str(file))) == found


@pytest.mark.parametrize("beside", ["transformers.py", "transformers"])
def test_what_lies_beside_the_file_is_not_what_is_installed(beside: str, tmp_path: Path) -> None:
    (file := tmp_path / "model.py").write_text("import torch, transformers")
    (tmp_path / beside).mkdir()
    assert early_imports(locate(str(file))) == BOTH[:1]


def test_a_module_beside_the_file_may_set_the_environment_for_what_follows(tmp_path: Path) -> None:
    (file := tmp_path / "model.py").write_text("import torch\nimport settings\nimport transformers")
    assert early_imports(locate(str(file))) == BOTH
    (tmp_path / "settings.py").write_text("import os; os.environ['HF_HOME'] = '/data'")
    assert early_imports(locate(str(file))) == BOTH[:1]


def test_a_module_and_a_file_that_is_gone_tell_nothing(tmp_path: Path) -> None:
    assert early_imports(locate("json.decoder")) == ()
    assert early_imports(Source(tmp_path / "gone.py", None, None)) == ()
