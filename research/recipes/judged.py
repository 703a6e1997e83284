"""Each warning and error on a recipe, judged by hand: rightly, a false alarm, or not judged; and why."""

from __future__ import annotations

UNTIMED = "GiB at the peak without checkpointing, by the estimate; no source timed the step without it"
EAGER = "torchao asks for torch.compile (its example: for competitive performance); "
JUDGED = {
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
    ("te-mnist", "STP004"): (
        "rightly",
        "weights and images are fp32 and no autocast of torch is open, so what is not in FP8 runs in fp32",
    ),
    ("torchtitan-llama3-8b-mxfp8", "CKP001"): ("not judged", f"79.6 of 180 {UNTIMED}"),
    ("axolotl-gemma3-1b", "CKP001"): ("not judged", f"11.1 of 80 {UNTIMED}"),
    ("axolotl-llama-1b-lora", "CKP001"): ("not judged", f"7.0 of 80 {UNTIMED}"),
    ("trl-dpo-qwen2-0.5b", "CKP001"): ("not judged", f"19.0 of 80 {UNTIMED}"),
    ("trl-dpo-qwen2-0.5b-lora", "CKP001"): ("not judged", f"16.0 of 80 {UNTIMED}"),
}
"""Recipe and code -> the judgment, and the reason."""

MENDED = [
    (
        "bionemo-opengenome2-7b-fp8, bionemo-esm2-15b-fp8, bionemo-esm2-650m-fp8",
        "MOD002",
        "an error on layers that the recipe keeps out of the autocast on purpose: first and last block, head",
        "layers at the ends alone are an info (`fp8doctor/analysis/expected_fp8_gemms.py`)",
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
        "a forward that reaches torch's FP8 GEMM is FP8 (`fp8doctor/stacks/own.py`)",
    ),
]
