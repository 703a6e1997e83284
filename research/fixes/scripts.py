"""Training scripts that trigger findings, in the parts that a user would change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

LLAMA = """
from tests.examine.models import llama, lora
model = llama().bfloat16()
"""

BODY = """
def body(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name and "lora" not in name


"""
CONVERT = f"""
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
{BODY}
convert_to_float8_training(model, module_filter_fn=body)
"""

COMPILE = """
for layer in [each for each in model.modules() if type(each).__name__ == "LlamaDecoderLayer"]:
    layer.compile()
"""

TOKENS = """
tokens = torch.randint(0, 256, (2, 32))
batch = {"input_ids": tokens, "labels": tokens}
"""

ADAMW = """
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
"""


@dataclass(frozen=True)
class Script:
    """A training script, part by part; each part runs after the one before it."""

    codes: tuple[str, ...]
    """The findings that it is about, by code, or by name if a code has several."""
    accelerator: str = ""
    model: str = LLAMA
    convert: str = CONVERT
    compile: str = ""
    wrap: str = ""
    batch: str = TOKENS
    optimizer: str = ADAMW
    prepare: str = ""
    forward: str = ""
    """Lines of the training step up to ``output``, if the step is the script's own."""
    device: str = "cpu"
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables, set before the script starts."""
    unlike: tuple[str, ...] = ()
    """Parts of `WRAPPINGS` under which the script does not trigger its findings, or is no script."""
    wrapped_first: bool = False
    """True if the model is converted and compiled after it was wrapped."""
    gpu: str | None = None
    """The GPU that the findings are for."""

    @property
    def wrappings(self) -> tuple[str, ...]:
        """Return the names of `WRAPPINGS` under which the script triggers its findings."""
        return tuple(how for how in WRAPPINGS if not any(each in how for each in self.unlike))

    def parts(self) -> dict[str, str]:
        """Return the parts in the order in which they run."""
        changed = ("wrap", "convert", "compile") if self.wrapped_first else ("convert", "compile", "wrap")
        names = ("accelerator", "model", *changed, "batch", "optimizer", "prepare")
        parts = {name: getattr(self, name) for name in names}
        if self.device != "cpu":
            parts["model"] += f"model.to({self.device!r})\n"
            parts["batch"] += (
                f"batch = torch.utils._pytree.tree_map(lambda each: each.to({self.device!r}), batch)\n"
            )
        return parts


PEFT = """
from peft import LoraConfig, get_peft_model
adapters = LoraConfig(r=16, target_modules="all-linear")
model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
"""
FP8_LAUNCH = (("ACCELERATE_MIXED_PRECISION", "fp8"), ("ACCELERATE_FP8_BACKEND", "AO"))
ACCELERATOR = """
from accelerate import Accelerator
accelerator = Accelerator()
"""
PREPARE = """
model, optimizer = accelerator.prepare(model, optimizer)
"""

MXFP8 = f"""
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_
config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
{BODY}
quantize_(model, config, filter_fn=body)
"""

MLP = """
from tests.examine.models import Stacked
model = Stacked().bfloat16()
"""

DISTRIBUTED = """
import torch.distributed
from torch.distributed import HashStore
torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
"""

LAYERS = {
    "compiled": "\nmodel = torch.compile(model)\n",
    "blocks": """
for blocks in [each for each in model.modules() if type(each) is torch.nn.ModuleList]:
    for i, block in enumerate(blocks):
        blocks[i] = torch.compile(block)
""",
    "ddp": f"""{DISTRIBUTED}
model = torch.nn.parallel.DistributedDataParallel(model)
""",
    "peft": PEFT,
    "accelerate": """
from accelerate import Accelerator
model = Accelerator(mixed_precision="no").prepare(model)
""",
}
"""How users wrap a model: name -> the lines that do so."""

WRAPPINGS = (
    "plain",
    *LAYERS,
    "ddp(peft)",
    "ddp(compiled)",
    "compiled(peft)",
    "peft(compiled)",
    "accelerate(peft)",
)
"""One wrapper, or one in another."""

EAGER_ONLY = ("compiled", "blocks")
"""Wrappings that compile the layers."""
EVERY = (*LAYERS,)

SCRIPTS = {
    "eager": Script(("CMP001", "SHP002"), unlike=EAGER_ONLY),
    "backend": Script(
        ("CMP002",), unlike=("blocks",), compile=COMPILE.replace("compile()", 'compile(backend="aot_eager")')
    ),
    "linears compiled": Script(
        ("only-linears-compiled",),
        unlike=EAGER_ONLY,
        compile="""
for module in model.modules():
    if type(module).__name__ == "Float8Linear":
        module.compile()
""",
    ),
    "emulated": Script(
        ("emulated-fp8",),
        convert=CONVERT.replace("(model, ", "(model, config=Float8LinearConfig(emulate=True), "),
        compile=COMPILE,
    ),
    "nothing taken": Script(
        ("MOD001",),
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "no such layer")
""",
        compile=COMPILE,
    ),
    "fp32 weights": Script(("STP004",), model=LLAMA.replace(".bfloat16()", ""), compile=COMPILE),
    "eager attention": Script(
        ("MEM004",), model=LLAMA.replace("llama()", 'llama(attn_implementation="eager")'), compile=COMPILE
    ),
    "fp32 adapters": Script(("STP004",), wrap="\nmodel = lora(model)\n", compile=COMPILE, unlike=EVERY),
    "adapters converted": Script(
        ("adapters-converted",),
        unlike=("peft",),
        model=f"{LLAMA}{PEFT}",
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
""",
    ),
    "accelerate": Script(
        ("CMP001", "parameters-without-optimizer", "cannot-be-saved"),
        convert="",
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=FP8_LAUNCH,
        unlike=EVERY,
    ),
    "accelerate, lora": Script(
        ("parameters-without-optimizer", "adapters-converted"),
        convert="",
        wrap=PEFT,
        unlike=EVERY,
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=FP8_LAUNCH,
    ),
    "kv cache": Script(("CMP005",), model=LLAMA.replace("llama()", "llama(use_cache=True)"), compile=COMPILE),
    "mxfp8 with biases": Script(
        ("bias-dropped",),
        model=LLAMA.replace("llama()", "llama(attention_bias=True, mlp_bias=True)"),
        convert=MXFP8,
    ),
    "untied": Script(
        ("tied-weights-untied",),
        unlike=(
            "peft",
        ),  # a head that is made after PEFT froze the model trains, and does not once it is tied
        model=LLAMA.replace("llama()", "llama(tie_word_embeddings=True)"),
        convert=f"""
{CONVERT}
new = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
decoder = next(each for each in model.modules() if type(each).__name__ == "LlamaForCausalLM")
new.weight.data.copy_(decoder.lm_head.weight.data)
from torchao.float8.float8_linear import Float8Linear
decoder.lm_head = Float8Linear.from_float(new, config=Float8LinearConfig())
""",
        compile=COMPILE,
    ),
    "one row a sample": Script(
        ("rows-unaligned",),
        model="""
from research.fixes.models import Conditioned
from tests.examine.models import lora
model = Conditioned().bfloat16()
""",
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model)
""",
        batch="""
batch = {"x": torch.randn(3, 32, 64, dtype=torch.bfloat16), "time": torch.randn(3, 64, dtype=torch.bfloat16)}
""",
    ),
    "accelerate in bf16, wrong backend": Script(
        ("fp8-setting-without-effect",),
        convert="",
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=(("FP8_BACKEND", "te"),),
        unlike=EVERY,
    ),
    "accelerate in bf16": Script(
        ("fp8-request-overridden",),
        convert="",
        accelerator=ACCELERATOR.replace("()", '(mixed_precision="bf16")'),
        prepare=PREPARE,
        compile=COMPILE,
        variables=FP8_LAUNCH[:1],
        unlike=("compiled", "blocks", "ddp", "accelerate"),
    ),
    "never prepared": Script(
        ("MOD001",),
        convert="",
        accelerator=ACCELERATOR,
        optimizer=f"{ADAMW}\nmodel(**batch).loss.backward()",
        compile=COMPILE,
        variables=FP8_LAUNCH,
        unlike=EVERY,
    ),
    "not prepared yet": Script(
        ("MOD001",),
        convert="",
        accelerator=ACCELERATOR,
        compile=COMPILE,
        variables=FP8_LAUNCH,
        unlike=EVERY,
    ),
    "mxfp8 on an H100": Script(
        ("GPU002",),
        convert=MXFP8.replace("_EMULATED", ""),
        gpu="H100",
        unlike=("accelerate",),
    ),
    "hooks kept by subclasses": Script(
        ("hooks-or-subclass-lost",),
        model=f"""{LLAMA}
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0


for layer in model.model.layers:
    layer.mlp.up_proj.__class__ = Scaled
""",
        compile=COMPILE,
    ),
    "debug switch": Script(
        ("ENV006",), unlike=EVERY, variables=(("TORCH_LOGS", "+dynamo"), ("CUDA_LAUNCH_BLOCKING", "1"))
    ),
}


