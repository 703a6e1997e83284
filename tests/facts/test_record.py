"""What is saved comes back unchanged, whatever it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.facts import Facts, Gpu, Linear, Network, Target, recorded
from fp8doctor.facts.record import UnreadableDocument, decode, encode, to_builtins
from fp8doctor.finding import Finding


def round_trip(facts: Facts) -> Facts:
    return Facts.from_dict(decode(encode(facts.to_dict())))


@pytest.mark.slow
@given(
    name=st.text(st.characters(exclude_categories=())),
    memory=st.floats(),
    features=st.dictionaries(
        st.text(),
        st.none()
        | st.booleans()
        | st.integers(-(2**60), 2**60)
        | st.text(st.characters(exclude_categories=())),
    ),
)
def test_any_text_and_any_number_survives_a_round_trip(
    name: str, memory: float, features: dict[str, bool | int | str | None]
) -> None:
    facts = Facts(
        gpus=(Gpu(name=name, memory_gib=memory),),
        network=Network(linears=(Linear(name=name, features=features),)),
        target=Target(kind="file", name=name),
    )
    assert round_trip(facts) == facts
    assert encode(round_trip(facts).to_dict()) == encode(facts.to_dict())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_becomes_none_in_a_fact_and_text_in_evidence(number: float) -> None:
    assert Gpu(memory_gib=number).memory_gib is None
    assert Finding(title="t", explanation="e", evidence={"loss": number}).evidence == {"loss": str(number)}


def test_a_lone_surrogate_becomes_the_replacement_character() -> None:
    assert Target(name="a\udc80b").name == "a\N{REPLACEMENT CHARACTER}b"
    assert Linear(features={"k\udc80": "v\udfff"}).features == {
        "k\N{REPLACEMENT CHARACTER}": "v\N{REPLACEMENT CHARACTER}"
    }


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"nonsense", b"[" * 100_000])
def test_what_is_not_json_is_refused_with_a_sentence(text: bytes) -> None:
    with pytest.raises(UnreadableDocument, match="nested too deep" if len(text) > 10 else "not JSON"):
        decode(text)


def test_a_fact_that_was_not_recorded_is_not_written_and_stays_unrecorded() -> None:
    facts = round_trip(Facts(network=Network(kind="Net")))
    assert "linears" not in to_builtins(facts)["network"]
    assert not recorded(facts, "network.linears")
    assert not recorded(facts, "training")


def test_a_fact_is_read_by_its_path_or_by_default() -> None:
    facts = Facts(network=Network(kind="mlp.Net", vocabulary=None))
    assert facts.get("network.kind") == "mlp.Net"
    assert facts.get("network.vocabulary", 7) is None
    assert facts.get("network.hidden_size", 7) == 7
    assert facts.get("training.optimizer") is None
    assert facts.get("network.vocabulary.size", 7) == 7  # beyond a None
    with pytest.raises(AttributeError):
        facts.get("network.kinds")


def test_unknown_keys_of_a_newer_recording_are_kept_at_every_level() -> None:
    newer = {
        "target": {"kind": "file", "name": "a.py", "colour": "blue"},
        "network": {"kind": "Net", "linears": [{"name": "a"}, {"name": "b", "temperature_k": 3.5}]},
        "weather": {"rain_pct": 4},
    }
    facts = Facts.from_dict(newer)
    assert facts.network.linears[1].name == "b"
    assert round_trip(facts).to_dict() == facts.to_dict()
    assert facts.to_dict()["weather"] == {"rain_pct": 4}
    assert facts.to_dict()["target"]["colour"] == "blue"
    assert facts.to_dict()["network"]["linears"][1]["temperature_k"] == 3.5
