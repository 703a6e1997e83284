"""Facts of layers with the costs of both precisions, for the tests of what FP8 gives them."""

from __future__ import annotations

from typing import Any

import msgspec

from fp8doctor.facts import Facts, LayerShape, Linear, Network, Trial, Workload

TOKENS = 8192


def linear(name: str, k: int, n: int, **fields: Any) -> Linear:
    plain: dict[str, Any] = {
        "recipe": "tensorwise",
        "features": {},
        "gemms": 1,
        "requires_grad": True,
        "role": "body",
        "adapter": None,
    }
    return Linear(
        name=name,
        kind="x.Float8Linear",
        stack="torchao",
        use="training",
        in_features=k,
        out_features=n,
        **{**plain, **fields},
    )


def facts(
    *linears: Linear,
    tokens: int | None = TOKENS,
    source: str = "given",
    accumulate: int = 1,
    gpu: str = "H200",
    trial: Any = None,
) -> Facts:
    flops = sum(each.in_features * each.out_features for each in linears)
    shared = tuple(
        msgspec.structs.replace(each, flops_share_pct=100 * each.in_features * each.out_features / flops)
        for each in linears
    )
    workload = Workload(
        batch_source=source, batch_size=1, sequence_length=tokens, tokens=tokens, accumulate=accumulate
    )  # type: ignore[arg-type]
    made = Facts(network=Network(linears=shared), workload=workload, assumed_gpu=gpu)
    return msgspec.structs.replace(made, trial=trial) if trial else made


def shape(name: str, *, bf16: float, fp8: float | None, casts: float | None) -> LayerShape:
    return LayerShape(
        m=TOKENS,
        k=2048,
        n=2048,
        recipe="tensorwise",
        layers=(name,),
        trained=True,
        bf16_ms=bf16,
        fp8_ms=fp8,
        casts_ms=casts,
        reason=None,
    )


def timed(*shapes: LayerShape, device: str = "cuda") -> Trial:
    return Trial(device=device, gpu="NVIDIA H200" if device == "cuda" else None, shapes=shapes)


WIDE, NARROW = linear("up", 2048, 8192), linear("k", 2048, 64)


SIDES_OF_1B = ((2048, 8192, 32), (8192, 2048, 16), (2048, 2048, 32), (2048, 512, 32))


def as_timed(tokens: int, *shapes: tuple[int, int, int, float, float, float]) -> Facts:
    layers = [(f"{k}x{n}.{i}", k, n) for k, n, count, *_ in shapes for i in range(count)]
    measured = [
        LayerShape(
            m=tokens,
            k=k,
            n=n,
            recipe="tensorwise",
            trained=True,
            layers=tuple(f"{k}x{n}.{i}" for i in range(count)),
            bf16_ms=bf16,
            fp8_ms=fp8,
            casts_ms=casts,
            reason=None,
        )
        for k, n, count, bf16, fp8, casts in shapes
    ]
    return facts(*(linear(*each) for each in layers), tokens=tokens, trial=timed(*measured))


LLAMA_8B = (
    (4096, 4096),
    (4096, 1024),
    (4096, 1024),
    (4096, 4096),
    (4096, 14336),
    (4096, 14336),
    (14336, 4096),
)
