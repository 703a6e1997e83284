"""Facts of well-known jobs, written down by hand for tests that need no live model."""

from fp8doctor.facts import (
    Blocks,
    Dynamo,
    Environment,
    Facts,
    Linear,
    Network,
    Package,
    Software,
    Target,
    Training,
    Workload,
)

_SHAPES = {
    "q": (1024, 1024),
    "k": (1024, 1024),
    "v": (1024, 1024),
    "o": (1024, 1024),
    "g": (1024, 4096),
    "u": (1024, 4096),
    "dn": (4096, 1024),
}


def _linear(name: str, shape: tuple[int, int], fp8: bool, compiled: str | None = None) -> Linear:
    inner, outer = shape
    return Linear(
        name=name,
        kind="torchao.float8.float8_linear.Float8Linear" if fp8 else "torch.nn.modules.linear.Linear",
        stack="torchao" if fp8 else "torch",
        use="training" if fp8 else "none",
        recipe="tensorwise" if fp8 else None,
        features={"emulate": False, "pad_inner_dim": False} if fp8 else {},
        engaged=None,
        in_features=inner,
        out_features=outer,
        gemms=1,
        bias=False,
        dtype="bfloat16",
        weight_class=None,
        requires_grad=True,
        role="body" if fp8 else "head",
        adapter=None,
        compiled=compiled,
        checkpointed=None,
        parameters=inner * outer,
        flops_per_token=6.0 * inner * outer,
        flops_share_pct=100.0 * inner * outer / 435_421_184,
    )


DECODER_468M = Facts(
    target=Target(kind="file", name="decoder.py", attribute="build_model"),
    software=Software(
        python="3.12.3",
        platform="linux x86_64",
        torch="2.11.0+cu130",
        cuda="13.0",
        packages={"torchao": Package(version="0.18.0", imported=True)},
    ),
    environment=Environment(variables={}),
    gpus=(),
    network=Network(
        kind="decoder.LM",
        parameters=468_239_360,
        trainable_parameters=468_239_360,
        adapter_parameters=0,
        dtypes={"bfloat16": 468_239_360},
        devices=("meta",),
        modules=244,
        linears=(
            *(
                _linear(f"blocks.{i}.{name}", shape, True)
                for i in range(24)
                for name, shape in _SHAPES.items()
            ),
            _linear("head", (1024, 32000), False),
        ),
        blocks=(Blocks(name="blocks", kind="decoder.Block", count=24, compiled=0),),
        hooks=0,
        float8_parameters=0,
        wrappers=(),
        vocabulary=32000,
        hidden_size=1024,
    ),
    training=Training(
        autocast=None,
        gradients_seen=False,
        compile_marks=(),
        dynamo=Dynamo(disabled=False, frames_total=0, frames_ok=0),
        checkpointing=(),
        forward_chain=(),
        accelerate=None,
        trainer=None,
        optimizer=None,
        parameters_outside_optimizer=None,
    ),
    workload=Workload(
        batch_source="given",
        batch_size=16,
        sequence_length=1024,
        tokens=16384,
        note=None,
        loss_source="given",
        optimizer_source="made up",
        autocast_source="none",
        accumulate=1,
    ),
    gaps={},
)
"""The 468 M decoder with 168 eager Float8Linears, on a machine without a GPU."""
