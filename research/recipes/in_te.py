"""Recipes that train in FP8 through Transformer Engine, whose stand-in notes how its forward ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from research.recipes.parts import Decoder, Recipe, on_meta, sides_of_16, tokens

STAND_IN = "Transformer Engine's classes, which need a GPU to be built"


class Layer(nn.Module):
    """te.TransformerLayer by the modules that it is made of; attention itself is left out."""

    def __init__(self, width: int, keys: int, hidden: int, gated: bool, fused_qkv: bool = True) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        split = () if fused_qkv else ("query_", "key_", "value_")
        self.width = width
        self.layernorm_qkv = te.LayerNormLinear(
            width, width + 2 * keys, bias=False, parameters_split=split if keys == width else ()
        )
        self.proj = te.Linear(width, width, bias=False)
        self.mlp = (
            te.LayerNormMLP(width, hidden)
            if gated
            else nn.Sequential(
                te.LayerNormLinear(width, hidden, bias=False), nn.GELU(), te.Linear(hidden, width, bias=False)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.layernorm_qkv(x)[..., : self.width])
        return x + self.mlp(x)


class Under(nn.Module):
    """A layer that opens the autocast itself, or closes it, as bionemo's do."""

    def __init__(self, layer: nn.Module, enabled: bool, recipe: Any = None) -> None:
        super().__init__()
        self.layer, self.enabled, self.recipe = layer, enabled, recipe

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=self.enabled, recipe=self.recipe):
            return self.layer(x)


def in_bf16(width: int, out: int, bias: bool = True) -> nn.Module:
    """A head of Transformer Engine that is kept out of FP8."""
    import transformer_engine.pytorch as te

    return Under(te.Linear(width, out, bias=bias), enabled=False)


def esm_head(width: int, out: int, bias: bool = True) -> nn.Module:
    """ESM's head: a Linear as wide as the model before that to the amino acids, both out of FP8."""
    return nn.Sequential(in_bf16(width, width), nn.GELU(), in_bf16(width, out))


def stepped(model: nn.Module, batch: dict[str, Tensor] | Tensor, recipe: Any = None) -> nn.Module:
    """The model after one forward under the autocast; none where its layers open their own."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    with te.autocast(enabled=True, recipe=recipe or DelayedScaling()):
        model(**batch) if isinstance(batch, dict) else model(batch)
    return model


def few(length: int = 16) -> dict[str, Tensor]:
    return tokens(1, length, labels=False)


def accelerate_bert() -> nn.Module:
    import transformer_engine.pytorch as te

    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(vocab_size=28996))
        for name, module in list(model.named_modules()):
            if sides_of_16(module):
                linear = te.Linear(module.in_features, module.out_features)
                model.set_submodule(name, linear)
    return stepped(model, few())


def te_llama() -> nn.Module:
    layers = (Layer(4096, 4096, 11008, gated=True, fused_qkv=False) for _ in range(32))
    return stepped(on_meta(lambda: Decoder(layers, 4096, 32000)), few())


class Mnist(nn.Module):
    """Two convolutions and three Linears, of which Transformer Engine has two."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.fc1, self.fc2, self.fc3 = te.Linear(9216, 128), te.Linear(128, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x))))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        x = self.fc2(nn.functional.relu(self.fc1(x)))
        return nn.functional.log_softmax(self.fc3(x), dim=1)


def images() -> Tensor:
    return torch.empty(64, 1, 28, 28, device="meta")


def te_mnist() -> nn.Module:
    return stepped(on_meta(Mnist, torch.float32), images())


def te_fsdp() -> nn.Module:
    layers = (Layer(2048, 2048, 8192, gated=False) for _ in range(3))
    model = on_meta(lambda: nn.Sequential(*layers))
    return stepped(model, torch.empty(16, 2048, dtype=torch.bfloat16, device="meta"))


def opengenome() -> nn.Module:
    from transformer_engine.common.recipe import Float8BlockScaling

    recipe = Float8BlockScaling()
    blocks = (Under(Layer(4096, 1024, 14336, gated=True), 0 < i < 31, recipe) for i in range(32))
    model = on_meta(lambda: Decoder(blocks, 4096, 256, linear=in_bf16))
    model(**few())
    return model


def esm(width: int, layers: int) -> nn.Module:
    from transformer_engine.common.recipe import Float8BlockScaling

    recipe = Float8BlockScaling()
    blocks = (Under(Layer(width, width, 4 * width, gated=False), True, recipe) for _ in range(layers))
    model = on_meta(lambda: Decoder(blocks, width, 64, linear=esm_head))
    model(**few())
    return model


def megatron_llama(recipe: str) -> nn.Module:
    from transformer_engine.common import recipe as recipes

    layers: Iterable[nn.Module] = (Layer(4096, 1024, 14336, gated=True) for _ in range(32))
    return stepped(on_meta(lambda: Decoder(layers, 4096, 128256)), few(), getattr(recipes, recipe)())


