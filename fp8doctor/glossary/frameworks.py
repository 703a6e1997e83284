"""Names of libraries, and the settings and functions that users type."""

from __future__ import annotations

from fp8doctor.glossary.word import Word

FRAMEWORKS = (
    # torch and torchao
    Word(
        (
            "torch.compile",
            "compile",
            "inductor",
            "TorchInductor",
            "Dynamo",
            "TorchDynamo",
            "compile_model",
            "kernel fusion",
            "fusion",
        ),
        "torch's compiler. It fuses torchao's casts into the kernels around them: without it FP8 is slower "
        "than BF16.",
        ("CMP001", "CMP002", "CMP006", "CMP007"),
    ),
    Word(
        ("compile blocks", "regional compilation", "block.compile()", "use_regional_compilation"),
        "Compiling each repeated block by itself: as fast as the whole model, and many times quicker to "
        "compile.",
        ("CMP001", "CMP004", "CMP006"),
    ),
    Word(
        ("max-autotune", "max-autotune-no-cudagraphs", "mode=", "compile_mode"),
        'Mode of torch.compile that tries more GEMM kernels and records CUDA graphs; "-no-cudagraphs" '
        "leaves the graphs out.",
        ("STP001",),
    ),
    Word(
        ("graph break", "graph breaks", "fullgraph"),
        "Where Dynamo ends a graph because it cannot trace on. Inside a block it parts casts from what "
        "they fuse with; fullgraph=True raises there.",
        ("CMP003",),
    ),
    Word(
        ("recompile", "recompile_limit", "cache_size_limit"),
        "A new version of compiled code for other shapes or flags. Of a function 8 are kept; the next one "
        "runs eagerly.",
        ("CMP005",),
    ),
    Word(
        ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "suppress_errors"),
        "Switches that leave the compile marks in place and compile nothing.",
        ("CMP002",),
    ),
    Word(
        ("eager", "eagerly", "uncompiled"),
        "Run by Python operation by operation, each a kernel of its own.",
        ("CMP001", "CMP007"),
    ),
    Word(
        ("torchao", "AO", "torchao.float8"),
        "PyTorch's library whose convert_to_float8_training makes Linears train in FP8. It has to be "
        "compiled.",
        ("CMP001", "SHP005"),
    ),
    Word(
        ("convert_to_float8_training", "module_filter_fn", "conversion"),
        "torchao's function that replaces nn.Linear in place by Float8Linear. Without a filter it takes "
        "every Linear, the head and LoRA's too.",
        ("MOD001", "MOD004", "SHP004", "LORA003", "MOD011"),
    ),
    Word(
        ("Float8Linear", "Float8LinearConfig"),
        "torchao's Linear that casts and multiplies in FP8. Its weight stays in 16 or 32 bits, so a look "
        "at dtypes does not show it.",
        ("CMP001",),
    ),
    Word(
        ("pad_inner_dim", "ACCELERATE_FP8_PAD_INNER_DIM"),
        "torchao's option that pads K of each GEMM to 16. Uncompiled it copies aligned tensors too. "
        "Accelerate has it on.",
        ("SHP001",),
    ),
    Word(
        ("precompute_float8_dynamic_scale_for_fsdp", "precompute scales"),
        "torchao's call after optimizer.step() that makes the scales of all FSDP2 weights in one reduction.",
        ("DST002",),
    ),
    Word(
        ("autocast", "torch.autocast", "torch.amp", "AMP"),
        "torch's autocast runs operations in BF16 or FP16, never in FP8. Transformer Engine has one of its "
        "own.",
        ("MOD002", "MEM003"),
    ),
    # Transformer Engine
    Word(
        ("Transformer Engine", "TE", "te.Linear", "te.TransformerLayer"),
        "NVIDIA's library of FP8 layers. They compute in FP8 under its own autocast only, else in BF16.",
        ("MOD002", "STP001", "ENV004"),
    ),
    Word(
        ("te.autocast", "fp8_autocast", "te.fp8_autocast"),
        "The context in which Transformer Engine's layers compute in FP8, with the recipe it is given; "
        "fp8_autocast before 2.9. It does nothing to nn.Linear.",
        ("MOD002",),
    ),
    Word(
        ("quantized_model_init", "fp8_model_init"),
        "Transformer Engine's context that builds layers with weights in FP8 alone; fp8_model_init before "
        "2.9.",
        ("MEM001",),
    ),
    Word(
        ("is_first_microbatch",),
        "Transformer Engine's argument by which the micro-batches of a step share one cast of each weight; "
        "the FP8 copy then stays.",
        ("MEM001",),
    ),
    Word(
        ("fp8_dpa", "fp8_mha", "FP8 attention"),
        "Transformer Engine's recipe settings that put te.DotProductAttention in FP8, off by default. They "
        "do nothing to Linears or other attention.",
        ("MEM004",),
    ),
    Word(
        ("te.checkpoint", "transformer_engine.pytorch.checkpoint"),
        "Transformer Engine's checkpointing. It recomputes under the FP8 state of the forward, which "
        "torch.utils.checkpoint may not.",
        ("CKP002",),
    ),
    # Hugging Face
    Word(
        ("Accelerate", "Accelerator", "accelerate launch", "accelerator.prepare", "prepare"),
        "Converts the model to FP8 in prepare(): by torchao where it is installed and no backend is named, "
        "and compiles nothing unless told.",
        ("ENV008", "CMP001", "ENV001", "MOD007"),
    ),
    Word(
        ("ACCELERATE_MIXED_PRECISION", "mixed_precision"),
        "Accelerate's precision: fp8 asks for FP8. A Trainer with bf16=True beats it without a word.",
        ("ENV001", "MOD001", "GPU003"),
    ),
    Word(
        ("ACCELERATE_FP8_BACKEND", "fp8_backend", "backend"),
        "Accelerate's FP8 library, in capitals: TE, AO or MSAMP. The launcher's own --fp8_backend te ends "
        "in a ValueError; a bare FP8_BACKEND is read by nothing.",
        ("ENV003", "ENV008", "ENV004", "MOD006", "ENV002"),
    ),
    Word(
        ("FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",),
        "Read by nothing: Accelerate's variables begin with ACCELERATE_.",
        ("ENV002",),
    ),
    Word(
        ("FP8RecipeKwargs", "TERecipeKwargs", "AORecipeKwargs", "MSAMPRecipeKwargs", "fp8_kwargs"),
        "Accelerate's recipes, for kwargs_handlers; each names its backend. FP8RecipeKwargs is deprecated "
        "and knows no torchao.",
        ("ENV008", "ENV002"),
    ),
    Word(
        ("fp8_config", "accelerate config"),
        "The FP8 section of Accelerate's YAML: fp8_config: {backend: TE}.",
        ("ENV003", "ENV002"),
    ),
    Word(
        ("MS-AMP",),
        "Microsoft's FP8 library, an old backend of Accelerate. It is maintained no more.",
        ("ENV008",),
    ),
    Word(
        ("Trainer", "TrainingArguments", "bf16=True", "transformers.Trainer"),
        "It has no FP8 argument. It takes FP8 from ACCELERATE_MIXED_PRECISION=fp8 with bf16=False, and "
        "converts in train(), not before.",
        ("ENV001", "MOD001"),
    ),
    Word(
        ("SFTTrainer", "SFTConfig", "TRL", "DPOTrainer", "GRPOTrainer", "GRPO"),
        "TRL's configs set bf16=True unless told bf16=False, which beats the environment's fp8, and turn "
        "checkpointing on.",
        ("ENV001", "CKP001"),
    ),
    Word(
        ("FP8 weights", "FineGrainedFP8Config", "FP8Linear", "FbgemmFp8Linear", "quant_method: fp8"),
        "Weights stored in FP8. They save memory and are no FP8 training: the backward runs in BF16, and "
        "the weight gets no gradient.",
        ("MOD003",),
    ),
    Word(
        ("Conv1D", "GPT-2"),
        "transformers' transposed Linear of GPT-2. It is no nn.Linear, so torchao and Accelerate pass it "
        "over.",
        ("MOD004", "MOD001"),
    ),
    Word(
        ("save_pretrained", "state_dict", "safetensors", "invalid python storage"),
        "Some FP8 weights are tensor subclasses that a checkpoint cannot hold.",
        ("MOD010",),
    ),
    # Unsloth
    Word(
        ("Unsloth", "FastLanguageModel", "FastModel", "FastLanguageModel.from_pretrained"),
        "Its trainers set bf16 and overwrite ACCELERATE_MIXED_PRECISION. load_in_fp8 stores weights in "
        "FP8; float8_training trains in it.",
        ("ENV001", "MOD003", "MOD002"),
    ),
    Word(
        ("load_in_fp8",),
        "Unsloth's option for weights stored in FP8: less memory, and the backward in BF16. It is no FP8 "
        "training.",
        ("MOD003",),
    ),
    Word(
        ("fast_inference",),
        "Unsloth's option that generates with vLLM, as reinforcement learning does. It makes no training "
        "step faster.",
        ("MOD003",),
    ),
    Word(
        ("float8_training", "full_finetuning"),
        "Unsloth 2026.10's option for full fine-tuning in FP8 by torchao, not for LoRA. True works on "
        "compute capability 12.x only; elsewhere pass a Float8LinearConfig.",
        ("ENV001", "CMP001"),
    ),
    Word(
        (
            "fp8_training",
            "unsloth.fp8_training",
            "setup_fp8_mixed_precision_training",
            "FP8TrainingConfig",
            "FP8Trainer",
            "check_fp8_support",
            "get_fp8_autocast_context",
            "convert_model_to_fp8",
        ),
        "In no release of Unsloth: names of a fork or of a draft. Unsloth 2026.10 has "
        "float8_training=Float8LinearConfig(), for full fine-tuning.",
        ("ENV001", "MOD003"),
    ),
    # Others
    Word(
        ("DeepSpeed", "ds_config", "ds_config.json", "ZeRO", "zero_optimization"),
        'It trains in FP8 with no key of its configuration; a section "fp8" is read by nothing.',
        ("ENV002",),
    ),
    Word(
        ("LLaMA-Factory",),
        "Two of the FP8 variables that it sets are read by nothing. Under transformers 5 its fp8: true "
        "trains in BF16, unless fp8_backend is te.",
        ("ENV001", "ENV002"),
    ),
    Word(
        ("Lightning", "TransformerEnginePrecision"),
        'precision="transformer-engine" replaces Linears by Transformer Engine\'s, with delayed scaling, '
        "unless the model has one of its layers already.",
        ("MOD001", "MOD002"),
    ),
    Word(
        ("CUDA_LAUNCH_BLOCKING", "detect_anomaly", "TORCH_LOGS"),
        "Switches to find errors with. Each costs time in every step, and FP8 more than BF16.",
        ("ENV006",),
    ),
)
