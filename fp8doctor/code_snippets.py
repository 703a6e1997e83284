"""Code snippets of treatments: their kind, and their imports."""

import ast
import builtins
import functools
from collections.abc import Iterator
from typing import Literal

SnippetKind = Literal["python", "shell", "sketch", "yaml"]

OF_THE_SCRIPT = frozenset({"model", "torch", "optimizer", "batch", "tokenizer", "accelerator"})
"""Conventional names of a training script; snippets need not define them."""

IMPORTS = {
    "torchao.float8": "Float8LinearConfig convert_to_float8_training "
    "precompute_float8_dynamic_scale_for_fsdp",
    "torchao.prototype.moe_training.config": "Float8TrainingOpConfig MXFP8TrainingOpConfig "
    "MXFP8TrainingRecipe",
    "torchao.quantization": "quantize_",
    "transformer_engine.common.recipe": "DelayedScaling Float8BlockScaling Float8CurrentScaling "
    "MXFP8BlockScaling NVFP4BlockScaling",
    "accelerate": "Accelerator",
    "accelerate.utils": "AORecipeKwargs TERecipeKwargs",
    "accelerate.utils.transformer_engine": "convert_model",
    "peft": "LoraConfig get_peft_model",
    "torchao.optim": "Adam8bit AdamW8bit",
    "torch.distributed.fsdp": "fully_shard",
    "transformers": "AutoModelForCausalLM BitsAndBytesConfig DataCollatorWithPadding "
    "FineGrainedFP8Config Trainer TrainingArguments",
    "trl": "SFTConfig",
    "unsloth": "FastLanguageModel",
    "torch": "nn",
    "torch.utils.checkpoint": "checkpoint",
    "torch.utils.data": "DataLoader DistributedSampler",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "CheckpointWrapper checkpoint_wrapper",
    "fp8doctor": "inspect_model",
}
"""Module -> names that snippets may use and that are imported from it, with blanks between."""

MODULES = {
    "te": "import transformer_engine.pytorch as te",
    **{name: f"import {name}" for name in ("functools", "math", "os", "types")},
}
"""Name of a module -> the line that imports it."""

COMMANDS = tuple("#,export ,unset ,pip ,fp8doctor ,nvidia-smi,accelerate ,conda ,uv ,top ".split(","))
"""First words of shell commands."""


def with_imports(code: str) -> str:
    """Add an import for every known name that is used but not defined.

    Returns snippets that are not Python unchanged.
    """
    tree = _parsed(code)
    missing = set(free_names(tree)) if tree else set()
    lines = [line for name, line in MODULES.items() if name in missing]
    for module, names in IMPORTS.items():
        if used := sorted(missing.intersection(names.split())):
            lines.append(f"from {module} import {', '.join(used)}")
    return "\n".join([*lines, code])


@functools.lru_cache(maxsize=512)
def _parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def kind_of(code: str) -> SnippetKind:
    """Classify a snippet: Python that runs in a training script, shell, or a sketch.

    A sketch leaves something out (an ellipsis), uses unknown names, or changes nothing of the script.
    """
    lines = code.splitlines()
    if all(line.startswith(COMMANDS) for line in lines) and not all(line[0] == "#" for line in lines):
        return "shell"
    tree = _parsed(code)
    if tree is None or all(map(_only_binds, tree.body)) or set(free_names(tree)) - OF_THE_SCRIPT:
        return "sketch"
    left_out = any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree))
    return "sketch" if left_out else "python"


def _only_binds(statement: ast.stmt) -> bool:
    """Check whether a statement only imports, or assigns names that are not the script's."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return isinstance(statement, (ast.Import, ast.ImportFrom))
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(isinstance(each, ast.Name) and each.id not in OF_THE_SCRIPT for each in targets)


def free_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are used before they are defined."""
    bound = set(dir(builtins))
    for statement in tree.body:
        names = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
        used = {each.id for each in names if isinstance(each.ctx, ast.Load)}
        yield from used - bound - _bound(statement.value if isinstance(statement, ast.Assign) else statement)
        bound |= _bound(statement)


def _bound(node: ast.AST) -> set[str]:
    """List the variables, functions, arguments and imports that are defined in a node."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            names.add(each.id)
        elif isinstance(each, ast.arg):
            names.add(each.arg)
        elif isinstance(each, ast.FunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.alias):
            names.add((each.asname or each.name).partition(".")[0])
    return names
