"""The real environment and the really installed packages, through the real `examine_environment`."""

import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.examine.environment import PACKAGES, PREFIXES, VARIABLES, allowed, examine_environment
from fp8doctor.facts import Environment, Package, Software
from tests.stand_ins.packages import stand_in

INSTALLED = {
    name
    for name in PACKAGES
    if any(True for each in PACKAGES[name] for _ in metadata.distributions(name=each))
}


def software(gaps: dict[str, str] | None = None) -> Software:
    return examine_environment({} if gaps is None else gaps)[0]


def environment(gaps: dict[str, str] | None = None) -> Environment:
    return examine_environment({} if gaps is None else gaps)[1]


# Variables


AS_THEY_ARE = """
    ACCELERATE_MIXED_PRECISION=fp8 ACCELERATE_DYNAMO_MODE=max-autotune-no-cudagraphs NVTE_DEBUG=1
    ACCELERATE_FP8_BACKEND=transfomer_engine ACCELERATE_DEEPSPEED_CONFIG_FILE=none WORLD_SIZE=8
    FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP TORCH_LOGS=+dynamo,recompiles,graph_breaks,output_code
    CUDA_VISIBLE_DEVICES=0,1 CUDA_VISIBLE_DEVICES= CUDA_DEVICE_ORDER=PCI_BUS_ID
    HSA_OVERRIDE_GFX_VERSION=9.4.2 CUBLAS_WORKSPACE_CONFIG=:4096:8
    PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,garbage_collection_threshold:0.8,backend:cudaMallocAsync
    PYTORCH_ALLOC_CONF=expandable_segments:True TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1 NCCL_PROTO=^LL128
"""

CHANGED = [
    ("CUDA_VISIBLE_DEVICES", "GPU-8a1f0000-1111-2222-3333-444455556666,1", "GPU-…,1"),
    ("CUDA_VISIBLE_DEVICES", "MIG-GPU-8a1f0000-1111-2222-3333-444455556666/7/0", "MIG-…"),
    ("TORCH_TRACE", "/data/client/traces", "…/traces"),
    ("TORCH_LOGS", "hf_abcdefghijklmnopqrstuvwxyz01234567", "<secret>"),
    ("ACCELERATE_MIXED_PRECISION", "correct horse battery staple", "(set) (set) (set) (set)"),
    ("ACCELERATE_MIXED_PRECISION", "4929123412341234", "(set)"),
    ("NVTE_FLASH_ATTN", "ab12cd34", "(set)"),
    ("TORCH_LOGS", "+our_secret_project.layers", "(set)"),
    ("TORCH_TRACE", "/data/client/acme-merger", "(set)"),
]

NOT_READ = """
    HF_TOKEN WANDB_API_KEY PATH HOME HOSTNAME MASTER_ADDR ACCELERATE_CONFIG_FILE TORCHINDUCTOR_CACHE_DIR
    TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE NVTE_CUDA_INCLUDE_DIR NVTE_API_KEY UNSLOTH_MODEL_NAME
    NCCL_SOCKET_IFNAME ACCELERATE_FP8_TOKEN
"""


def test_a_variable_that_matters_is_kept_and_scrubbed() -> None:
    for name, _, value in (each.partition("=") for each in AS_THEY_ARE.split()):
        assert allowed([(name, value)]) == {name: value}
    for name, value, kept in CHANGED:
        assert allowed([(name, value)]) == {name: kept}
    assert allowed((name, "/home/somebody/x") for name in NOT_READ.split()) == {}


@pytest.mark.slow
@given(name=st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=30))
def test_a_name_that_is_not_on_the_list_stays_out(name: str) -> None:
    kept = allowed([(name, "value")])
    assert not kept or name in VARIABLES or name.startswith(PREFIXES)


# Versions


def test_the_versions_of_this_process() -> None:
    found = software()
    assert found.python == platform.python_version()
    own = (str(torch.__version__), torch.version.cuda, torch.version.hip)
    assert (found.torch, found.cuda, found.hip) == own
    assert set(found.packages) >= INSTALLED
    for name in INSTALLED & {"torchao", "accelerate", "transformers", "peft"}:
        assert found.packages[name].version == metadata.version(name)


def test_transformer_engine_is_found_with_its_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("transformer_engine_cu13", "2.20.2"), ("transformer_engine_torch", "2.19.0")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    stand_in(monkeypatch, transformer_engine=None, transformer_engine_cu12=None)
    found = software().packages
    assert found["transformer_engine"] == Package(version="2.20.2", imported=False)
    assert found["transformer_engine_torch"] == Package(version="2.19.0", imported=False)
    assert "transformer_engine_cu12" not in found
