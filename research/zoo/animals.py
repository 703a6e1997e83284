"""Models of timm, diffusers, torchvision, vit_pytorch, x_transformers and transformers, small in depth and as
they are in width, on the meta device, each with a batch that its forward takes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.test_untouched_models import MODELS, TWO, Untouched

META, CPU = torch.device("meta"), torch.device("cpu")
CLASSES = 1008
"""A multiple of 16, so that a head can be converted and its step runs."""
BATCH = 16
"""Images or sentences: with it the rows of every Linear are a multiple of 16, which an FP8 GEMM wants."""
IMAGE = (3, 224, 224)


@dataclass(frozen=True)
class Animal:
    """A model, and the arguments of its forward."""

    name: str
    build: Callable[[], nn.Module]
    batch: dict[str, Any] = field(default_factory=dict)
    """Arguments by name, on the meta device; by position where the name is a number."""
    device: torch.device = META

    def make(self) -> nn.Module:
        """The model in BF16, ready to train."""
        try:
            with self.device:
                model = self.build()
        except (RuntimeError, NotImplementedError):  # it reads a value where it is built
            model = self.build().to(self.device)
        return model.bfloat16().train()

    def step(self, model: nn.Module) -> None:
        """One forward and backward."""
        batch = {
            name: torch.zeros_like(value, device=self.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.batch.items()
        }
        by_position = [value for name, value in batch.items() if name.isdigit()]
        by_name = {name: value for name, value in batch.items() if not name.isdigit()}
        output = model(*by_position, **by_name)
        losses = [each.float().sum() for each in tensors(output) if each.requires_grad]
        torch.stack(losses).sum().backward()


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of floating point in what a forward returned."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
        return
    inside = output.values() if isinstance(output, dict) else output
    if isinstance(inside, list | tuple) or isinstance(output, dict):
        for each in inside:
            yield from tensors(each)


def floats(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device=META, dtype=torch.bfloat16)


def numbers(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, device=META, dtype=torch.int64)


def of_transformers(*names: str) -> Iterator[Animal]:
    """These models, or all, of text and images that have a batch of one kind; others are only looked at
    elsewhere."""
    with_values = {each.model for each in NEED_VALUES}
    for each in (*MODELS, *MORE, *NEED_VALUES):
        device = CPU if each in NEED_VALUES else META
        if (
            (names and each.model not in names)
            or each.model in LEFT_OUT
            or (device == META and each.model in with_values)
        ):
            continue
        if batch := transformers_batch(each):
            yield Animal(each.model, lambda each=each: made(each), batch, device)


MORE = (
    Untouched("FunnelForMaskedLM", "FunnelConfig", {"block_sizes": [2, 2], "num_decoder_layers": 2}, ()),
    Untouched("JambaForCausalLM", "JambaConfig", {"num_hidden_layers": 8}, (8,)),
    Untouched("PhimoeForCausalLM", "PhimoeConfig", TWO, (2,)),
    Untouched("GlmForCausalLM", "GlmConfig", TWO, (2,)),
    Untouched("Lfm2ForCausalLM", "Lfm2Config", TWO, (2,)),
    Untouched("DINOv3ViTModel", "DINOv3ViTConfig", TWO, (2,)),
    Untouched("SegformerForImageClassification", "SegformerConfig", {}, ()),
    Untouched("PvtV2ForImageClassification", "PvtV2Config", {}, ()),
    Untouched("MobileViTForImageClassification", "MobileViTConfig", {}, ()),
    Untouched("DPTForDepthEstimation", "DPTConfig", {}, ()),
    Untouched("YolosForObjectDetection", "YolosConfig", TWO, ()),
    Untouched("ViTMAEForPreTraining", "ViTMAEConfig", TWO, ()),
    Untouched("HieraForImageClassification", "HieraConfig", {}, ()),
    Untouched(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {"num_layers": 2, "num_decoder_layers": 2},
        (),
    ),
)
"""Beside those that are only looked at."""

NARROW = {"d_model": 256, "vocab_size": 1024, "encoder_layers": 2, "decoder_layers": 2}
NEED_VALUES = (
    Untouched("DebertaV2ForMaskedLM", "DebertaV2Config", {"vocab_size": 1024, **TWO}, ()),
    Untouched("BartForConditionalGeneration", "BartConfig", NARROW, ()),
    Untouched("M2M100ForConditionalGeneration", "M2M100Config", NARROW, ()),
    Untouched("NystromformerForMaskedLM", "NystromformerConfig", {"vocab_size": 1024, **TWO}, ()),
    Untouched("LukeForMaskedLM", "LukeConfig", {"vocab_size": 1024, "entity_vocab_size": 4096, **TWO}, ()),
    Untouched(
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, **TWO},
        (),
    ),
)
"""Models whose forward reads values, which a tensor on the meta device has not: they run on the CPU."""

LEFT_OUT = (
    "XLNetLMHeadModel",
    "LongformerForMaskedLM",
    "BigBirdForMaskedLM",
    "DetrForObjectDetection",
    "Wav2Vec2ForCTC",
    "HubertForCTC",
    "RwkvForCausalLM",
    "FNetForMaskedLM",
    "PegasusForConditionalGeneration",
    "MarianMTModel",
)
"""Models that run neither on the meta device nor within seconds on a CPU."""

TRANSFORMERS_BATCHES: dict[str, dict[str, Any]] = {
    "CLIPModel": {"input_ids": numbers(BATCH, 64), "pixel_values": floats(BATCH, *IMAGE)},
    "WhisperForConditionalGeneration": {
        "input_features": floats(BATCH, 80, 3000),
        "decoder_input_ids": numbers(BATCH, 64),
    },
    "MobileViTForImageClassification": {"pixel_values": floats(BATCH, 3, 256, 256)},
    "DPTForDepthEstimation": {"pixel_values": floats(BATCH, 3, 384, 384)},
    "YolosForObjectDetection": {"pixel_values": floats(BATCH, 3, 512, 864)},
    "ASTForAudioClassification": {"input_values": floats(BATCH, 1024, 128)},
    "VideoMAEForVideoClassification": {"pixel_values": floats(BATCH, 16, *IMAGE)},
}


def made(model: Untouched) -> nn.Module:
    """The model, on the device that is chosen around it."""
    import transformers

    config = getattr(transformers, model.config)(**model.settings)
    built: nn.Module = getattr(transformers, model.model)(config)
    return built


def transformers_batch(model: Untouched) -> dict[str, Any]:
    """What the forward of a model of transformers takes."""
    import transformers

    if model.model in TRANSFORMERS_BATCHES:
        return TRANSFORMERS_BATCHES[model.model]
    taken = inspect.signature(getattr(transformers, model.model).forward).parameters
    if "pixel_values" in taken and "input_ids" not in taken:
        return {"pixel_values": floats(BATCH, *IMAGE)}
    if "pixel_values" in taken or "input_ids" not in taken:
        return {}
    batch = {"input_ids": numbers(BATCH, 64)}
    return batch | ({"decoder_input_ids": numbers(BATCH, 64)} if "decoder_input_ids" in taken else {})


TIMM = {
    "vit_base_patch16_224": {"depth": 2},
    "vit_small_patch16_224": {"depth": 2},
    "vit_base_patch16_dinov3": {"depth": 2},
    "vit_so400m_patch14_siglip_224": {"depth": 2},
    "deit3_base_patch16_224": {"depth": 2},
    "beitv2_base_patch16_224": {"depth": 2},
    "eva02_base_patch14_224": {"depth": 2},
    "cait_s24_224": {"depth": 2},
    "xcit_small_12_p16_224": {"depth": 2},
    "mixer_b16_224": {},
    "mixer_l16_224": {},
    "resmlp_12_224": {},
    "gmixer_24_224": {},
    "swin_tiny_patch4_window7_224": {},
    "swinv2_tiny_window8_256": {"img_size": 224, "window_size": 7},
    "convnext_tiny": {"depths": (2, 2, 2, 2)},
    "convnextv2_base": {"depths": (2, 2, 2, 2)},
    "twins_svt_base": {"depths": (2, 2, 2, 2)},
    "twins_pcpvt_small": {"depths": (2, 2, 2, 2)},
    "pvt_v2_b2": {"depths": (2, 2, 2, 2)},
    "maxvit_tiny_tf_224": {},
    "coatnet_0_rw_224": {},
    "davit_tiny": {"depths": (1, 1, 2, 1)},
    "levit_256": {},
    "mvitv2_tiny": {},
    "focalnet_tiny_srf": {},
    "volo_d1_224": {},
    "hiera_tiny_224": {},
    "tnt_s_patch16_224": {"depth": 2},
    "pit_s_224": {},
    "nest_tiny_jx": {},
    "poolformer_s12": {},
    "efficientformer_l1": {},
    "edgenext_small": {},
    "mobilevit_s": {},
    "resnet18": {},
}


def of_timm() -> Iterator[Animal]:
    timm = importlib.import_module("timm")
    for name, settings in TIMM.items():
        yield Animal(
            name,
            lambda name=name, settings=settings: timm.create_model(name, num_classes=CLASSES, **settings),
            {"0": floats(BATCH, *IMAGE)},
        )


TORCHVISION = (
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "convnext_tiny",
    "maxvit_t",
    "vgg11",
    "resnet18",
    "efficientnet_b0",
    "alexnet",
)


def of_torchvision() -> Iterator[Animal]:
    models = importlib.import_module("torchvision.models")
    for name in TORCHVISION:
        yield Animal(
            name,
            lambda name=name: models.get_model(name, weights=None, num_classes=CLASSES),
            {"0": floats(BATCH, *IMAGE)},
        )


VIT = {"image_size": 224, "patch_size": 16, "num_classes": CLASSES, "dim": 768, "depth": 2, "mlp_dim": 3072}
VIT_PYTORCH: dict[tuple[str, str], dict[str, Any]] = {
    ("vit", "ViT"): {"heads": 12, **VIT},
    ("simple_vit", "SimpleViT"): {"heads": 12, **VIT},
    ("deepvit", "DeepViT"): {"heads": 12, **VIT},
    ("cait", "CaiT"): {"heads": 12, "cls_depth": 2, **VIT},
    ("simple_vit_with_register_tokens", "SimpleViT"): {"heads": 12, **VIT},
    ("simple_vit_with_qk_norm", "SimpleViT"): {"heads": 12, **VIT},
    ("parallel_vit", "ViT"): {"heads": 12, **VIT},
    ("vit_for_small_dataset", "ViT"): {"heads": 12, **VIT},
    ("vit_with_patch_dropout", "ViT"): {"heads": 12, **VIT},
    ("cvt", "CvT"): {"num_classes": CLASSES},
    ("levit", "LeViT"): {
        "image_size": 224,
        "num_classes": CLASSES,
        "dim": (256, 384, 512),
        "depth": 2,
        "heads": (4, 6, 8),
        "mlp_mult": 2,
    },
    ("pit", "PiT"): {**VIT, "patch_size": 14, "dim": 256, "depth": (2, 2, 2), "heads": 8},
    ("twins_svt", "TwinsSVT"): {"num_classes": CLASSES},
    ("regionvit", "RegionViT"): {"num_classes": CLASSES},
    ("max_vit", "MaxViT"): {
        "num_classes": CLASSES,
        "dim": 96,
        "depth": (2, 2),
        "dim_conv_stem": 64,
        "window_size": 7,
    },
    ("xcit", "XCiT"): {"heads": 12, "cls_depth": 2, **VIT},
}


def of_vit_pytorch() -> Iterator[Animal]:
    for (module, kind), settings in VIT_PYTORCH.items():
        made = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)
        yield Animal(
            f"{module}.{kind}",
            lambda made=made, settings=settings: made(**settings),
            {"0": floats(BATCH, *IMAGE)},
        )


def of_x_transformers() -> Iterator[Animal]:
    x = importlib.import_module("x_transformers")

    def text(**settings: Any) -> Callable[[], nn.Module]:
        return lambda: x.TransformerWrapper(
            num_tokens=32000,
            max_seq_len=1024,
            attn_layers=x.Decoder(dim=1024, depth=2, heads=8, **settings),
        )

    ids = {"0": numbers(BATCH, 64)}
    yield Animal("Decoder", text(), ids)
    yield Animal("Decoder, SwiGLU", text(ff_swish=True, ff_glu=True), ids)
    yield Animal("Decoder, macaron", text(macaron=True), ids)
    yield Animal("Decoder, sandwich", text(sandwich_coef=1), ids)
    yield Animal("Decoder, one key and value head", text(attn_one_kv_head=True), ids)
    yield Animal(
        "Encoder of images",
        lambda: x.ViTransformerWrapper(
            image_size=224,
            patch_size=16,
            num_classes=CLASSES,
            attn_layers=x.Encoder(dim=768, depth=2, heads=12),
        ),
        {"0": floats(BATCH, *IMAGE)},
    )
    yield Animal(
        "Continuous",
        lambda: x.ContinuousTransformerWrapper(
            dim_in=64, dim_out=128, max_seq_len=512, attn_layers=x.Encoder(dim=768, depth=2, heads=12)
        ),
        {"0": floats(BATCH, 512, 64)},
    )


def of_diffusers() -> Iterator[Animal]:
    d = importlib.import_module("diffusers")
    time, text = numbers(BATCH), floats(BATCH, 64, 768)
    yield Animal(
        "UNet2DConditionModel",
        lambda: d.UNet2DConditionModel(cross_attention_dim=768),
        {"0": floats(BATCH, 4, 32, 32), "1": time, "2": text},
    )
    yield Animal("UNet2DModel", d.UNet2DModel, {"0": floats(BATCH, 3, 64, 64), "1": time})
    yield Animal("AutoencoderKL", d.AutoencoderKL, {"0": floats(BATCH, 3, 64, 64)})
    yield Animal(
        "DiTTransformer2DModel",
        lambda: d.DiTTransformer2DModel(num_layers=2),
        {"0": floats(BATCH, 4, 32, 32), "timestep": time, "class_labels": numbers(BATCH)},
    )
    yield Animal(
        "PixArtTransformer2DModel",
        lambda: d.PixArtTransformer2DModel(num_layers=2, caption_channels=768, sample_size=32),
        {
            "0": floats(BATCH, 4, 32, 32),
            "encoder_hidden_states": text,
            "timestep": time,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    )
    yield Animal(
        "SD3Transformer2DModel",
        lambda: d.SD3Transformer2DModel(
            num_layers=2, caption_projection_dim=1152, joint_attention_dim=768, pooled_projection_dim=768
        ),
        {
            "0": floats(BATCH, 16, 32, 32),
            "encoder_hidden_states": text,
            "pooled_projections": floats(BATCH, 768),
            "timestep": time,
        },
    )
    yield Animal(
        "FluxTransformer2DModel",
        lambda: d.FluxTransformer2DModel(num_layers=2, num_single_layers=2, joint_attention_dim=768),
        {
            "0": floats(BATCH, 256, 64),
            "encoder_hidden_states": text,
            "pooled_projections": floats(BATCH, 768),
            "timestep": floats(BATCH),
            "img_ids": floats(256, 3),
            "txt_ids": floats(64, 3),
        },
    )
    yield Animal(
        "SanaTransformer2DModel",
        lambda: d.SanaTransformer2DModel(num_layers=2, caption_channels=768),
        {"0": floats(BATCH, 32, 32, 32), "encoder_hidden_states": text, "timestep": time},
    )
    yield Animal(
        "AuraFlowTransformer2DModel",
        lambda: d.AuraFlowTransformer2DModel(
            num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=768, caption_projection_dim=3072
        ),
        {"0": floats(BATCH, 4, 32, 32), "encoder_hidden_states": text, "timestep": floats(BATCH)},
    )
    yield Animal(
        "LTXVideoTransformer3DModel",
        lambda: d.LTXVideoTransformer3DModel(num_layers=2, caption_channels=768),
        {
            "0": floats(BATCH, 256, 128),
            "encoder_hidden_states": text,
            "timestep": time,
            "encoder_attention_mask": numbers(BATCH, 64),
            "num_frames": 4,
            "height": 8,
            "width": 8,
        },
    )
    yield Animal(
        "WanTransformer3DModel",
        lambda: d.WanTransformer3DModel(num_layers=2, text_dim=768, num_attention_heads=16),
        {"0": floats(BATCH, 16, 2, 16, 16), "timestep": time, "encoder_hidden_states": text},
    )
    yield Animal(
        "CogVideoXTransformer3DModel",
        lambda: d.CogVideoXTransformer3DModel(num_layers=2, text_embed_dim=768),
        {
            "0": floats(BATCH, 13, 16, 60, 90),
            "encoder_hidden_states": floats(BATCH, 226, 768),
            "timestep": time,
        },
    )
    yield Animal(
        "PriorTransformer",
        lambda: d.PriorTransformer(num_layers=2),
        {
            "0": floats(BATCH, 768),
            "timestep": time,
            "proj_embedding": floats(BATCH, 768),
            "encoder_hidden_states": floats(BATCH, 77, 768),
        },
    )


LIBRARIES: dict[str, Callable[[], Iterator[Animal]]] = {
    "transformers": of_transformers,
    "timm": of_timm,
    "diffusers": of_diffusers,
    "torchvision": of_torchvision,
    "vit_pytorch": of_vit_pytorch,
    "x_transformers": of_x_transformers,
}
