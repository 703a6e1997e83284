"""Checkpoints that the real libraries wrote, read by their headers; the printed lines are carried out."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from fp8doctor.checkpoints.conclusions import Conclusions, conclude, differences
from fp8doctor.checkpoints.headers import read_checkpoint, read_pickle
from fp8doctor.errors import UserError
from tests.cli.command import fp8doctor

F8 = torch.float8_e4m3fn


def told(path: Path) -> Conclusions:
    return conclude(read_checkpoint(path))


def kinds(path: Path) -> list[tuple[str, str, int]]:
    return [(each.what, each.scaling, each.count) for each in told(path).kinds]


def problems(path: Path) -> str:
    return "\n".join(each.text for each in told(path).problems)


def line_about(path: Path, word: str) -> str:
    """Return the printed line of the statement with a word."""
    found = told(path)
    (code,) = (each.code for each in (*found.problems, *found.export) if word in each.text)
    return code


def linear(*, quantized: bool = False, gathered: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))
    if quantized:
        quantize_(model, Float8WeightOnlyConfig(set_inductor_config=False))
    if gathered:
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    return model


@pytest.mark.parametrize(
    ("scale", "name", "scaling"),
    [
        (torch.ones(2, 3), "weight_scale_inv", "one scale per 128 x 128 block"),
        (torch.ones(256, 1), "weight_scale", "one scale per row"),
        (torch.ones(1), "weight_scale", "one scale per tensor"),
        (torch.ones(()), "weight_scale", "one scale per tensor"),
        (torch.ones(5), "other", "no scale stored"),
    ],
)
def test_scales_of_safetensors(scale: torch.Tensor, name: str, scaling: str, tmp_path: Path) -> None:
    weight = torch.zeros(256, 384).to(F8)
    save_file(
        {"q.weight": weight, f"q.{name}": scale, "head.weight": torch.ones(2)}, tmp_path / "m.safetensors"
    )
    assert kinds(tmp_path) == [("float8_e4m3fn", scaling, 1)]
    assert ("without a scale" in problems(tmp_path)) == (name == "other")


def test_a_configuration_that_does_not_fit(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"q.weight": torch.ones(4, 4)}, tmp_path / "m.safetensors")
    assert "no tensor is in FP8" in problems(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(
        {"q.weight": torch.ones(4, 4).to(F8), "q.weight_scale": torch.ones(1)}, tmp_path / "m.safetensors"
    )
    assert "no quantization_config" in problems(tmp_path)


def test_torchao_weights_in_safetensors(tmp_path: Path) -> None:
    tensors, metadata = flatten_tensor_state_dict(linear(quantized=True).state_dict())
    save_file(tensors, tmp_path / "m.safetensors", metadata=metadata)
    assert kinds(tmp_path) == [("float8_e4m3fn", "one scale per row", 1)]
    assert told(tmp_path).summary == "In FP8: 1 of 3 tensors, by torchao."
    assert problems(tmp_path) == ""


def test_torchao_weights_in_a_pickle_become_16_bits_by_the_printed_lines(tmp_path: Path) -> None:
    file = tmp_path / "m.pt"
    torch.save(linear(quantized=True).state_dict(), file)
    assert kinds(file) == [("Float8Tensor (torchao)", "within; read as bfloat16", 1)]
    assert "Loading needs torchao" in problems(file)
    names = {"state": torch.load(file)}
    exec(line_about(file, "turn the weights back"), names)
    assert [(type(each), each.dtype) for each in names["state"].values()] == [
        (torch.Tensor, torch.bfloat16)
    ] * 2


def test_weights_gathered_in_fp8_come_out_of_their_wrapper_by_the_printed_line(tmp_path: Path) -> None:
    model, file = linear(gathered=True), tmp_path / "m.pt"
    torch.save({"model": model.state_dict(), "step": 3}, file)
    assert kinds(file) == [("WeightWithDynamicFloat8CastTensor (torchao)", "wraps bfloat16", 1)]
    assert told(file).summary.startswith("None of 2 tensors is in FP8")
    names = {"state": torch.load(file)["model"]}
    exec(line_about(file, "out of each wrapper"), names)
    assert {type(each) for each in names["state"].values()} <= {torch.Tensor, nn.Parameter}


def test_names_of_wrappers_go_by_the_printed_line(tmp_path: Path) -> None:
    model, file = linear(), tmp_path / "m.pt"
    torch.save(torch.compile(model, backend="eager").state_dict(), file)
    assert "torch.compile(model)" in problems(file)
    names = {"state": torch.load(file)}
    exec(line_about(file, "_orig_mod."), names)
    assert model.load_state_dict(names["state"]).unexpected_keys == []


def test_names_of_an_adapter_are_as_they_should_be(tmp_path: Path) -> None:
    weights = {"base_model.model.q_proj.lora_A.weight": torch.ones(8, 32)}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    assert problems(tmp_path) == ""


def test_dcp_and_its_printed_command(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 4).to(F8), "w_scale": torch.ones(1), "b": torch.ones(3)}}
    dcp.save(state, checkpoint_id=tmp_path)
    assert kinds(tmp_path) == [("float8_e4m3fn", "one scale per tensor", 1)]
    assert read_checkpoint(next(tmp_path.glob("*.distcp"))).tensors == read_checkpoint(tmp_path).tensors
    command = line_about(tmp_path, "one file").split()
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    assert command[2:4] == [dcp_to_torch_save.__module__, "dcp_to_torch"]
    dcp_to_torch_save(tmp_path, tmp_path / "model.pt")
    assert not differences(read_checkpoint(tmp_path), read_checkpoint(tmp_path / "model.pt"))


def test_states_of_transformer_engine(tmp_path: Path) -> None:
    """As 2.20.2 saves them: a tensor of bytes if scaling is delayed, else empty; earlier ones BytesIO."""
    states = {
        "a._extra_state": torch.zeros(900, dtype=torch.uint8),
        "b._extra_state": torch.zeros(0, dtype=torch.uint8),
        "c._extra_state": io.BytesIO(b"state"),
    }
    torch.save({"a.weight": torch.ones(2, 2), **states}, tmp_path / "m.pt")
    assert "3 states of Transformer Engine" in problems(tmp_path)
    assert "delayed scaling in 2 of them" in problems(tmp_path)
    names = {"state": {"a.weight": 1, "a._extra_state": 2}}
    exec(line_about(tmp_path, "3 states"), names)
    assert names["state"] == {"a.weight": 1}


def test_weights_of_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its Float8Tensor, which needs a GPU; what it is pickled by is that of 2.20.2."""
    name = "transformer_engine.pytorch.tensor.float8_tensor"
    for part in (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.tensor",
        name,
    ):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))

    def _make_float8_tensor_in_reduce_ex(*given: Any) -> None: ...

    function: Any = _make_float8_tensor_in_reduce_ex
    function.__module__, function.__qualname__ = name, function.__name__
    setattr(sys.modules[name], function.__name__, function)

    class Weight:
        def __reduce__(self) -> Any:
            data = torch.zeros(4, 8, dtype=torch.uint8)
            return function, (data, 1, torch.ones(1), torch.bfloat16, torch.Size([4, 8]), None)

    torch.save({"w": Weight()}, tmp_path / "m.pt")
    assert read_checkpoint(tmp_path).tensors["w"].subclass == f"{name}.Float8Tensor"
    assert kinds(tmp_path) == [("Float8Tensor (transformer_engine)", "within; read as bfloat16", 1)]
    assert "an older one may lack it" in problems(tmp_path)


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def test_nothing_of_a_pickle_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    torch.save({"w": torch.ones(2), "evil": Evil(made)}, tmp_path / "m.pt")
    assert "Loading needs posix" in problems(tmp_path / "m.pt")
    assert not made.exists()


