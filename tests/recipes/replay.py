"""wip"""

from __future__ import annotations

import os
import sys, time
from unittest import mock

import pytest

from fp8doctor import inspect_model
from tests.recipes import in_torchao
from tests.stand_ins import transformer_engine

ALL = [*in_torchao.RECIPES]
try:
    from tests.recipes import in_te

    ALL += in_te.RECIPES
except ImportError as e:
    print(e)
try:
    from tests.recipes import without_fp8

    ALL += without_fp8.RECIPES
except ImportError as e:
    print(e)


def main():
    for recipe in ALL:
        if sys.argv[1:] and not any(a in recipe.name for a in sys.argv[1:]):
            continue
        t = time.process_time()
        with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, recipe.environment):
            if recipe.stand_in.startswith("Transformer Engine"):
                transformer_engine.install(patch)
            try:
                model = recipe.build()
                t1 = time.process_time()
                report = inspect_model(
                    model, recipe.batch(), trial=False, assume_gpu=recipe.gpu, autocast=recipe.autocast
                )
            except Exception as e:
                import traceback

                traceback.print_exc()
                print(recipe.name, "FAILED", repr(e)[:300])
                continue
        print(
            f"== {recipe.name} {t1 - t:.2f} {time.process_time() - t1:.2f}",
            report.verdict.status,
            "|",
            report.verdict.summary[:200],
        )
        for f in report.findings:
            if f.code != "GPU005":
                print(
                    "   ",
                    f.code,
                    f.severity,
                    f.title,
                    "|",
                    str(f.evidence)[:500] if f.severity != "info" else "",
                )
        print(
            "   gaps",
            [
                (o.code, o.outcome, (o.reason or "")[:90])
                for o in report.outcomes
                if o.outcome == "crashed"
                or (
                    o.outcome == "unknown"
                    and "trial" not in (o.missing or "")
                    and "observed" not in (o.missing or "")
                )
            ][:6],
        )


main()
