"""Messages of Accelerate, transformers and Unsloth."""

from __future__ import annotations

from fp8doctor.known_errors.known_error import KnownError

UNSLOTH = "unsloth/models"

HUGGING_FACE = (
    KnownError(
        says="TransformerEngine is not available. Please install it or use a different backend.",
        pattern=r"TransformerEngine is not available\. Please install it or use a different backend"
        r"|`transformer_engine` was not found on your system"
        r"|Unsloth FP8: `transformer_engine` is not installed",
        cause="FP8 was asked for by Transformer Engine, by ACCELERATE_FP8_BACKEND=TE or a recipe of its own, "
        "and the package is not installed. 'fp8doctor env' shows who asks.",
        lines='pip install --no-build-isolation "transformer-engine[pytorch]<2.20"   # 2.20 needs cuDNN '
        "9.12; or: export ACCELERATE_FP8_BACKEND=AO",
        versions="accelerate 1.15",
        source="accelerate/utils/dataclasses.py:411, accelerator.py:2107 (1.15.0, both raised on a CPU)",
        codes=("ENV004",),
    ),
    KnownError(
        says="No module named 'unsloth.fp8_training'; cannot import name "
        "'setup_fp8_mixed_precision_training' from 'unsloth'",
        pattern=r"(No module named|cannot import name|has no attribute|from unsloth\S* import).*"
        r"(\bunsloth\.fp8_training\b|\bsetup_fp8_mixed_precision_training\b)"
        r"|(from|import) unsloth\.fp8_training\b(?!.*unsloth[/\\]fp8_training\.py)",
        cause="No release of Unsloth has these names: they are a fork's. Installing Unsloth does not help.",
        lines="FastLanguageModel.from_pretrained(..., full_finetuning=True, "
        "float8_training=Float8LinearConfig())   # Unsloth 2026.10, not for LoRA; float8_training=True on "
        "compute capability 12.x only",
        versions="no release of Unsloth, up to 2026.10.9",
        source="the wheel of unsloth 2026.10.9, in which no file holds them",
        codes=("MOD003",),
    ),
    KnownError(
        says="Your setup doesn't support bf16/gpu.",
        pattern=r"Your setup doesn't support bf16/gpu",
        cause="TrainingArguments(bf16=True) is refused where no GPU has BF16. Under FP8 bf16=True is wrong "
        "anyway: it overrides ACCELERATE_MIXED_PRECISION=fp8.",
        lines="args = TrainingArguments(..., bf16=False)   # for FP8; to look at a BF16 job without a GPU: "
        "use_cpu=True",
        versions="transformers to 5.23",
        source="transformers/training_args.py:1779 (5.23.0, raised on a CPU)",
        codes=("ENV001",),
    ),
    KnownError(
        says="The 'deepspeed>=0.9.3' distribution was not found and is required by this application.",
        pattern=r"The 'deepspeed\b(?!-)[^']{0,40}' distribution was not found and is required by this "
        r"application",
        cause="TrainingArguments(deepspeed=...) names a configuration of DeepSpeed, which is not installed. "
        "No key of that configuration trains in FP8.",
        lines="pip install deepspeed",
        versions="transformers to 5.23",
        source="transformers/utils/versions.py:103 (5.23.0, raised on a CPU)",
        codes=("ENV002",),
    ),
    KnownError(
        says="'TRANSFORMER_ENGINE' is not a valid FP8BackendType",
        pattern=r"'.*' is not a valid FP8BackendType",
        cause="ACCELERATE_FP8_BACKEND holds a name that Accelerate does not take: it knows AO, TE, MSAMP and "
        "NO. 'fp8doctor env' shows the variable.",
        lines="export ACCELERATE_FP8_BACKEND=TE   # or AO",
        versions="accelerate 1.9 to 1.15",
        source="accelerate/accelerator.py:4400 (1.15.0, raised on a CPU)",
        codes=("ENV003",),
    ),
    KnownError(
        says="Using `fp8` precision requires `transformer_engine` or `MS-AMP` to be installed; Tried to "
        "train "
        "with `fp8` and auto-detect backend, but no FP8-compatible backend was installed",
        pattern=r"Using `fp8` precision requires `transformer_engine`( or `MS-AMP`)? to be installed"
        r"|Tried to train with `fp8` and auto-detect backend, but no FP8-compatible backend was installed",
        cause="Accelerate finds no FP8 backend: Transformer Engine, MS-AMP and, from accelerate 1.6 on, "
        "torchao are all missing.",
        lines='pip install torchao "accelerate>=1.6"',
        versions="accelerate to 1.15; the text leaves torchao out, and in 2023 MS-AMP",
        source="accelerate/state.py:935, accelerator.py:501 (1.15.0); axolotl#760",
        codes=("ENV004",),
    ),
    KnownError(
        says="Passing in an FP8 configuration (or a `FP8RecipeKwargs` object) requires setting "
        "`mixed_precision='fp8'`",
        pattern=r"Passing in an? (FP8 configuration|`FP8RecipeKwargs` object) requires setting "
        r"`mixed_precision='fp8'`",
        cause="An FP8 recipe was handed to Accelerator(), and the precision is another one: the argument "
        "says so, "
        "or a variable or config file of the launcher does.",
        lines='accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])',
        versions="accelerate 1.6 to 1.15, before with the object's name; 1.8.0 and 1.8.1 "
        "raise it whenever only the launcher asked for FP8",
        source="accelerate/accelerator.py:512 (1.15.0, raised on a CPU); huggingface/accelerate#3086 (0.30)",
        codes=("ENV001", "ENV008"),
    ),
    KnownError(
        says="torchao with FSDP2 and cpu_ram_efficient_loading is not supported",
        pattern=r"torchao with FSDP2 and cpu_ram_efficient_loading is not supported",
        cause="`accelerate launch` switches on loading on the first rank only, which torchao's conversion "
        "does "
        "not survive.",
        lines="accelerate launch --fsdp_cpu_ram_efficient_loading false train.py",
        versions="accelerate 1.8 to 1.15",
        source="accelerate/accelerator.py:525 (1.15.0)",
    ),
    KnownError(
        says="`AcceleratorState` object has no attribute `fsdp_plugin`",
        pattern=r"`AcceleratorState` object has no attribute `fsdp_plugin`",
        cause="Code asks for FSDP's settings where FSDP is not on. accelerate 1.8 does so itself whenever "
        "its FP8 backend is torchao.",
        lines='pip install --upgrade "accelerate>=1.9"   # of 1.8; else ask only where FSDP is on',
        versions="accelerate 1.8.0 and 1.8.1 in FP8; any where the script asks",
        source="accelerate/accelerator.py and state.py (1.8.0, raised on a CPU); huggingface/accelerate#1893",
    ),
    KnownError(
        says="You must pass a model and an optimizer together to `accelerate.prepare()` when using "
        "TransformerEngine",
        pattern=r"You must pass a model and an optimizer together to `accelerate\.prepare\(\)` when using "
        r"(TransformerEngine|MS-AMP)",
        cause="Accelerate puts Transformer Engine's layers in the place of the model's, and the optimizer "
        "has to get their parameters: one prepare() takes both.",
        lines="model, optimizer = accelerator.prepare(model, optimizer)   # the loaders in the same call or "
        "in one before it",
        versions="accelerate with backend TE or MS-AMP, 1.15 included",
        source="accelerate/accelerator.py:2124 and 2662 (1.15.0); kohya-ss/sd-scripts#2176",
    ),
    KnownError(
        says="'NoneType' object has no attribute 'config'",
        pattern=r"'NoneType' object has no attribute 'config'",
        cause="In Accelerate's _prepare_ao it says that ACCELERATE_FP8_BACKEND=AO is set and the precision "
        "is not fp8, so that no recipe was made: a Trainer with bf16=True makes it bf16, whatever the "
        "launcher asks for. Elsewhere it is another error.",
        lines="args = TrainingArguments(..., bf16=False, fp16=False)   # for FP8; for BF16: unset "
        "ACCELERATE_FP8_BACKEND",
        versions="accelerate 1.9 to 1.15",
        source="accelerate/accelerator.py:2090 (1.15.0, raised on a CPU)",
        codes=("ENV001", "ENV008"),
    ),
    KnownError(
        says="MXFP8 block scaling is not available: ...",
        pattern=r"MXFP8 block scaling is not available\b",
        cause="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING or use_mxfp8_block_scaling asks for MXFP8, which "
        "Transformer Engine has on compute capability 10.x only.",
        lines="unset ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING",
        versions="accelerate 1.11 to 1.15",
        source="accelerate/utils/transformer_engine.py:168 (1.15.0)",
        codes=("GPU002",),
    ),
    KnownError(
        says="The current device has compute capability of ... which is insufficient for FP8 mixed precision "
        "training. Will use FP16 instead.",
        pattern=r"insufficient for FP8 mixed precision training \(requires a GPU Hopper/Ada",
        cause="Accelerate turned fp8 into fp16, on a warning: torch's current device is older than Ada.",
        lines='accelerator = Accelerator(mixed_precision="bf16")',
        versions="accelerate 1.4 to 1.15",
        source="accelerate/state.py:940 (1.15.0)",
        codes=("GPU003", "GPU001"),
    ),
    KnownError(
        says="FP8 quantized models is only supported on GPUs with compute capability >= 8.9 (or 9.0)",
        pattern=r"FP8 quantized models is only supported on GPUs with compute capability >= (8\.9|9\.0)",
        cause="This GPU cannot run the checkpoint's FP8 layers; transformers loads them in BF16 where it "
        "can.",
        lines="AutoModelForCausalLM.from_pretrained(name, "
        "quantization_config=FineGrainedFP8Config(dequantize=True))",
        versions="transformers 5.23 warns and dequantises for quant_method fp8, and raises for fbgemm_fp8",
        source="transformers/quantizers/quantizer_finegrained_fp8.py:53, quantizer_fbgemm_fp8.py:73 (5.23.0)",
        codes=("GPU001",),
    ),
    KnownError(
        says="You cannot perform fine-tuning on purely quantized models",
        pattern=r"You cannot perform fine-tuning on purely quantized models",
        cause="A Trainer got a quantized model (FP8, 4 or 8 bits) without adapters: such weights get no "
        "gradient.",
        lines="model = get_peft_model(model, LoraConfig())   # to save memory; for speed BF16 weights and "
        "convert_to_float8_training(model)",
        versions="transformers with Trainer, 5.23 included",
        source="transformers/trainer_utils.py:133 (5.23.0, raised on a CPU)",
        codes=("MOD003", "MOD009"),
    ),
    KnownError(
        says="The model you are trying to fine-tune is quantized with ... but that quantization method do "
        "not "
        "support training",
        pattern=r"that quantization method do not support training",
        cause="The checkpoint's quantization has no backward in transformers, with adapters either.",
        lines="AutoModelForCausalLM.from_pretrained(name, "
        "quantization_config=FineGrainedFP8Config(dequantize=True))   # of an FP8 checkpoint",
        versions="transformers with Trainer, 5.23 included",
        source="transformers/trainer_utils.py:140 (5.23.0, raised on a CPU)",
        codes=("MOD003", "MOD009"),
    ),
    KnownError(
        says="Unsloth: On the fly `load_in_fp8` requires H100 GPUs or after (or torch 2.9.0+, or torchao "
        "0.15.0+)",
        pattern=r"Unsloth: (On the fly )?`load_in_fp8` requires (H100 GPUs or after|torch 2\.9\.0\+"
        r"|torchao 0\.15\.0\+)",
        cause="load_in_fp8 quantizes the weights while it loads them, on compute capability 9.0 and higher "
        "only. "
        "It saves memory; it is not FP8 training.",
        lines="FastLanguageModel.from_pretrained(name, load_in_16bit=True)   # or load_in_4bit=True",
        versions="Unsloth 2026.10",
        source=f"{UNSLOTH}/loader_utils.py:4508 to 4528 (2026.10.9)",
        codes=("MOD003",),
    ),
    KnownError(
        says="Unsloth: `load_in_fp8` is not compatible with full finetuning",
        pattern=r"Unsloth: `load_in_fp8` is not compatible with",
        cause="Weights that load_in_fp8 quantized get no gradient, so that only adapters can be trained on "
        "them, "
        "and no other load_in_ fits beside it.",
        lines="FastLanguageModel.from_pretrained(name, full_finetuning=True, "
        "float8_training=Float8LinearConfig())   # FP8 training; float8_training=True on compute capability "
        "12.x only; or without load_in_fp8",
        versions="Unsloth 2026.10",
        source=f"{UNSLOTH}/loader_utils.py:4496 and 4499 (2026.10.9)",
        codes=("MOD003",),
    ),
    KnownError(
        says="Unsloth: float8_training = ... has not been measured faster than bfloat16 on ...",
        pattern=r"Unsloth: float8_training( = '\w+')? (has not been measured faster than bfloat16"
        r"|trained slower than bfloat16|needs compute capability 8\.9\+|with tensorwise scaling gives NaN "
        r"|needs the model on an NVIDIA GPU)",
        cause="Unsloth runs its float8_training by name only where it timed it faster (compute capability "
        "12.x); "
        "on 8.9 with one scale per tensor it saw NaN gradients.",
        lines='config = Float8LinearConfig.from_recipe_name("tensorwise")\n'
        "# float8_training=config asks for it by hand on Hopper and Blackwell; on Ada train in BF16",
        versions="Unsloth 2026.10",
        source=f"{UNSLOTH}/float8_training.py:195 to 225 (2026.10.9)",
    ),
    KnownError(
        says="Unsloth: FP8 quantization is only supported on L4 and higher GPUs with compute capability 8.9",
        pattern=r"Unsloth: (FBGEMM )?FP8 quantization is only supported on (L4|H100) and higher GPUs",
        cause="The checkpoint's weights are in FP8, and this GPU has no tensor cores for them (FBGEMM's "
        "layers "
        "want Hopper).",
        lines="FastLanguageModel.from_pretrained(name)   # the 16- or 4-bit checkpoint of the same model",
        versions="Unsloth 2026.10",
        source=f"{UNSLOTH}/_utils.py:9421 and 9431 (2026.10.9)",
        codes=("GPU001",),
    ),
)