def test_a_whole_model_is_told(tmp_path: Path) -> None:
    torch.save(linear(), tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"is a pickled torch\.nn\.modules\.container\.Sequential"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff" * 64, b'{"a": 1}'])
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", ".metadata", "README.md"])
def test_what_is_no_checkpoint(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name, tmp_path / "nothing"):
        with pytest.raises(UserError):
            read_checkpoint(path)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_what_pickle_makes(value: Any, protocol: int) -> None:
    found, named = read_pickle(pickle.dumps(value, protocol))
    if not named:  # protocols 0 to 2 write bytes as a call
        assert found == value


@given(st.binary())
def test_damaged_pickles_raise_one_kind_of_error(data: bytes) -> None:
    with contextlib.suppress(UserError):
        read_pickle(data)


def test_two_checkpoints(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2, 2), "b": torch.ones(3), "c": torch.ones(1)}, one)
    save_file({"a": torch.ones(2, 2).bfloat16(), "b": torch.ones(4), "d": torch.ones(1)}, other)
    found = {each.what: each.names for each in differences(read_checkpoint(one), read_checkpoint(other))}
    assert found == {
        "float32 became bfloat16": ("a",),
        "shape [3] became [4]": ("b",),
        "only in the first": ("c",),
        "only in the second": ("d",),
    }


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"_orig_mod.a.weight": torch.ones(2, 2).to(F8)}, file)
    page = fp8doctor("checkpoint", str(file))
    assert page.exit_code == 0
    assert "In FP8: 1 of 1 tensor." in page.stdout
    assert "What will not load" in page.stdout
    alike = fp8doctor("checkpoint", str(file), str(file))
    assert "All 1 tensor have the same" in alike.stdout
    data = json.loads(fp8doctor("checkpoint", str(file), "--format", "json").stdout)
    assert data["checkpoints"][0]["kinds"][0]["what"] == "float8_e4m3fn"
    missing = fp8doctor("checkpoint", str(tmp_path / "nothing"))
    assert missing.exit_code == 2
    assert "there is no file or folder" in missing.stderr
