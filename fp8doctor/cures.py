"""The treatments that the trial proposes by itself, as the lines a user would write, made from facts.

A check that names one of them takes its lines from here or writes better ones; `fp8doctor.trial.treatments` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Treatment
from fp8doctor.overview import in_python
from fp8doctor.regions import cache_off, compile_treatment, is_inside, needs_compile

STAY_IN_BF16 = Treatment(
    name="stay-in-bf16",
    summary="stay in BF16, compiled: nothing that was tried makes FP8 as fast here",
    code="# leave out the conversion to FP8\nmodel = torch.compile(model)   # or block by block, as timed",
)


def describe(name: str, facts: Facts) -> Treatment | None:
    """A treatment in words and lines; None for one that only checks propose."""
    return LINES[name](facts) if name in LINES else None


def keep_in_bf16(layers: Sequence[str]) -> Treatment:
    """These layers left out of the conversion."""
    names = ",\n".join(f"    {name!r}" for name in layers)
    return Treatment(
        name="keep-in-bf16",
        summary=f"leave {len(layers)} {'layer' if len(layers) == 1 else 'layers'} out of the conversion",
        code=f"keep = {{\n{names},\n}}\nconvert_to_float8_training(model, module_filter_fn=lambda layer, name: name not in keep)",
        layers=tuple(layers),
    )


def recipe(name: str) -> Treatment:
    """Another recipe of torchao, by the name of its treatment."""
    word = name.removeprefix("recipe-").replace("-", "_")
    code = f'config = Float8LinearConfig.from_recipe_name("{word}")\nconvert_to_float8_training(model, config=config)'
    return Treatment(name=name, summary=f"convert with the recipe {word}", code=code)


def _compile_blocks(facts: Facts) -> Treatment:
    covered = [each for each in facts.network.linears if needs_compile(each) or any(is_inside(each, blocks) for blocks in facts.network.blocks)]
    return compile_treatment(facts, covered)


def _checkpointing_off(facts: Facts) -> Treatment:
    found = facts.training.checkpointing if recorded(facts.training) and recorded(facts.training.checkpointing) else ()
    huggingface = any(each.form == "huggingface" for each in found)
    code = f"{in_python('gradient_checkpointing_disable', facts.network)}()" if huggingface else "# leave out checkpoint_wrapper()"
    if huggingface and recorded(facts.training.cache_switch) and facts.training.cache_switch is not None:
        code += f"\n{cache_off(facts)}   # checkpointing had kept the KV cache off"
    return Treatment(name="checkpointing-off", summary="keep the activations", code=code)


def _fused_optimizer(facts: Facts) -> Treatment:
    known = recorded(facts.training) and recorded(facts.training.optimizer) and facts.training.optimizer
    kind = known.rpartition(".")[2] if known else "AdamW"
    return Treatment(name="fused-optimizer", summary="let one kernel update many parameters", code=f"torch.optim.{kind}(parameters, ..., fused=True)")


def _attention_sdpa(facts: Facts) -> Treatment:
    code = f'{in_python("set_attn_implementation", facts.network)}("sdpa")'
    return Treatment(name="attention-sdpa", summary="take torch's fused attention", code=code)


def _cache_off(facts: Facts) -> Treatment:
    return Treatment(name="cache-off", summary="build no KV cache in training", code=cache_off(facts))


def _autocast_bf16(facts: Facts) -> Treatment:
    code = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(model, batch)'
    return Treatment(name="autocast-bf16", summary="run forward and loss under BF16 autocast", code=code)


def _bf16_parameters(facts: Facts) -> Treatment:
    return Treatment(name="bf16-parameters", summary="keep the weights in BF16", code="model.to(torch.bfloat16)   # before the optimizer is made")


def _te_autocast(facts: Facts) -> Treatment:
    code = (
        "# and no te.autocast(enabled=False) inside the model\n"
        "with te.autocast(enabled=True):   # te.fp8_autocast before Transformer Engine 2.9\n"
        "    output = model(batch)"
    )
    return Treatment(name="te-autocast", summary="run the training forward inside the FP8 autocast", code=code)


LINES: dict[str, Callable[[Facts], Treatment]] = {
    "recipe-tensorwise": lambda facts: recipe("recipe-tensorwise"),
    "recipe-rowwise": lambda facts: recipe("recipe-rowwise"),
    "recipe-rowwise-with-gw-hp": lambda facts: recipe("recipe-rowwise-with-gw-hp"),
    "compile-blocks": _compile_blocks,
    "checkpointing-off": _checkpointing_off,
    "fused-optimizer": _fused_optimizer,
    "attention-sdpa": _attention_sdpa,
    "cache-off": _cache_off,
    "autocast-bf16": _autocast_bf16,
    "bf16-parameters": _bf16_parameters,
    "te-autocast": _te_autocast,
    "stay-in-bf16": lambda facts: STAY_IN_BF16,
}
"""Every exploration (a test holds it to `fp8doctor.trial.explorations`), and the treatment that gives FP8 up."""
