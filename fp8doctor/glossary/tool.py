"""Words of this tool: what its screens and files say."""

from __future__ import annotations

from fp8doctor.glossary.word import Word

TOOL = (
    # What it looks for
    Word(
        ("check", "code"),
        "One disease, told from recorded facts. Its code is its area and a number; `fp8doctor list` shows "
        "all.",
    ),
    Word(
        ("finding",),
        "What a check says of this job: title, evidence with units, saving, treatment.",
    ),
    Word(
        ("area", "areas"),
        "A group of checks: environment, device, engagement, shapes, compilation, checkpointing, lora, "
        "memory, numerics, distributed, step.",
    ),
    Word(
        ("engagement", "engaged"),
        "Whether FP8 is really in effect: layers converted, called, and computing in FP8.",
        ("MOD001", "MOD002", "MOD004"),
    ),
    Word(
        ("treatment", "sketch"),
        "One change. The trial times it on a copy where it can; the report prints it as lines to copy. A "
        "sketch does not run as it stands.",
    ),
    Word(
        ("plan", "prescription", "prescribed", "FP8, prescribed", "FP8 with all fixes"),
        "The changes in their order, causes before symptoms, and the step with all of them, since savings "
        "do not add up.",
    ),
    Word(
        ("verdict",),
        "The answer in a sentence: raises, does not learn, not engaged, slower, even, faster, or too noisy "
        "to tell.",
    ),
    Word(
        ("saving", "saved", "saved a step"),
        "Milliseconds less a step, with what the number rests on. A minus in a plan is time that goes away.",
    ),
    # What a number rests on
    Word(
        ("measured",),
        "Timed on this GPU, on copies of the model or in the script's own steps.",
    ),
    Word(
        ("modelled", "cost model"),
        "Computed from shapes, casts and the GPU's datasheet, and named with the GPU. It is no measurement.",
    ),
    Word(
        ("rule", "by rule", "basis"),
        "What a number rests on: measured, modelled, or a rule that holds without numbers of this job.",
    ),
    Word(
        ("made up",),
        "What nobody gave and the tool invented to run a step: batch, loss, optimizer, weights. Times "
        "hold; values say nothing.",
    ),
    Word(
        ("refuted",),
        "A finding whose treatment was timed and saved nothing.",
    ),
    Word(
        ("not recorded", "unknown", "gap"),
        "Nobody looked, or the library could not tell. It is no all-clear.",
    ),
    Word(
        ("too noisy", "90 % interval", "rounds", "plus or minus"),
        "Variants take turns in rounds. ± is half the interval that holds the true median of a variant "
        "with 90 % confidence.",
    ),
    # The trial
    Word(
        ("trial",),
        "The timed probe: the step as it is, BF16 in every form, and what may help, in turn, on copies of "
        "the model.",
    ),
    Word(
        ("arm", "variant"),
        "One form of the training step that the trial times.",
    ),
    Word(
        ("as it is", "FP8 as you run it", "FP8, as it is", "as_is"),
        "The job unchanged, as it was given.",
    ),
    Word(
        ("best BF16", "baseline", "BF16 compiled", "your own compile"),
        "The fastest form of BF16 that was timed: eager, compiled block by block, or under your own compile.",
        ("CMP007",),
    ),
    Word(
        ("all that gained", "FP8 with all that gained", "combination"),
        "Every change that saved time by itself, timed together.",
    ),
    Word(
        ("without adapters",),
        "The step without LoRA's matrices: what they cost.",
        ("LORA001",),
    ),
    Word(
        ("cut", "full depth", "blocks"),
        "A copy with fewer of the repeated blocks. Two depths predict the whole model.",
    ),
    Word(
        ("copy", "self check", "a copy of BF16"),
        "The same step timed twice under two names. Its quotient says how far the timing can be trusted.",
    ),
    Word(
        ("budget",),
        "Seconds that the command may take. The report lists variants that did not fit and a budget for all.",
    ),
    Word(
        ("window", "watched"),
        "The steps of your own script that `fp8doctor run` watches, after its warm-up.",
    ),
    Word(
        ("rank", "ranks", "straggler"),
        "One process of a job that a launcher started in several.",
        ("DST004", "DST005"),
    ),
    # The tables
    Word(
        ("speed", "noisy"),
        "The best BF16's time over that of a variant: above 1× it is faster than BF16. Noisy where the "
        "timing does not tell.",
    ),
    Word(
        ("not profiled",),
        "It was timed, and what its time is made of was not looked at.",
    ),
    Word(
        ("ms a step", "total", "step"),
        "Milliseconds of one training step: forward, backward and optimizer.",
    ),
    Word(
        ("FP8 matmul", "FP8 matmuls", "FP8 GEMM", "FP8 GEMMs"),
        "Time in GEMM kernels that multiply in FP8. None in a step that is called FP8: it does not run.",
        ("MOD002",),
    ),
    Word(
        ("other matmul", "other GEMM", "16-bit GEMM"),
        "Time in GEMMs of 16 or 32 bits: the output head, what was not converted, and all of BF16's.",
        ("SHP008", "MOD004", "STP004"),
    ),
    Word(
        ("other", "rest", "norms, pointwise"),
        "Time in norms, pointwise kernels, optimizer, loss, communication, copies, and kernels that no "
        "rule knows.",
        ("STP003", "STP007"),
    ),
    Word(
        ("idle", "idle GPU"),
        "The step less the time in which any kernel ran: the GPU waited for the host, the data or other "
        "ranks.",
        ("STP001", "STP008"),
    ),
    Word(
        ("GiB", "GB", "VRAM", "memory", "peak memory"),
        "The peak of a step in 2^30 bytes: weights, gradients, optimizer state, activations and temporaries.",
        ("MEM001", "MEM005", "MEM002", "MEM003", "MEM004"),
    ),
    Word(
        ("ledger", "GEMM ledger", "calls", "ms of one matmul, alone"),
        "Every GEMM shape timed alone: BF16, the FP8 kernel, the casts that only it needs, what FP8 saves, "
        "and how often a step calls it.",
        ("SHP002", "STP002"),
    ),
    Word(
        ("tokens/s", "tokens per second", "tok/s", "tokens/sec", "throughput", "tokens a second"),
        "Tokens of a step divided by its time. -v tells it of every variant, with the most that the GPU's "
        "peak allows.",
        ("STP003",),
    ),
    Word(
        ("speedup", "1.2x", "ratio"),
        "BF16's time divided by FP8's, against the best BF16: above 1 FP8 is faster.",
        ("CMP007", "STP005"),
    ),
    Word(
        ("last bit", "other last bits", "loss curve"),
        "BF16 whose weights were moved by one unit in the last place. FP8's loss is compared in multiples "
        "of what that does.",
    ),
)