class Gpt(nn.Module):
    """The gated GPT-2 of yxanul's benchmarks, which opens the autocast itself; heads are not told apart."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.tokens, self.places = nn.Embedding(32768, 768), nn.Embedding(2048, 768)
        self.blocks = nn.ModuleList(nn.ModuleDict(self.block(te)) for _ in range(12))
        self.head = te.Linear(768, 32768, bias=False)
        self.head.weight = self.tokens.weight

    def block(self, te: Any) -> dict[str, nn.Module]:
        sides = {
            "qkv": (768, 1152),
            "out": (768, 768),
            "gate": (768, 2048),
            "up": (768, 2048),
            "down": (2048, 768),
        }
        return {name: te.Linear(*each) for name, each in sides.items()} | {"norm": nn.RMSNorm(768)}

    def forward(self, input_ids: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        with te.autocast(enabled=True):
            for at in self.blocks:
                x = x + at["out"](at["qkv"](at["norm"](x))[..., :768])  # type: ignore[index]
                y = at["norm"](x)  # type: ignore[index]
                x = x + at["down"](nn.functional.silu(at["gate"](y)) * at["up"](y))  # type: ignore[index]
            return self.head(x)  # type: ignore[no-any-return]


def gpt_of_768() -> nn.Module:
    model = on_meta(Gpt)
    model(**few())
    return model


BERT_BATCH = {**tokens(16, 48, labels=False), "labels": torch.zeros(16, dtype=torch.long, device="meta")}
ESM = "NVIDIA/bionemo-framework/ci/lepton/model_convergence/configs/recipes"
RECIPES = (
    Recipe(
        "accelerate-bert-te",
        "huggingface/accelerate/benchmarks/fp8/transformer_engine/non_distributed.py",
        accelerate_bert,
        lambda: BERT_BATCH,
        autocast=torch.bfloat16,
        stand_in=STAND_IN,
    ),
    Recipe(
        "te-llama2-7b",
        "NVIDIA/TransformerEngine/docs/examples/te_llama/tutorial_accelerate_hf_llama_with_te.ipynb",
        te_llama,
        lambda: tokens(8, 256, labels=False),
        stand_in=STAND_IN,
    ),
    Recipe(
        "te-fsdp-example",
        "NVIDIA/TransformerEngine/examples/pytorch/fsdp/fsdp.py",
        te_fsdp,
        lambda: torch.empty(1048, 32, 2048, dtype=torch.bfloat16, device="meta"),
        stand_in=STAND_IN,
    ),
    Recipe(
        "te-mnist",
        "NVIDIA/TransformerEngine/examples/pytorch/mnist/main.py",
        te_mnist,
        images,
        stand_in=STAND_IN,
    ),
    Recipe(
        "bionemo-opengenome2-7b-fp8",
        "NVIDIA/bionemo-framework/bionemo-recipes/recipes/opengenome2_llama_native_te/hydra_config/"
        "og2_7b_thd_gqa_fp8.yaml",
        opengenome,
        lambda: tokens(1, 8192, labels=False),
        stand_in=STAND_IN,
    ),
    Recipe(
        "bionemo-esm2-15b-fp8",
        f"{ESM}/esm2_native_te_15b.yaml",
        lambda: esm(5120, 48),
        lambda: tokens(4, 1024, labels=False),
        stand_in=STAND_IN,
    ),
    Recipe(
        "bionemo-esm2-650m-fp8",
        f"{ESM}/esm2_native_te_650m.yaml",
        lambda: esm(1280, 33),
        lambda: tokens(48, 1024, labels=False),
        stand_in=STAND_IN,
    ),
    Recipe(
        "megatron-bridge-llama3-8b-b200-fp8cs",
        "NVIDIA-NeMo/Megatron-Bridge/src/megatron/bridge/perf_recipes/llama/b200/llama3.py",
        lambda: megatron_llama("Float8CurrentScaling"),
        lambda: tokens(2, 8192, labels=False),
        gpu="B200",
        stand_in=STAND_IN,
    ),
    Recipe(
        "megatron-bridge-llama3-8b-h100-fp8cs",
        "NVIDIA-NeMo/Megatron-Bridge/src/megatron/bridge/perf_recipes/llama/h100/llama3.py",
        lambda: megatron_llama("Float8CurrentScaling"),
        lambda: tokens(1, 8192, labels=False),
        stand_in=f"{STAND_IN}; its recomputation of five layers is Megatron's own and left out",
    ),
    Recipe(
        "testing-dense-gpt2-small",
        "yxanul/testing_dense/model_te_final_v2.py",
        gpt_of_768,
        lambda: tokens(8, 512, labels=False),
        stand_in=f"{STAND_IN}; attention itself is left out",
    ),
)
