"""Modules that torch.compile must cover for fast FP8, and lines that cover them."""

from typing import Literal

from fp8doctor.analysis.conversion import ROOT, names_in_python
from fp8doctor.analysis.layers import KEEP_IT_IN_MODULE, in_python
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, COMPILE_LAYERS, COMPILE_MODEL
from fp8doctor.facts import Blocks, CompileMark, Facts, Linear, Network, recorded
from fp8doctor.finding import Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.wording import plural

NEEDS_COMPILE = ("Float8Linear", "MXLinear", "MXFP8Linear")
"""Classes whose casts only the compiler fuses, by class name; torchao 0.10 to 0.18."""

BACKENDS_WITHOUT_KERNELS = (
    "eager",
    "eager_noexcept",
    "eager_debug",
    "pre_dispatch_eager",
    "aot_eager",
    "aot_eager_decomp_partition",
)
"""Backends that capture graphs and run them op by op. Source: ``torch/_dynamo/backends/debugging.py``, torch
2.13."""

BESIDE_AT_MOST = 4
"""Layers outside the blocks, such as a head, that are compiled one by one; with more of them the whole model
is. Each is a line of the treatment. A choice of length."""

TORCH_NN = "torch.nn."


def needs_compile(linear: Linear) -> bool:
    """Return whether torch.compile decides this layer's speed."""
    if not stack_of(linear).fuses_casts or linear.use != "training":
        return False
    wrapper = (linear.weight_class or "").rpartition(".")[2]
    return (
        linear.kind.rpartition(".")[2] in NEEDS_COMPILE
        or wrapper.endswith("TrainingWeightWrapperTensor")
        or wrapper == "ScaledGroupedMMTensor"
    )


def compile_treatment(facts: Facts, uncovered: list[Linear]) -> Treatment:
    """Compile the blocks that hold these layers and single layers outside, or all.

    If all blocks are compiled already, only those few. The KV cache is switched off where blocks are
    compiled: with it each block is a version of its own, and Dynamo keeps 8.
    """
    network = facts.network
    lists = [each for each in network.blocks if any(is_inside(linear, each) for linear in uncovered)]
    beside = [linear for linear in uncovered if not any(is_inside(linear, each) for each in lists)]
    if len(beside) > BESIDE_AT_MOST or not (lists or blocks_are_compiled(network)):
        return compile_model(facts)
    model, names_of = in_python("", network), {each.name: in_python(each.name, network) for each in beside}
    apart = [
        f'{model}.set_submodule("{each.name}", torch.compile({names_of[each.name]}))'
        if each.kind.startswith(TORCH_NN)
        else f"{names_of[each.name]}.compile()"
        for each in beside
    ]
    lines = with_kernels(_with_reason([*(_loop(each, network) for each in lists), *apart]), facts)
    name, names = COMPILE_BLOCKS, tuple[str, ...]()
    built = bool(network.fp8) and not any(stack_of(each).converter for each in network.fp8)
    places = " and ".join([*([] if built else ["the conversion"]), *outermost(network)])
    summary = f"compile block by block{places and f', after {places}'}"
    if not lists:
        name, names = COMPILE_LAYERS, tuple(linear.name for linear in beside)
        summary = f"compile {plural(len(beside), 'layer')} outside the compiled blocks"
    elif facts.get("training.use_cache") is True:
        lines.append(f"{cache_off(facts)}   # else every block is compiled again, up to 8 of them")
    return Treatment(name=name, summary=summary, code="\n".join(lines), layers=names)


def outermost(network: Network) -> list[str]:
    """Name what wraps the model last, and makes the names of lines longer; empty if nothing does."""
    around = ["get_peft_model"] if any(each.name.startswith(ROOT) for each in network.linears) else []
    return [*around, *(each for each in network.get("wrappers", ()) if each in KEEP_IT_IN_MODULE)][-1:]


def compile_model(facts: Facts) -> Treatment:
    code = "\n".join(with_kernels(compile_whole(facts.network), facts))
    return Treatment(name=COMPILE_MODEL, summary="compile the model", code=code)


def covered_by_blocks(facts: Facts) -> list[Linear]:
    """List the layers that are compiled with the blocks: all inside, and FP8 outside."""
    return [
        each
        for each in facts.network.linears
        if needs_compile(each) or any(is_inside(each, blocks) for blocks in facts.network.blocks)
    ]


def blocks_are_compiled(network: Network) -> bool:
    return bool(network.blocks) and all(
        recorded(each, "count") and each.get("compiled") == each.count for each in network.blocks
    )


def marks_without_kernels(facts: Facts) -> tuple[CompileMark, ...]:
    marks = facts.get("training.compile_marks", ())
    return tuple(each for each in marks if each.get("backend") in BACKENDS_WITHOUT_KERNELS)


def with_kernels(lines: list[str], facts: Facts) -> list[str]:
    """Give the user's compilation kernels first if it has none, as its graph would hide others inside.

    Nothing is compiled while a variable switches that off.
    """
    off = [name for name in SWITCHES_OFF if facts.variables().get(name) == "1"]
    on = [f"# unset {' and '.join(off)} first: under it nothing is compiled"] if off else []
    return [*on, *(with_default_backend(facts) if marks_without_kernels(facts) else []), *lines]


