"""Each warning and error on a recipe, judged by hand: rightly, a false alarm, or not judged; and why."""

from __future__ import annotations

EAGER = "torchao asks for torch.compile (its example: for competitive performance); "

JUDGED = {
    ("torchtitan-deepseek-v3-671b-float8", "SHP002"): (
        "rightly",
        "kv_b_proj reads 512 features and kv_a_proj writes 576; torchao's own filter for rowwise leaves out "
        "1,024 read and 2,048 written, and fewer",
    ),
    ("torchtitan-deepseek-v3-671b-float8", "CMP001"): (
        "rightly",
        f"{EAGER}the registry compiles the loss alone, and its converter warns of that itself",
    ),
    ("torchtitan-flux-schnell-mxfp8", "CMP001"): (
        "rightly",
        "img_in, txt_in, time_in, vector_in and final_layer are converted too, and only the blocks are "
        "compiled (flux/parallelize.py, apply_compile)",
    ),
    ("torchtitan-llama3-8b-mxfp8", "CMP001"): (
        "rightly",
        "the converter without names takes lm_head too, and only the blocks are compiled "
        "(distributed/compile.py, apply_compile)",
    ),
    ("llama-factory-llama3-8b-fp8-fsdp", "ENV001"): (
        "rightly",
        "Accelerate 1.15 reads ACCELERATE_FP8_BACKEND, and nothing reads FP8_BACKEND",
    ),
    ("llama-factory-llama3-8b-fp8-fsdp", "CMP001"): (
        "rightly",
        f"{EAGER}the file does not compile, and LLaMA-Factory does not by itself",
    ),
    ("accelerate-bert-torchao", "SHP002"): (
        "rightly",
        "768 rows and features; Accelerate's maintainers say that such a model gains nothing (#2597)",
    ),
    ("accelerate-bert-torchao", "CMP001"): ("rightly", f"{EAGER}the script compiles nothing"),
    ("accelerate-bert-te", "STP001"): (
        "rightly",
        "as above: 768 tokens; Transformer Engine's modules launch more slowly than the GPU computes",
    ),
    ("lightning-fabric-transformer", "SHP003"): (
        "rightly",
        "35 rows: a weight is read to be cast and again by each GEMM, which takes longer than in BF16",
    ),
    ("diffusers-torchao-flux-lora", "CMP001"): (
        "rightly",
        f"{EAGER}neither the page nor its script compiles",
    ),
    ("diffusers-torchao-flux-lora", "SHP003"): (
        "rightly",
        "1,536 rows: every step casts the frozen base again, which so few rows do not pay for",
    ),
    ("testing-dense-gpt2-small", "STP001"): (
        "rightly",
        "61 layers of 768 on 4,096 rows; the file itself says that small batches should avoid FP8",
    ),
    ("te-mnist", "STP004"): (
        "rightly",
        "weights and images are fp32 and no autocast of torch is open, so what is not in FP8 runs in fp32",
    ),
    ("torchtitan-llama3-8b-mxfp8", "CKP001"): (
        "rightly",
        "local_batch_size=1, seq_len=8192: 79.6 of 180 GiB at the peak without it by the estimate, with all "
        "weights and states on one GPU; its selective mode computes norms, attention and casts again",
    ),
    ("axolotl-gemma3-1b", "CKP001"): (
        "rightly",
        "sequence_len 1024, micro_batch_size 1 and no packing bound every batch: 11.1 of 80 GiB at the peak "
        "without it by the estimate",
    ),
    ("axolotl-llama-1b-lora", "CKP001"): (
        "rightly",
        "sequence_len 512, micro_batch_size 2: 7.0 of 80 GiB at the peak without it by the estimate; with 4 "
        "generations of 128 tokens for each prompt (num_generations) five times the activations, about 25",
    ),
    ("trl-dpo-qwen2-0.5b", "CKP001"): (
        "rightly",
        "its pairs are at most 2 x 1,024 tokens (DPOConfig's max_length): 19.0 of 80 GiB at the peak without "
        "it by the estimate, and 2 more for the reference model",
    ),
    ("trl-dpo-qwen2-0.5b-lora", "CKP001"): (
        "rightly",
        "as above: 16.0 of 80 GiB; the reference is the same model without adapters",
    ),
}
"""Recipe and code -> the judgment, and the reason."""

MENDED = [
    (
        "bionemo-opengenome2-7b-fp8, bionemo-esm2-15b-fp8, bionemo-esm2-650m-fp8",
        "MOD002",
        "an error on layers that the recipe keeps out of the autocast on purpose: first and last block, head",
        "layers at the ends alone are an info (`fp8doctor/analysis/own_step.py`)",
    ),
    (
        "the same three",
        "SHP002",
        "an info that the head is in FP8, which it is not",
        "SHP001 and SHP002 leave out layers that are kept out of the autocast",
    ),
    (
        "lightning-fabric-transformer",
        "MOD004",
        "a warning to convert projections that gain nothing with 35 rows: 1.4 % by the cost model",
        "a layer is missed only where it gains more than the 9 % by which the cost model is off",
    ),
    (
        "nanochat-speedrun-d24",
        "-",
        "told to use no FP8: its Float8Linear is a class of its own over torch._scaled_mm",
        "a forward that reaches torch's FP8 GEMM is FP8 (`fp8doctor/stacks/known_classes.py`)",
    ),
]
