"""Trials written down by hand, for what is told of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fp8doctor.facts import Arm, ArmCut, Facts, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, Saving, Treatment
from tests.facts_of import DECODER_468M


@dataclass
class Of:
    """Arms as (name, ms per round, treatments)."""

    arms: Mapping[str, tuple[float, ...] | str]
    device: str = "cuda"
    treatments: tuple[str, ...] = ("compile-blocks",)
    bases: dict[str, str] | None = None
    """Name of an arm that carries out the treatment of its name -> its base; None writes no bases, as older
    trials did."""

    def facts(self, base: Facts = DECODER_468M) -> Facts:
        trial = Trial(
            device=self.device,
            gpu="NVIDIA H200" if self.device == "cuda" else None,
            blocks={},
            arms=tuple(self.arm(name, rounds) for name, rounds in self.arms.items()),
            self_check_ratio=1.0,
            reliable=True,
            reason=None,
            budget_s=60.0,
            elapsed_s=31.0,
        )
        return msgspec.structs.replace(base, trial=trial)

    def arm(self, name: str, rounds: tuple[float, ...] | str) -> Arm:
        alone = (name,) if name in (self.bases or {}) else ()
        treatments = self.treatments if name == "prescribed" else alone
        based = {"base": (self.bases or {}).get(name, "as_is" if name == "prescribed" else None)}
        if isinstance(rounds, str):
            why = rounds if isinstance(rounds, Reason) else None
            return Arm(name=name, treatments=treatments, tried=False, why=why, reason=str(rounds))
        middle = sorted(rounds)[len(rounds) // 2]
        cut = ArmCut(blocks={}, step_ms=middle)
        return Arm(
            name=name,
            treatments=treatments,
            tried=True,
            reason=None,
            step_ms=middle,
            low_ms=min(rounds),
            high_ms=max(rounds),
            rounds_ms=rounds,
            peak_gib=20.0,
            cuts=(cut,),
            fp8_gemms=504,
            graphs_run=0,
            **(based if self.bases is not None else {}),
        )


def around(ms: float, spread: float = 0.2) -> tuple[float, ...]:
    return tuple(ms + spread * offset for offset in (-1, -0.5, 0, 0, 0.5, 1))


SLOW = {
    "as_is": around(366.1),
    "bf16": around(103.6),
    "bf16_compiled": around(92.7),
    "prescribed": around(88.3),
}


def without_fp8() -> Facts:
    linears = tuple(
        msgspec.structs.replace(each, stack="torch", use="none", kind="torch.nn.modules.linear.Linear")
        for each in DECODER_468M.network.linears
    )
    return msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=linears)
    )


def compiled_by_block(facts: Facts) -> Facts:
    """The facts of a job whose blocks the user compiles."""
    linears = tuple(
        msgspec.structs.replace(each, compiled=each.name.rpartition(".")[0]) for each in facts.network.linears
    )
    blocks = tuple(msgspec.structs.replace(each, compiled=each.count) for each in facts.network.blocks)
    network = msgspec.structs.replace(facts.network, linears=linears, blocks=blocks)
    return msgspec.structs.replace(facts, network=network)


LOSING = Finding(
    title="t",
    explanation="e",
    code="SHP002",
    severity="warning",
    treatment=Treatment(name="stay-in-bf16", summary="s", code="c"),
    saving_ms=Saving(low=9.0, high=9.0, basis="modelled", gpu="H200"),
)