SWITCHES_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that switch torch.compile off if they are 1. Source: ``torch._dynamo``, torch 2.13."""


def with_default_backend(facts: Facts) -> list[str]:
    """Write the user's compilations in place without kernels as such by the default backend."""
    network, marks = facts.network, marks_without_kernels(facts)
    lines = [f"# without backend={marks[0].backend!r}, which generates no kernel"]
    names = [mark.name for mark in marks if mark.form == "in_place"]
    lines += compile_whole(network) if "" in names else []
    if inside := names_in_python([name for name in names if name]):
        module = f"{in_python('', network)}.get_submodule(name)"
        lines.append(f"for name in {' | '.join(inside)}:\n    {module}.compile()")
    if len(names) < len(marks):
        lines.append("# change your own call of torch.compile")
    return lines


def own_compile(facts: Facts) -> Literal["", "whole", "blocks"]:
    """Tell how the user compiles all of the model with kernels; empty if he does not."""
    marks = facts.get("training.compile_marks", ())
    if marks_without_kernels(facts):
        return ""
    if any(not mark.get("name", "?") and mark.get("compiles") for mark in marks):
        return "whole"
    idle = any(mark.get("compiles") is False for mark in marks)
    every = recorded(facts, "network.blocks") and blocks_are_compiled(facts.network)
    return "blocks" if every and not idle else ""


def compile_all(network: Network) -> list[str]:
    if not network.blocks:
        return compile_whole(network)
    return _with_reason([_loop(each, network) for each in network.blocks])


def compile_whole(network: Network) -> list[str]:
    in_place = not has_forward_of_torch(network)
    return ["model.compile()"] if in_place else _with_reason(["model = torch.compile(model)"])


def _loop(blocks: Blocks, network: Network) -> str:
    container, in_dict = in_python(blocks.name, network), blocks.get("container") == "ModuleDict"
    fixed = "dynamic=False" * has_unlike_sizes(network)
    few = "   # it compiles for each shape of a batch: keep to few shapes" * bool(fixed)
    if not has_forward_of_torch(blocks):
        return f"for block in {container}{'.values()' if in_dict else ''}:\n    block.compile({fixed}){few}"
    pairs, block = f"{container}.items()" if in_dict else f"enumerate({container})", f"{container}[i]"
    given = f"block, {fixed}" if fixed else "block"
    return f"for i, block in {pairs}:\n    {block} = torch.compile({given}){few}"


def has_unlike_sizes(network: Network) -> bool:
    """Return whether lists of one class have layers of other sizes.

    Torch compiles the second list for any size, and FP8's casts with it, unless ``dynamic=False``: 207 ms in
    the place of 140 (two text towers, H200, torch 2.11). BF16 took 144 either way.
    """
    sizes: dict[str, set[frozenset[tuple[int, int]]]] = {}
    for blocks in network.blocks:
        inside = (each for each in network.linears if is_inside(each, blocks))
        of_list = frozenset((each.in_features, each.out_features) for each in inside)
        sizes.setdefault(blocks.get("kind") or blocks.name, set()).add(of_list)
    return any(len(each) > 1 for each in sizes.values())


def _with_reason(lines: list[str]) -> list[str]:
    why = "# wrapped: before torch 2.14 .compile() in place compiles nothing on classes of torch.nn"
    return [why, *lines] if any("torch.compile(" in each for each in lines) else lines


def cache_off(facts: Facts) -> str:
    """Write the line that switches the KV cache off in its module's configuration."""
    switch = facts.get("training.cache_switch")
    return f"{in_python(f'{switch}.config' if switch else 'config', facts.network)}.use_cache = False"


def has_forward_of_torch(module: Blocks | Network) -> bool:
    """Return whether ``.compile()`` in place may have no effect; else by its class."""
    return bool(module.get("forward_of_torch", module.get("kind", "").startswith(TORCH_NN)))


def unused_marks(facts: Facts) -> tuple[CompileMark, ...]:
    """List the marks whose modules no training step of a watched script called."""
    return tuple(each for each in facts.training.compile_marks if each.get("unused"))


def disabled_by_variable(facts: Facts) -> bool:
    return facts.variables().get("TORCHDYNAMO_DISABLE") == "1"


def is_below(name: str, module: str) -> bool:
    """Return whether a name is this module's or of one in it; an empty one is the model's."""
    return not module or f"{name}.".startswith(f"{module}.")


def is_inside(linear: Linear, blocks: Blocks) -> bool:
    """Return whether a layer is in these blocks; a list without a name is the model."""
    return not blocks.name or linear.name.startswith(f"{blocks.name}.")


def recomputed(blocks: Blocks, facts: Facts) -> int:
    """Count the blocks of a list with a Linear that is recomputed. Raises `Unrecorded`."""
    linears = (each for each in facts.network.linears if is_inside(each, blocks))
    again = (each.name.removeprefix(f"{blocks.name}.") for each in linears if each.checkpointed is not None)
    return len({name.partition(".")[0] for name in again})
