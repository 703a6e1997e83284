"""The counts line and the first line: every kind of layer, and what nobody recorded."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.layers import Layers, fp8_layers
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import (
    NOT_RECORDED,
    Blocks,
    Checkpointing,
    Facts,
    Gpu,
    Linear,
    Network,
    Package,
    Software,
    Target,
    Training,
    Trial,
    Use,
    Workload,
)
from fp8doctor.finding import Saving
from fp8doctor.gpus import modelled_gpu_name
from fp8doctor.render import header, html
from fp8doctor.render.details import not_looked_at, saving_in_words
from fp8doctor.render.environment_page import for_support
from fp8doctor.render.header import fp8_share, machine, made_up, model, quantity, short_version
from fp8doctor.running.examination import COMPILED_FUNCTION, NO_CALL
from fp8doctor.wording import percent


def counts(facts: Facts) -> tuple[str, ...]:
    """The classes of FP8 layers, and three lines of the first screen."""
    told = dict(header.job_facts(facts, None))
    compiled, checkpointing, lora = (
        told.get(label, header.UNKNOWN) for label in ("Compiled", "Checkpointing", "LoRA")
    )
    return (
        *header.counts(facts),
        f"compiled {compiled}",
        f"checkpointing {checkpointing}",
        f"LoRA {lora}",
    )


TE = Linear(
    kind="transformer_engine.pytorch.module.linear.Linear",
    stack="transformer_engine",
    use="training",
    flops_share_pct=50.0,
)
TE_NORM = replace(
    TE, kind="transformer_engine.pytorch.module.layernorm_linear.LayerNormLinear", flops_share_pct=20.0
)
STORED = Linear(
    kind="transformers.integrations.finegrained_fp8.FP8Linear",
    stack="huggingface",
    use="storage",
    flops_share_pct=1.5,
)
WRAPPED = Linear(
    kind="torch.nn.modules.linear.Linear",
    stack="torchao",
    use="training",
    weight_class="torchao.prototype.MXFP8TrainingWeight",
)
PLAIN = Linear(
    kind="torch.nn.modules.linear.Linear", stack="torch", use="none", adapter=None, flops_share_pct=28.5
)

UNKNOWN = (
    "te.Linear unknown",
    "Float8Linear unknown",
    "compiled unknown",
    "checkpointing unknown",
    "LoRA unknown",
)


def test_what_nobody_recorded_is_unknown() -> None:
    assert counts(Facts()) == UNKNOWN
    assert counts(Facts(network=Network(), training=Training())) == UNKNOWN


def test_every_kind_of_layer_is_named_and_counted() -> None:
    found = counts(Facts(network=Network(linears=(TE, TE, TE_NORM, STORED, WRAPPED, PLAIN))))
    assert found[:-3] == (
        "Float8Linear 0",
        "te.LayerNormLinear 1 of 6 (20% of matmul FLOPs)",
        "FP8Linear 1 of 6 (weights only, 1.5% of matmul FLOPs)",
        "Linear of MXFP8TrainingWeight 1 of 6",
        "te.Linear 2 of 6 (100% of matmul FLOPs)",
    )


def test_the_two_best_known_classes_are_counted_even_at_zero() -> None:
    assert counts(Facts(network=Network(linears=(PLAIN,))))[:2] == ("te.Linear 0", "Float8Linear 0 of 1")
    assert fp8_layers(Facts(network=Network(linears=()))) == (
        Layers("te.Linear", 0, 0),
        Layers("Float8Linear", 0, 0),
    )


def test_a_layer_whose_use_nobody_recorded_leaves_the_count_unknown() -> None:
    assert counts(Facts(network=Network(linears=(PLAIN, Linear(name="x")))))[:2] == UNKNOWN[:2]


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (
            Network(blocks=(Blocks(count=24, compiled=0), Blocks(count=2, compiled=2))),
            "compiled 2 of 26 blocks",
        ),
        (Network(blocks=(Blocks(count=1, compiled=1),)), "compiled 1 of 1 block"),
        (
            Network(blocks=(), linears=(replace(PLAIN, compiled=""), replace(PLAIN, compiled=None))),
            "compiled 1 of 2 Linears",
        ),
        (Network(blocks=(), linears=(PLAIN,)), "compiled unknown"),
    ],
)
def test_compiled(network: Network, words: str) -> None:
    assert counts(Facts(network=network))[-3] == words


@pytest.mark.parametrize(
    ("checkpointing", "blocks", "words"),
    [
        ((), (), "checkpointing off"),
        ((Checkpointing(name="", form="huggingface", active=False),), (), "checkpointing off"),
        ((Checkpointing(name="", form="huggingface", active=True),), (), "checkpointing on"),
        (
            (Checkpointing(name="b.0", form="wrapper", active=True),),
            (Blocks(name="b", count=4, checkpointed=1),),
            "checkpointing on in 1 of 4 blocks",
        ),
        (
            (Checkpointing(name="", form="called_in_forward", active=True, flag="grad_checkpointing"),),
            (Blocks(name="b", count=4),),
            "checkpointing on (grad_checkpointing of LM)",
        ),
        (
            (Checkpointing(name="b.0", form="called_in_forward", active=None),),
            (Blocks(name="b", kind="m.Block", count=4, checkpointed=0),),
            "checkpointing possible (Block.forward calls checkpoint)",
        ),
        (
            (Checkpointing(name="", form="called_in_forward", active=None),),
            (),
            "checkpointing possible (LM.forward calls checkpoint)",
        ),
        (
            (Checkpointing(name="x.mlp", form="called_in_forward", active=None),),
            (),
            "checkpointing possible (x.mlp.forward calls checkpoint)",
        ),
    ],
)
def test_checkpointing(
    checkpointing: tuple[Checkpointing, ...], blocks: tuple[Blocks, ...], words: str
) -> None:
    assert (
        counts(
            Facts(
                network=Network(kind="decoder.LM", blocks=blocks),
                training=Training(checkpointing=checkpointing),
            )
        )[-2]
        == words
    )


@pytest.mark.parametrize(
    ("recomputed", "found", "words"),
    [
        (("b.0",), (Checkpointing(name="", form="called_in_forward", active=None),), "checkpointing on"),
        ((), (Checkpointing(name="", form="called_in_forward", active=None),), "checkpointing off"),
        (("b.0",), (), "checkpointing on"),
        ((), (Checkpointing(name="", form="compiler_budget", active=True),), "checkpointing on"),
    ],
)
def test_a_step_that_ran_tells_whether_it_recomputes(
    recomputed: tuple[str, ...], found: tuple[Checkpointing, ...], words: str
) -> None:
    training, trial = Training(checkpointing=found), Trial(recomputed=recomputed)
    assert counts(Facts(network=Network(), training=training, trial=trial))[-2] == words


def test_lora_is_a_share_of_parameters_and_of_flops() -> None:
    adapter = replace(PLAIN, adapter="adapter", flops_share_pct=2.3)
    assert (
        counts(Facts(network=Network(linears=(PLAIN, adapter), parameters=1000, adapter_parameters=12)))[-1]
        == "LoRA 1.2% of parameters, 2.3% of matmul FLOPs"
    )
    assert (
        counts(Facts(network=Network(linears=(), parameters=1000, adapter_parameters=0)))[-1] == "LoRA none"
    )
    assert counts(Facts(network=Network(adapter_parameters=12)))[-1] == "LoRA on"


@pytest.mark.parametrize(
    ("gpus", "assumed", "words"),
    [
        (NOT_RECORDED, None, "GPU unknown; estimates for H100 SXM"),
        ((), None, "no GPU; estimates for H100 SXM"),
        ((), "RTX5090", "no GPU; estimates for RTX5090"),
        ((), "nonsense", "no GPU; estimates for nonsense"),
        (
            (Gpu(name="NVIDIA H200", compute_capability="9.0", visible=False),),
            None,
            "1 GPU hidden from this process; estimates for H100 SXM",
        ),
        (
            (Gpu(name="AMD MI300X", compute_capability=None, architecture="gfx942", visible=True),),
            None,
            "AMD MI300X, gfx942; no datasheet, so no estimates",
        ),
        (
            (Gpu(name="AMD Instinct MI300X", vendor="amd", architecture="gfx942", visible=True),),
            None,
            "AMD Instinct MI300X, gfx942; no estimates for AMD",
        ),
        (
            (
                Gpu(name="A", compute_capability="8.0"),
                Gpu(name="B", compute_capability="9.0"),
                Gpu(name="A", compute_capability="8.0"),
            ),
            None,
            "2 x A, 8.0 + B, 9.0; no datasheet, so no estimates",
        ),
        ((Gpu(name="A", compute_capability="8.0"),), "B200", "A, 8.0; estimates for B200"),
    ],
)
def test_the_gpu(gpus: tuple[Gpu, ...], assumed: str | None, words: str) -> None:
    facts = Facts(gpus=gpus, assumed_gpu=assumed)
    assert machine(facts, modelled_gpu_name(facts))[0] == words


@pytest.mark.parametrize(
    ("software", "words"),
    [
        (NOT_RECORDED, ("torch unknown",)),
        (Software(), ("torch unknown",)),
        (Software(torch=None, packages={}), ("torch missing",)),
        (
            Software(
                torch="2.11.0+cu130",
                packages={
                    "transformer_engine": Package(version=None),
                    "torchao": Package(version="0.18.0"),
                    "peft": Package(),
                },
            ),
            ("torch 2.11", "torchao 0.18", "TE"),
        ),
    ],
)
def test_the_versions(software: Software, words: tuple[str, ...]) -> None:
    assert machine(Facts(software=software), "H100")[1:] == words


def test_the_model() -> None:
    target = Target(kind="file", name="m.py", attribute=None)
    network = Network(parameters=1_240_000_000)
    assert model(Facts(target=Target(kind="environment", name="environment"))) == ""
    assert model(Facts(target=target)) == "m.py"
    assert model(Facts(target=target, network=network)) == "m.py: 1.24 B parameters"
    batch = Workload(batch_source="made up", batch_size=2, sequence_length=512, tokens=1024)
    assert (
        model(Facts(target=target, network=network, workload=batch))
        == "m.py: 1.24 B parameters, 2 x 512 tokens (synthetic)"
    )
    assert model(Facts(target=target, workload=Workload(batch_source="given", tokens=77))) == "m.py: 77 rows"
    assert model(Facts(target=target, workload=Workload(batch_source=None))) == "m.py: batch unknown"
    known = Workload(batch_source="given", batch_size=3, sequence_length=None, tokens=None)
    assert model(Facts(target=target, workload=known)) == "m.py: a batch of 3"


@pytest.mark.parametrize(
    ("kind", "why", "words"),
    [
        (
            "file",
            "no synthetic batch could be built: forward takes 'img', whose size the model does not tell",
            "no synthetic batch",
        ),
        ("script", COMPILED_FUNCTION, "batch not looked at"),
        ("live", NO_CALL, "batch not looked at"),
    ],
)
def test_why_there_is_no_batch_is_not_told_in_the_heading(
    kind: Literal["file", "script", "live"], why: str, words: str
) -> None:
    facts = Facts(
        target=Target(kind=kind, name="m.py", attribute=None),
        network=Network(parameters=4_200),
        workload=Workload(batch_source=None, note=why),
    )
    report = diagnose(facts)
    assert model(facts) == f"m.py: 4.2 k parameters, {words}"
    assert (f"the batch ({why})" in not_looked_at(report)) == (kind != "file")
    assert made_up(facts) == (f"{why[0].upper()}{why[1:]}." if kind == "file" else "")
    assert why not in " · ".join(for_support(facts))
    assert why[1:] in html.render(report).replace("&#39;", "'")


@pytest.mark.parametrize(
    ("uses", "words"),
    [
        (("none", "none"), "no FP8 in 2 Linears"),
        (("storage", "none"), "FP8 weights in 1 of 2 Linears, no FP8 training"),
        (("storage", "training"), "FP8 in 1 of 2 Linears"),
    ],
)
def test_fp8_weights_are_no_fp8_training(uses: tuple[Use, ...], words: str) -> None:
    linears = tuple(
        Linear(use=use, dtype="float8_e4m3fn" if use == "storage" else "bfloat16") for use in uses
    )
    assert fp8_share(Facts(network=Network(linears=linears))) == words
    in_4_bits = Network(linears=(Linear(use="storage", dtype="uint8"),))
    assert fp8_share(Facts(network=in_4_bits)) == "no FP8 in 1 Linear"


def test_numbers_as_one_says_them() -> None:
    assert [quantity(count) for count in (12, 4_200, 468_238_336, 999_960_000, 8_030_261_248)] == [
        "12",
        "4.2 k",
        "468.2 M",
        "1.00 B",
        "8.03 B",
    ]
    assert [
        short_version(version) for version in ("2.11.0+cu130", "2.13.1", "2.13.0+cpu", "0.18.0.dev2026")
    ] == [
        "2.11",
        "2.13.1",
        "2.13+cpu",
        "0.18.0.dev2026",
    ]
    assert [percent(share) for share in (100.0, 86.4, 9.96, 2.31, 0.038, 1e-6, 0.0)] == [
        "100%",
        "86%",
        "10%",
        "2.3%",
        "0.038%",
        "< 0.01%",
        "0%",
    ]


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        (None, ""),
        (Saving(low=float("nan"), high=1.0, basis="measured"), ""),
        (
            Saving(low=250.2, high=330.4, basis="modelled", gpu="H200"),
            "−250 to −330 ms/step, estimated for H200",
        ),
        (
            Saving(low=278.0, high=278.4, basis="measured", gpu="NVIDIA H200"),
            "−278 ms/step, measured on NVIDIA H200",
        ),
        (
            Saving(low=-3.0, high=4.0, basis="measured", gpu="NVIDIA H200"),
            "+3.0 to −4.0 ms/step, measured on NVIDIA H200",
        ),
        (Saving(low=0.01, high=0.02, basis="rule"), "0.0 ms/step, by rule"),
        (
            Saving(low=1234.0, high=2000.0, basis="modelled", gpu="RTX4090"),
            "−1,234 to −2,000 ms/step, estimated for RTX4090",
        ),
    ],
)
def test_a_saving_is_the_change_of_a_step_with_its_basis(saving: Saving | None, words: str) -> None:
    assert saving_in_words(saving) == words
