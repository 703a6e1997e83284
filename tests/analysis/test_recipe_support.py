"""What recipes and libraries need: multiples of the sides, and the cuDNN of Transformer Engine."""

import re

import pytest
from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.recipe_support import transformer_engine_line, unaligned
from fp8doctor.facts import Facts, Software
from fp8doctor.kit import float8


@pytest.mark.parametrize(
    ("stack", "recipe", "takes", "refuses"),
    [
        ("torchao", "tensorwise", 1040, 1032),
        ("torchao", "mxfp8", 1056, 1040),
        ("torchao", "blockwise", 1152, 1056),
        ("torchao", "nvfp4", 1152, 1120),
        ("transformer_engine", "mxfp8", 1056, 1040),
        ("transformer_engine", "delayed", 1040, 1032),
    ],
)
def test_multiples_by_recipe(stack: str, recipe: str, takes: int, refuses: int) -> None:
    for side, found in ((takes, False), (refuses, True)):
        for sides in ({"in_features": side}, {"out_features": side}):
            assert unaligned(float8(stack=stack, recipe=recipe, **sides)) is found


@pytest.mark.parametrize(("cudnn", "newest"), [("9.10.2.21", False), (None, False), ("9.12.0.46", True)])
def test_the_version_of_transformer_engine_fits_cudnn(cudnn: str | None, newest: bool) -> None:
    line = transformer_engine_line(Facts(software=Software(cudnn=cudnn)))
    (bounds,) = re.findall(r"transformer-engine\[pytorch\]([^\"`]*)\"", line)
    releases = ("2.20.2", "2.19.0", "2.16.1")  # the last misses a symbol in the cuBLAS of torch 2.11
    assert [SpecifierSet(bounds).contains(each) for each in releases] == [newest, True, False]