def wrapped(script: Script, how: str, first: bool = False) -> Script:
    """Return the script with its model wrapped in this way as well, before the conversion or after it."""
    inside_out = reversed(how.rstrip(")").split("(")) if how != "plain" else ()
    wrap = script.wrap + "".join(LAYERS[each] for each in inside_out)
    return dataclasses.replace(script, wrap=wrap, wrapped_first=first)


LAYERS_OF_TE = """
import transformer_engine.pytorch as te


class Block(torch.nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.norm = te.RMSNorm(width, params_dtype=torch.bfloat16)
        self.up = te.Linear(width, 4 * width, params_dtype=torch.bfloat16)
        self.down = te.Linear(4 * width, width, params_dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build_model():
    with torch.device("cuda"):
        return Net()


model = build_model()
"""
OF_TE: dict[str, Any] = {
    "model": LAYERS_OF_TE,
    "convert": "",
    "batch": "\nbatch = torch.randn(256, 256).bfloat16()\n",
    "forward": "output = model(batch)",
    "device": "cuda",
    "unlike": EVERY,
}
INSIDE_AUTOCAST = "with te.autocast(enabled=True):\n    output = model(batch)"

ON_A_GPU = {
    **{
        name: dataclasses.replace(script, device="cuda")
        for name, script in SCRIPTS.items()
        if name
        in (
            "eager",
            "backend",
            "linears compiled",
            "fp32 weights",
            "adapters converted",
            "kv cache",
            "untied",
        )
    },
    "te without autocast": Script(("MOD002",), **OF_TE),
    "te recomputed by torch": Script(
        ("CKP002",),
        **(
            OF_TE
            | {
                "wrap": """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
for i, layer in enumerate(model.layers):
    model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
""",
                "batch": "\nbatch = torch.randn(256, 256).bfloat16().requires_grad_()\n",
                "forward": INSIDE_AUTOCAST,
            }
        ),
    ),
    "te in fp8": Script((), **(OF_TE | {"forward": INSIDE_AUTOCAST})),
}
"""Scripts whose effects are recorded on a GPU, because a CPU compiles no FP8 kernel and has no Transformer
Engine."""

EXPLORED = {
    "eager": ("recipe-tensorwise", "recipe-rowwise", "recipe-rowwise-with-gw-hp"),
    "te in fp8": ("te-delayed", "te-current", "te-block"),
}
"""Script -> treatments that a trial proposes without a finding."""
