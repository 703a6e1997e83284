"""Each known message as its source writes it, and texts that only look like one."""

import re
import tomllib
from pathlib import Path

import pytest

from fp8doctor import registry
from fp8doctor.known_errors import KnownError, known_errors, recognise, recognise_all


def by_start(says: str) -> KnownError:
    """The one entry whose words begin so."""
    (error,) = (each for each in known_errors() if each.says.startswith(says))
    return error


QUOTED = {
    each["says"]: each["texts"]
    for each in tomllib.loads(Path(__file__).with_name("quoted.toml").read_text("utf-8"))["quoted"]
}
"""Beginning of what an entry says -> the text as its source writes it; the sources stand in the entries."""


@pytest.mark.parametrize(
    ("says", "message"), [(says, message) for says, messages in QUOTED.items() for message in messages]
)
def test_quoted_message_is_known(says: str, message: str) -> None:
    error = by_start(says)
    assert recognise_all(message)[0].says == error.says
    assert [each.says for each in recognise(message)] == (
        [] if error.kind in ("generic", "class") else [error.says]
    )


def test_every_entry_is_quoted() -> None:
    assert {by_start(says) for says in QUOTED} == set(known_errors())


NEAR_MISSES = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x41 and 40x20)",
    "AssertionError: hidden size 1000 must be divisible by 16",
    "Expected hidden_size to be divisible by 16",
    "derivative for aten::_fused_thing is not implemented",
    "\"addmm_impl_cpu_\" not implemented for 'Half'",
    "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
    "RuntimeError: Promotion of types failed",
    "The 'tokenizers>=0.22' distribution was not found and is required by this application.",
    "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly",
    "RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn",
    "ImportError: libcupti.so.12: cannot open shared object file: No such file or directory",
    "ImportError: mine.so: undefined symbol: _Z9my_kernelv",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa`",
    "flash-attn is not installed",
    "ModuleNotFoundError: No module named 'transformer_engine'",
    "Device compute capability 8.0 found",
    "DDPOptimizer used bucket cap 26214400 and created 3 buckets.",
    "pkg_resources: package version mismatch",
    "OSError: torch/lib/../../nvidia/cublas/lib/libcublas.so.11: undefined symbol: cublasLtGetStatusString, "
    "version libcublasLt.so.11",
    "ImportError: pywrap_tf.so: undefined symbol: _ZN4absl12lts_202206239StrFormat2Es",
    "RuntimeError: cuDNN flash attention requires cuDNN 9.1.0 or later",
    "OSError: Could not find shared object file libnccl-net.so",
    "NotImplementedError: NF4Tensor dispatch: attempting to run aten.cat.default, this is not supported",
    "RuntimeError: \"_tunable_scaled_gemm\" not implemented for 'Float8_e4m3fn'",
    "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b8', "
    "'fp8e5b16')\")",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AttributeError: `AcceleratorState` object has no attribute `mixed_precision`",
    "KeyError: 'fp8'",
    "AttributeError: 'NoneType' object has no attribute 'config_class'",
    "We use fp8 with mixed_precision='fp8' and load_in_fp8=True, is that right?",
)


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_text_that_only_looks_like_one_is_not_known(text: str) -> None:
    """Messages of other libraries, and of other causes, that were seen in public issues."""
    assert recognise(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "The 'deepspeed-kernels' distribution was not found and is required by this application.",
        "backend='compile_fn' raised:\nRuntimeError: val is not a tensor",
        "    from unsloth.fp8_training import FP8Trainer\n"
        '  File "/fork/unsloth/fp8_training.py", line 3, in <module>\n'
        "    import kernels_of_the_fork\nModuleNotFoundError: No module named 'kernels_of_the_fork'",
    ],
)
def test_text_that_begins_like_one_is_not_known(text: str) -> None:
    assert recognise(text) == ()


def test_error_stands_before_the_one_that_follows_from_it() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/somebody/train.py", line 3, in <module>\n'
        "ImportError: libtransformer_engine.so: undefined\n    symbol: cublasLtMatmulDescInit_internal\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "AttributeError: module 'transformer_engine' has no attribute\r\n'pytorch'\n"
    )
    assert [each.says for each in recognise(text)] == [
        by_start("libtransformer_engine.so").says,
        by_start("module 'transformer_engine'").says,
    ]


@pytest.mark.slow
def test_long_text_is_read_from_its_end() -> None:
    assert recognise("0 " * 700_000 + "RuntimeError: derivative for aten::_scaled_mm is not implemented")


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["libcudnn", "mxfp8_quantize_", '"', "_Z", "undefined symbol: _Z", "NVRTC_ERROR_", "Unsloth: "]
)
def test_hostile_text_takes_no_longer_than_any_other(word: str) -> None:
    """A pattern that begins at each of these words and reads on to the end would take hours."""
    assert recognise(word * (600_000 // len(word))) == ()


@pytest.mark.slow
def test_no_pattern_reads_on_from_its_own_beginnings() -> None:
    """Each pattern meets 20 kB of each beginning of its texts: one that backtracks would take hours."""
    searches = 0
    for error in known_errors():
        texts = (text for says, found in QUOTED.items() if error.says.startswith(says) for text in found)
        for text in (error.says, *texts):
            words = text.split()[:40]
            for count in range(1, len(words)):
                beginning = " ".join(words[:count]) + " "
                re.search(error.pattern, beginning * (20_000 // len(beginning)) + beginning)
                searches += 1
    assert searches > 1000


def test_a_healthy_log_has_no_message() -> None:
    log = Path(__file__).with_name("healthy.log").read_text("utf-8")
    assert recognise_all(log) == ()
    assert len(log.splitlines()) > 60


def test_codes_are_those_of_checks() -> None:
    known = {check.code for check in registry.discover()}
    assert {code for error in known_errors() for code in error.codes} <= known


def test_entries_are_whole() -> None:
    for error in known_errors():
        assert all((error.says, error.pattern, error.cause, error.lines, error.versions, error.source))
        assert error.cause.endswith(".")
        assert not error.versions.endswith(".")
        assert not error.source.endswith(".")
