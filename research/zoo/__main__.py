"""Treat every model in every state, and write what came of it beside this file:

    python -m research.zoo [--library NAME ...] [--state WORDS ...] [--processes N] [--to FILE]

It wants timm, diffusers, torchvision, vit_pytorch and x_transformers beside what the tests want.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import logging
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from research.zoo.animals import LIBRARIES
from research.zoo.course import STATES, Course, take

PAGE = Path(__file__).parent / "ZOO.md"
ADAPTED = ("transformers",)
"""Libraries whose models get LoRA too."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.zoo")
    parser.add_argument("--library", nargs="*", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--state", nargs="*", default=list(STATES), choices=list(STATES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--to", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    prepare()
    one_each = [
        (library, animal.name, state)
        for library in asked.library
        for animal in LIBRARIES[library]()
        for state in asked.state
        if "LoRA" not in state or library in ADAPTED
    ]
    courses: list[tuple[str, Course]] = []
    with ProcessPoolExecutor(asked.processes, initializer=prepare) as processes:
        taken = processes.map(take_named, *zip(*one_each, strict=True))
        for (library, *_), course in zip(one_each, taken, strict=True):
            courses.append((library, course))
            print(library, course, file=sys.stderr, flush=True)
            asked.to.write_text(page(courses), "utf-8")
    return any(course.defects for _, course in courses)


def take_named(library: str, name: str, state: str) -> Course:
    """One course, in a process of the pool."""
    return take(next(each for each in LIBRARIES[library]() if each.name == name), state)


def prepare() -> None:
    """What each process does before it builds a model."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    allow_torchvision()


def allow_torchvision() -> None:
    """Let PyPI's torchvision, which is built for CUDA, be imported beside a torch for the CPU: none of the
    models calls these operators."""
    if not torch.backends.cuda.is_built() and not KEPT:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


KEPT: list[torch.library.Library] = []
"""A definition lasts as long as its library."""


def page(courses: list[tuple[str, Course]]) -> str:
    """What became of them, as Markdown."""
    models = {(library, course.animal) for library, course in courses}
    packages = ("torch", "torchao", "peft", *LIBRARIES)
    versions = ", ".join(f"{each} {importlib.metadata.version(each.replace('_', '-'))}" for each in packages)
    ran = sum(course.ran for _, course in courses)
    defects = sum(len(course.defects) for _, course in courses)
    lines = [
        "# The zoo",
        "",
        "Written by `python -m research.zoo`: do not edit.",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {versions}.",
        "",
        f"{len(models)} models in {len({course.state for _, course in courses})} states, {len(courses)} "
        f"courses. {ran} treatments were run line by line as they are printed, each with a forward and a "
        f"backward of the model after it; {defects} defects.",
        "",
        "Depth is cut and width is not; most models are on the meta device, FP8 layers multiply there as "
        "nn.Linear does, and Dynamo compiles nothing: tried is whether the lines leave a model that runs, "
        "and whether what they mend is mended.",
        "",
        "| library | model | state | prescriptions, one after the other | run | not run | defects |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for library, course in courses:
        rounds = " → ".join(", ".join(each) or "none" for each in course.rounds)
        cells = (
            library,
            course.animal,
            course.state,
            rounds,
            str(course.ran),
            "; ".join(dict.fromkeys(course.not_run)),
            "; ".join(course.defects),
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join((*lines, ""))


if __name__ == "__main__":
    sys.exit(main())
