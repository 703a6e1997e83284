"""Training scripts that trigger findings, in the parts that a user would change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

LLAMA = """
from tests.examine.models import llama, lora, mixtral
model = llama().bfloat16()
"""

CONVERT = """
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
"""

COMPILE = """
for layer in model.model.layers:
    layer.compile()
"""

TOKENS = """
tokens = torch.randint(0, 256, (2, 32))
batch = {"input_ids": tokens, "labels": tokens}
"""

ADAMW = """
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
"""


@dataclass(frozen=True)
class Script:
    """A training script, part by part; each part runs after the one before it."""

    codes: tuple[str, ...]
    """The findings that it is about."""
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
    wrappings: tuple[str, ...] = ("plain", "compiled", "ddp", "peft")
    """Names of `WRAPPINGS` under which the script triggers the same findings."""

    def parts(self) -> dict[str, str]:
        """Return the parts in the order in which they run."""
        names = ("accelerator", "model", "convert", "compile", "wrap", "batch", "optimizer", "prepare")
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

MLP = """
from tests.examine.models import Stacked
model = Stacked().bfloat16()
"""

DISTRIBUTED = """
import torch.distributed
from torch.distributed import HashStore
torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
"""

WRAPPINGS = {
    "plain": "",
    "compiled": "\nmodel = torch.compile(model)\n",
    "ddp": f"""{DISTRIBUTED}
model = torch.nn.parallel.DistributedDataParallel(model)
""",
    "peft": PEFT,
}
"""How users wrap a model: name -> the lines that do so. Accelerate's ``prepare`` has scripts of its own."""

UNCOMPILED = ("plain", "ddp", "peft")
ALONE = ("plain",)

SCRIPTS = {
    "eager": Script(("CMP001", "SHP002"), wrappings=UNCOMPILED),
    "backend": Script(("CMP002",), compile=COMPILE.replace("()", '(backend="aot_eager")')),
    "linears compiled": Script(
        ("CMP004",),
        wrappings=UNCOMPILED,
        compile="""
for module in model.modules():
    if type(module).__name__ == "Float8Linear":
        module.compile()
""",
    ),
    "emulated": Script(
        ("MOD005",),
        convert="""
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
config = Float8LinearConfig(emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "lm_head")
""",
        compile=COMPILE,
    ),
    "nothing taken": Script(
        ("MOD001",),
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "no such layer")
""",
    ),
    "fp32 weights": Script(("MEM003",), model=LLAMA.replace(".bfloat16()", ""), compile=COMPILE),
    "eager attention": Script(
        ("MEM004",), model=LLAMA.replace("llama()", 'llama(attn_implementation="eager")'), compile=COMPILE
    ),
    "fp32 adapters": Script(("LORA002",), wrap="\nmodel = lora(model)\n", compile=COMPILE, wrappings=ALONE),
    "adapters converted": Script(
        ("LORA003",),
        wrappings=("plain", "compiled", "ddp"),
        model=f"{LLAMA}{PEFT}",
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
""",
    ),
    "accelerate": Script(
        ("CMP001", "MOD007", "MOD010"),
        convert="",
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=FP8_LAUNCH,
        wrappings=ALONE,
    ),
    "accelerate, lora": Script(
        ("MOD007", "LORA003"),
        convert="",
        wrap=PEFT,
        wrappings=ALONE,
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=FP8_LAUNCH,
    ),
    "narrow head": Script(
        ("SHP004",),
        model="""
from transformers import LlamaConfig, LlamaForSequenceClassification
from tests.examine.models import SIZES, lora
model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=16, pad_token_id=0)).bfloat16()
""",
        convert="""
from torchao.float8 import convert_to_float8_training
convert_to_float8_training(model)
""",
        compile=COMPILE,
        batch="""
tokens = torch.randint(1, 256, (4, 16))
batch = {"input_ids": tokens, "labels": torch.arange(4)}
""",
    ),
    "kv cache": Script(("CMP005",), model=LLAMA.replace("llama()", "llama(use_cache=True)"), compile=COMPILE),
    "mxfp8 with biases": Script(
        ("MOD013",),
        model=LLAMA.replace("llama()", "llama(attention_bias=True, mlp_bias=True)"),
        convert="""
from torch import nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.quantization import quantize_
config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
""",
    ),
    "untied": Script(
        ("MOD008",),
        model=LLAMA.replace("llama()", "llama(tie_word_embeddings=True)"),
        convert=f"""
{CONVERT}
new = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
new.weight.data.copy_(model.lm_head.weight.data)
from torchao.float8.float8_linear import Float8Linear
model.lm_head = Float8Linear.from_float(new, config=Float8LinearConfig())
""",
        compile=COMPILE,
    ),
    "one row a sample": Script(
        ("SHP007",),
        model="""
from tests.fixes.models import Conditioned
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
        ("ENV002",),
        convert="",
        accelerator=ACCELERATOR,
        prepare=PREPARE,
        variables=(*FP8_LAUNCH, ("FP8_BACKEND", "te")),
        wrappings=ALONE,
    ),
    "debug switch": Script(
        ("ENV006",), wrappings=ALONE, variables=(("TORCH_LOGS", "+dynamo"), ("CUDA_LAUNCH_BLOCKING", "1"))
    ),
}


def wrapped(script: Script, how: str) -> Script | None:
    """Return the script with its model wrapped in this way as well; None where that is not how it is done."""
    if how not in script.wrappings:
        return None
    return script if how == "plain" else dataclasses.replace(script, wrap=WRAPPINGS[how])


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
OF_TE = {
    "model": LAYERS_OF_TE,
    "convert": "",
    "batch": "\nbatch = torch.randn(256, 256).bfloat16()\n",
    "forward": "output = model(batch)",
    "device": "cuda",
    "wrappings": ("plain",),
}
INSIDE_AUTOCAST = "with te.autocast(enabled=True):\n    output = model(batch)"

ON_A_GPU = {
    **{
        name: dataclasses.replace(
            script, device="cuda", wrappings=tuple(dict.fromkeys(("plain", *script.wrappings[:2])))
        )
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
    "te in fp8": ("te-delayed", "te-current", "te-block", "fp8-weights"),
}
"""Script -> treatments that a trial proposes without a finding."""
