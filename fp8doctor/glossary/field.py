"""Words of FP8 training and of the GPU."""

from __future__ import annotations

from fp8doctor.glossary.word import Word

FIELD = (
    # Numbers
    Word(
        ("FP8", "float8", "8-bit floating point", "use_fp8"),
        "Numbers of 8 bits. FP8 training multiplies FP8 copies of BF16 tensors; weights, gradients and "
        "optimizer stay in 16 or 32 bits.",
        ("MEM005", "MOD003"),
    ),
    Word(
        ("BF16", "bfloat16"),
        "16 bits with the range of fp32 and 8 bits of precision. FP8 is held to the best BF16 that was "
        "timed.",
        ("CMP007",),
    ),
    Word(
        ("FP16", "float16", "half precision"),
        "16 bits with a small range, which needs a gradient scaler. If the current device has no FP8 tensor "
        "cores, Accelerate turns fp8 into fp16.",
        ("GPU003",),
    ),
    Word(
        ("E4M3", "float8_e4m3fn", "torch.float8_e4m3fn"),
        "The FP8 format with 3 bits of mantissa, up to ±448: for inputs and weights.",
        ("NUM003", "NUM001"),
    ),
    Word(
        ("E5M2", "float8_e5m2", "torch.float8_e5m2"),
        "The FP8 format with 2 bits of mantissa, up to ±57,344: for gradients. In the forward it rounds "
        "twice as coarsely as E4M3.",
        ("NUM003",),
    ),
    Word(
        ("HYBRID", "fp8_format", "ACCELERATE_FP8_FORMAT", "Format.HYBRID"),
        "Transformer Engine's name for E4M3 in the forward and E5M2 for gradients: the default of delayed "
        "and current scaling.",
        ("NUM003", "ENV002"),
    ),
    Word(
        ("fp32", "float32", "TF32", "allow_tf32", "set_float32_matmul_precision"),
        "32 bits. GEMMs in fp32 run at a fifteenth of BF16's rate on an H100, in TF32 at half of it. FP8 "
        "does nothing for them.",
        ("STP004", "MEM003", "LORA002"),
    ),
    # GEMMs
    Word(
        ("GEMM", "GEMMs", "matmul", "matmuls", "matrix multiplication"),
        "A product of two matrices. A Linear has three in a training step: output, input gradient and "
        "weight gradient. Only they get faster in FP8.",
        ("STP003", "SHP002"),
    ),
    Word(
        ("output", "fprop", "forward GEMM"),
        "The GEMM of a Linear's forward: input times weight.",
    ),
    Word(
        ("input gradient", "dgrad", "grad_input"),
        "The backward GEMM that a Linear passes on: output gradient times weight.",
    ),
    Word(
        ("weight gradient", "wgrad", "grad_weight"),
        "The backward GEMM that trains a weight: output gradient times input. A frozen weight needs none.",
        ("LORA004",),
    ),
    Word(
        ("M x K x N", "M, K, N", "GEMM shape"),
        "The sides of a GEMM: M rows (tokens), K in_features, N out_features. FP8 wants each divisible by "
        "16.",
        ("SHP001", "SHP002", "SHP003"),
    ),
    Word(
        ("FLOPs", "GEMM FLOPs", "FLOP"),
        "Floating-point operations: 2·M·K·N for one GEMM. A share of them is no share of the time.",
        ("MOD004", "LORA001"),
    ),
    Word(
        ("TFLOP/s", "TFLOPS", "peak"),
        "10^12 operations a second. A GPU's dense FP8 peak is twice its BF16 peak; no GEMM reaches either.",
        ("STP003",),
    ),
    Word(
        ("MFU", "model FLOPs utilization", "HFU"),
        "Share of the GPU's dense peak that the model's FLOPs reach. In FP8 the peak is twice BF16's: say "
        "which is meant. -v tells the most tokens/s that each peak allows.",
        ("STP003",),
    ),
    Word(
        ("_scaled_mm", "torch._scaled_mm"),
        "torch's FP8 GEMM: two FP8 matrices and their scales. It has no derivative of its own; "
        "Float8Linear supplies one.",
        ("SHP001", "MOD003"),
    ),
    Word(
        ("fast accumulation", "use_fast_accum"),
        "FP8 GEMMs that add up with less precision, and faster. torchao does so in the forward only.",
    ),
    Word(
        ("tensor cores", "compute capability", "FP8 tensor cores"),
        "The GPU's matrix units. Those for FP8 begin with compute capability 8.9 (Ada) and 9.0 (Hopper).",
        ("GPU001", "GPU002"),
    ),
    Word(
        ("grouped GEMM", "MoE", "experts", "mixture of experts", "router"),
        "Expert weights are often one 3-D tensor and no Linear, so that a conversion passes them over. "
        "Each expert gets the rows that the router sends.",
        ("MOD012", "SHP004", "SHP007"),
    ),
    # Scaling
    Word(
        ("cast", "casts", "FP8 conversion", "to FP8", "quantize"),
        "Turning a tensor into FP8: find its amax, scale, round. Uncompiled it is some ten kernels that "
        "read the tensor anew; compiled they fuse.",
        ("CMP001", "STP002"),
    ),
    Word(
        ("amax", "absmax"),
        "The largest magnitude of a tensor. The scale into FP8's range is made from it.",
        ("STP002", "DST003"),
    ),
    Word(
        ("scale", "scaling", "scaling factor", "scale_inv"),
        "The factor that brings a tensor into FP8's range: one for a tensor, a row or a block, as the "
        "recipe says.",
        ("SHP005",),
    ),
    Word(
        ("recipe", "FP8 recipe"),
        "How tensors are scaled for FP8: one scale for a tensor, a row or a block, of this step's amax or "
        "of earlier ones.",
        ("SHP005", "GPU002", "NUM003"),
    ),
    Word(
        ("tensorwise", "per-tensor scaling", "Float8LinearRecipeName.TENSORWISE"),
        "torchao's default recipe: one scale for a tensor. The fastest and the least exact.",
        ("SHP005",),
    ),
    Word(
        ("rowwise", "axiswise", "per-row scaling"),
        "torchao's recipe with a scale for each row: more exact, with dearer casts and slower GEMMs. Small "
        "layers never earn it back.",
        ("SHP005", "GPU002"),
    ),
    Word(
        ("rowwise_with_gw_hp", "rowwise with BF16 weight gradients", "gw_hp"),
        "Rowwise with the weight gradient left in BF16: the most exact of torchao's, with two GEMMs of "
        "three in FP8.",
        ("SHP005",),
    ),
    Word(
        ("delayed scaling", "delayed"),
        "Transformer Engine's recipe that scales by the amax of earlier steps, which is known beforehand. "
        "torchao removed its own in 0.10.",
        ("SHP005", "DST003", "NUM003"),
    ),
    Word(
        ("amax history", "amax_history_len", "amax_compute_algo"),
        "The steps whose amax delayed scaling remembers, 1024 by default. With 1 a value above the last "
        "step's largest saturates.",
        ("NUM003", "ENV002"),
    ),
    Word(
        ("current scaling", "Float8CurrentScaling", "dynamic scaling"),
        "Transformer Engine's recipe that scales by the tensor's own amax, which costs reading it once more.",
        ("SHP005",),
    ),
    Word(
        ("block scaling", "Float8BlockScaling", "blockwise"),
        "One scale for each block: 1 x 128 of inputs, 128 x 128 of weights. Transformer Engine wants "
        "compute capability 9.0 and CUDA 12.9 for it.",
        ("GPU002", "SHP005"),
    ),
    Word(
        ("MXFP8", "MXFP8BlockScaling", "microscaling", "MX"),
        "One scale of 8 bits for each 32 values, in Blackwell's tensor cores. Libraries support it on "
        "compute capability 10.x only; elsewhere it raises or is emulated.",
        ("GPU002", "MOD005"),
    ),
    Word(
        ("NVFP4", "FP4", "NVFP4BlockScaling"),
        "NVIDIA's 4-bit format with block scales, of Blackwell. It is no FP8; its recipes are checked for "
        "the GPU.",
        ("GPU002",),
    ),
    Word(
        ("emulate", "emulated", "emulate=True"),
        "FP8 that is rounded and multiplied in higher precision: FP8's accuracy without its speed, for "
        "tests.",
        ("MOD005",),
    ),
    Word(
        ("SQNR", "dB"),
        "Signal to quantization noise of a layer's output in FP8 against BF16, in decibels: 10 more is a "
        "tenth of the noise.",
        ("NUM002",),
    ),
    Word(
        ("saturation", "saturated", "clipped", "overflow", "underflow", "flushed"),
        "Values beyond FP8's largest are clipped to it; those below its smallest become zero.",
        ("NUM002", "NUM003"),
    ),
    Word(
        ("NaN", "loss is NaN", "inf"),
        "Not a number, or infinite. Where only FP8 has them, the trial names the layer they come from.",
        ("NUM001",),
    ),
    Word(
        ("learning rate", "warmup", "gradient clipping", "max_grad_norm"),
        "What is tried first against NaN. Nothing of FP8 asks for another one; a trial names the layers that "
        "clip or overflow in FP8.",
        ("NUM001", "NUM002", "NUM003"),
    ),
    Word(
        ("accuracy", "convergence", "slow convergence", "quality"),
        "A trial compares FP8's outputs and losses with BF16's on the same batches. Whether a whole training "
        "converges, only that training tells.",
        ("NUM002", "NUM001", "NUM003"),
    ),
    Word(
        ("GradScaler", "gradient scaler", "loss scaling", "AMP scaler"),
        "FP16's guard against underflow. BF16 and FP8 need none: every FP8 tensor has scales of its own.",
        ("GPU003",),
    ),
    # The step
    Word(
        ("kernel", "kernel launch", "launch"),
        "One program on the GPU, launched by Python. An uncompiled FP8 layer of torchao adds some 83 of "
        "them to a step.",
        ("CMP001", "STP001"),
    ),
    Word(
        ("host bound", "host time", "launch-bound", "CPU-bound", "GPU utilization"),
        "The GPU waits because Python launches kernels too slowly. Fewer launches help: compile, or more "
        "tokens.",
        ("STP001",),
    ),
    Word(
        ("CUDA graphs", "CUDA graph", "reduce-overhead"),
        "A recorded sequence of launches, replayed as one. By default torch.compile uses it only with "
        "reduce-overhead or max-autotune.",
        ("STP001",),
    ),
    Word(
        ("attention", "SDPA", "FlashAttention", "attn_implementation", "flash_attn", "use_flash_attn"),
        "It stays in 16 bits, so FP8 saves nothing of it. Fused it is a few kernels; unfused it can "
        "outweigh what FP8 gains.",
        ("MEM004", "STP003"),
    ),
    Word(
        ("fused optimizer", "fused=True", "foreach", "AdamW", "optimizer"),
        "An optimizer in few kernels. FP8 does not touch its time or its state, which is most of the memory.",
        ("STP007", "MEM005"),
    ),
    Word(
        ("slower than BF16", "slower", "FP8 is slower", "FP8 is slower than BF16"),
        "Most often FP8 layers run uncompiled, are too small to earn their casts, or compute in BF16. A "
        "trial times each cause: fp8doctor model.py.",
        ("CMP001", "SHP002", "SHP003", "MOD002", "STP002"),
    ),
    Word(
        ("Amdahl", "Amdahl's law", "ceiling", "limit"),
        "Only the GEMMs get faster: where they are 60 % of a step and run 1.5 times as fast, the step "
        "gains 1.25x, not 1.5x; where they are 80 %, 1.36x.",
        ("STP003", "STP005"),
    ),
    Word(
        (
            "activation checkpointing",
            "gradient checkpointing",
            "checkpointing",
            "recompute",
            "use_reentrant",
            "no_gradient_checkpointing",
        ),
        "Activations are computed again in the backward: less memory, a fourth GEMM, the casts once more. "
        "On an H200 a step took 1.17 times as long in FP8, 1.22 in BF16, not 3.",
        ("CKP001", "CKP003", "CKP002"),
    ),
    Word(
        ("vocabulary", "lm_head", "head", "vocab_size", "50257"),
        "The output head is a GEMM as wide as the vocabulary. Left in 16 bits with an odd width it is "
        "slow: pad it, as from 50257 to 50304.",
        ("SHP008", "SHP004"),
    ),
    Word(
        ("padding", "pad_to_multiple_of", "divisible by 16", "multiple of 16", "multiples of 16"),
        "FP8 GEMMs want all three sides divisible by 16, the tokens too in the backward. "
        "pad_to_multiple_of=16 pads a batch.",
        ("SHP001", "SHP007"),
    ),
    Word(
        (
            "LoRA",
            "adapter",
            "adapters",
            "PEFT",
            "lora_A",
            "lora_B",
            "lora_alpha",
            "max_lora_rank",
            "target_modules",
            "get_peft_model",
            "FastLanguageModel.get_peft_model",
        ),
        "Small trained matrices beside frozen weights. FP8 pays in the base: convert it first, then add "
        "adapters. They are too narrow for FP8.",
        ("LORA001", "LORA002", "LORA003", "LORA004"),
    ),
    Word(
        ("QLoRA", "4-bit", "load_in_4bit", "load_in_8bit", "bitsandbytes", "bnb", "NF4"),
        "LoRA on weights stored in 4 (or 8) bits, dequantised in every step. It saves memory, and FP8 "
        "training cannot start from it.",
        ("MOD009",),
    ),
    Word(
        ("batch size", "tokens", "per_device_train_batch_size", "micro-batch"),
        "A step's rows. Casts and launches are paid for every micro-batch: few and large ones suit FP8.",
        ("SHP003", "STP001"),
    ),
    Word(
        ("gradient accumulation", "gradient_accumulation_steps", "accumulation", "accumulate"),
        "Micro-batches whose gradients add up to one step. Each pays its own casts and launches, so that "
        "more of them do not help FP8, and larger ones do.",
        ("SHP003", "STP001"),
    ),
    Word(
        ("sequence length", "max_length", "max_seq_length", "short sequences"),
        "Batch times sequence is the rows of every GEMM but attention's. Attention grows with its square, "
        "and FP8 saves nothing of it.",
        ("SHP003", "SHP001", "STP003"),
    ),
    Word(
        ("out of memory", "OOM", "CUDA out of memory"),
        "FP8 training keeps BF16 weights, their gradients and the optimizer's state. What it can save are "
        "stored inputs, at most half of them.",
        ("MEM002", "MEM001", "MEM005"),
    ),
    Word(
        ("DataLoader", "num_workers", "data loading"),
        "Where the step waits for its batch, FP8 makes no step shorter.",
        ("STP008",),
    ),
    Word(
        ("KV cache", "use_cache"),
        "Keys and values kept for generation. Left on in training it makes every compiled block a "
        "recompilation.",
        ("CMP005",),
    ),
    Word(
        ("tied weights", "tie_word_embeddings", "weight tying"),
        "One weight for embedding and head. A conversion that rebuilds the head unties them.",
        ("MOD008",),
    ),
    # Ranks
    Word(
        ("FSDP2", "fully_shard"),
        "torch's per-parameter sharding. Tensorwise weights of torchao can be gathered in FP8: half the "
        "bytes.",
        ("DST001", "DST002"),
    ),
    Word(
        ("FULL_SHARD", "FSDP", "FSDP1", "FullyShardedDataParallel", "SHARD_GRAD_OP", "HYBRID_SHARD"),
        "FSDP's first form, which shards parameters, gradients and optimizer state. torchao's FP8 "
        "all-gather is for FSDP2 (fully_shard) only.",
        ("DST001",),
    ),
    Word(
        ("FP8 all-gather", "enable_fsdp_float8_all_gather", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"),
        "torchao's option by which FSDP2 sends weights in FP8. Without FSDP2 it wraps every weight for "
        "nothing.",
        ("DST001", "DST002", "MOD010"),
    ),
    Word(
        ("amax reduction", "reduce_amax", "fp8_group", "amax_reduction_group"),
        "Delayed scaling sends its maxima to all ranks in every forward and backward.",
        ("DST003",),
    ),
    Word(
        ("DDP", "DistributedDataParallel", "multi-GPU"),
        "A copy of the model for each rank, whose gradients are averaged. FP8 changes nothing of what it "
        "sends.",
        ("DST004", "DST005"),
    ),
)
