"""Judging and showing a run takes as many times longer as it has more layers or samples."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.answer.layer_rows import layer_rows
from fp8doctor.health.record import CastHealth, Header, Health, HealthLayer, Sample
from fp8doctor.health.verdict import conclude
from fp8doctor.report import Report
from tests import replays
from tests.calls import calls_of


class Name(str):
    """A name whose look-ups and comparisons count as calls."""

    __slots__ = ()

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def run(layers: int, samples: int) -> Health:
    """Every layer is lost in every sample. The loss falls, jumps now and then, and stays up at last."""
    names = [HealthLayer(Name(f"blocks.{number}.up"), "Linear", "torchao") for number in range(layers)]
    head = Header("train.py", 10, 0, names)
    row = (CastHealth(sqnr_db=5.0), None, None)
    high = [number > 3 and (number % 5 == 0 or number > 0.8 * samples) for number in range(samples)]
    losses = [9.0 if up else 2.0 + 1 / (1 + number) for number, up in enumerate(high)]
    taken = (Sample(10 * number, loss, 1.0, layers * (row,)) for number, loss in enumerate(losses))
    return Health("run", (head,), tuple((head, each) for each in taken))


@pytest.mark.parametrize(("layers", "samples"), [(50, 5), (1, 400)])
def test_four_times_as_much_takes_four_times_as_many_calls(layers: int, samples: int) -> None:
    few, many = run(layers, samples), run(4 * layers, samples) if layers > 1 else run(1, 4 * samples)
    verdict = conclude(many)
    assert verdict.rise is None or verdict.rise.since > 0
    assert len(verdict.layers) == len(many.layers)
    assert calls_of(lambda: conclude(many)) < 4.5 * calls_of(lambda: conclude(few))


def llama_70b() -> Report:
    """A recorded Llama, with the layers of one of 70 billion parameters."""
    report = replays.of("patients", "h200-llama_8b_float8").report
    linears = report.facts.network.linears
    block = [each for each in linears if each.name.startswith("model.layers.0.")]
    many = tuple(
        replace(each, name=each.name.replace(".0.", f".{number}.", 1))
        for number in range(80)
        for each in block
    )
    network = replace(report.facts.network, linears=(*many, linears[-1]))
    return replace(report, facts=replace(report.facts, network=network))


def test_the_layers_of_a_large_model_are_grouped() -> None:
    report = llama_70b()
    rows = layer_rows(report.facts.linears(), report.facts)
    assert rows[0][:2] == ("model.layers.*.self_attn.q_proj", "80")
    assert sum(int(row[1]) for row in rows) == 561
    assert len(report.to_html().encode()) < 100_000
