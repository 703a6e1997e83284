"""The model's size differs from its name

What it finds. The parameter count does not match the size in the model's name, such as 350M or 7b.

Why it matters. People compare times, memory and speedups by size. A decoder called 350M had 454M parameters:
a third more work in every step, which was blamed on FP8. The usual causes are a gated MLP (three matrices)
with the width of a plain one, an untied output head, and a larger vocabulary.

Fix. Choose the number of layers, or the width, that gives the size, or change the name.

    model = Decoder(layers=24, width=1024)  # before: called 350M, has 454M

    model = Decoder(layers=18, width=1024)  # after: 354M

When to ignore it. If you do not compare this model with others by size.

How it is detected, and limits. fp8doctor counts all parameters except LoRA's. It reads sizes in the name in
the configuration, the class, the file and the function that builds the model. Names may round and may omit
the embeddings: a difference up to 12% with or without them is fine. Nothing is reported for mixtures of
experts, several towers, or a shortened model. A number that is off by more than a factor of two means
something else (tokens, for example).

References. The released models whose counts are furthest from their names: gemma-7b (8.54B, 7.75B without
embeddings), Llama-3.2-1B (1.24B), gemma-2b (2.51B). https://huggingface.co/google/gemma-7b
https://huggingface.co/meta-llama/Llama-3.2-1B https://huggingface.co/google/gemma-2b
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from fp8doctor.analysis.compile_coverage import is_inside
from fp8doctor.facts import Blocks, Facts, Network, Target
from fp8doctor.facts.examples import float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

TOLERANCE = 0.12
"""Relative difference that a name may have: gemma-7b, the furthest compared, has 1.107 times its name."""

ANOTHER_MEANING = 2.0
"""Ratio beyond which a number in a name does not mean parameters. A choice, because of "10B tokens"."""

SIZE = re.compile(r"(?:(?P<before>\d+)(?P<point>[._]))?(?P<number>\d+)(?P<unit>[MmBb])(?![A-Za-z0-9])")
"""350M, 7b, 1.5B, and 1_5b, which may be 1.5 or 5."""

TOO_SHORT = re.compile(r"(?:^|[^A-Za-z])[A-Za-z]{1,2}$")
"""One or two letters right before a number give it another meaning: A3B (active), E4B (effective), 8x7B."""

UNITS = {"m": 1e6, "b": 1e9}


class Claim(NamedTuple):
    """A number of parameters that a name states."""

    text: str
    source: str
    parameters: float
    rounding: float
    """Half a unit of its last digit."""


@check("SHP006", "model-size-differs", area="shapes", severity="info", changes_fp8=True)
def model_size_differs(facts: Facts) -> Finding | NotApplicable | None:
    if facts.get("target.layers"):
        return NotApplicable(reason="the model was shortened with --layers")
    network = facts.network
    size = network.parameters - (network.adapter_parameters or 0)
    claims = [claim for source, name in names(facts) for claim in claims_in(source, name)]
    plausible = [
        claim for claim in claims if 1 / ANOTHER_MEANING <= size / claim.parameters <= ANOTHER_MEANING
    ]
    if not plausible:
        return NotApplicable(reason="no name states a size")
    if (
        any(linear.role in ("experts", "router") or linear.use == "storage" for linear in network.linears)
        or len(network.blocks) != 1
    ):
        return NotApplicable(reason="names count differently with experts, towers or packed weights")
    if any(
        abs(counted - claim.parameters) <= max(TOLERANCE * claim.parameters, claim.rounding)
        for claim in claims
        for counted in counts(size, network)
    ):
        return None
    claim = plausible[0]
    layers, fitting = layers_for(claim, size, network)
    return Finding(
        title=f"The model has {count_in_words(size)} parameters, but {claim.source} says {claim.text}",
        explanation=f"This is {size / claim.parameters:.2f}x the size in its name. Comparisons by size are "
        "off by as much.",
        evidence={
            "parameters": size,
            "claimed": claim.text,
            "claimed_by": claim.source,
            "ratio": round(size / claim.parameters, 3),
        },
        treatment=Treatment(
            name="size-as-named",
            summary=f"use {layers} layers instead of {network.blocks[0].count}, or call it "
            f"{count_in_words(size)}",
            code=f"{'config.num_hidden_layers' if network.kind.startswith('transformers.') else 'layers'} = "
            f"{layers}   # {count_in_words(fitting)} parameters",
        )
        if layers > 0
        else None,
    )


def names(facts: Facts) -> Iterator[tuple[str, str]]:
    """List the names of the model, the most deliberate first."""
    if configured := facts.get("network.configured_name"):
        yield f"its configuration ({configured})", configured
    kind = facts.network.kind.rpartition(".")[2]
    yield f"its class ({kind})", kind
    if facts.target.kind in ("file", "module"):
        yield f"its file ({facts.target.name})", facts.target.name.removesuffix(".py")
        if attribute := facts.get("target.attribute"):
            yield f"{attribute}()", attribute


def claims_in(source: str, name: str) -> Iterator[Claim]:
    """List every reading of every size in a name."""
    for match in SIZE.finditer(name):
        before, unit, number = match["before"], UNITS[match["unit"].lower()], match["number"]
        text = f"{number}{match['unit'].upper()}"
        if before is None and TOO_SHORT.search(name[: match.start()]):
            continue
        if match["point"] != ".":
            yield Claim(text, source, int(number) * unit, unit / 2)
        if before is not None:
            yield Claim(
                f"{before}.{text}", source, float(f"{before}.{number}") * unit, unit / 2 / 10 ** len(number)
            )


def counts(size: int, network: Network) -> tuple[int, ...]:
    """Count the parameters with the embedding table and the head, without one of them, and without both."""
    table = (network.vocabulary or 0) * (network.hidden_size or 0)
    return (size, size - table) if network.ties else (size, size - table, size - 2 * table)


def layers_for(claim: Claim, size: int, network: Network) -> tuple[int, int]:
    """Compute how many blocks make the claimed size, and how many parameters they give."""
    blocks: Blocks = network.blocks[0]
    each = sum(linear.parameters for linear in network.linears if is_inside(linear, blocks)) // blocks.count
    layers = blocks.count + round((claim.parameters - size) / each)
    return layers, size + (layers - blocks.count) * each


def count_in_words(parameters: float) -> str:
    """Write a count as names do: 454M, 8.03B."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _decoder(file: str) -> Facts:
    names = (f"blocks.{i}.mlp" for i in range(24))
    network = Network(
        kind="decoder.LM",
        parameters=454_166_528,
        adapter_parameters=0,
        linears=tuple(float8(name, use="none", parameters=16_777_216) for name in names),
        blocks=(Blocks(name="blocks", count=24),),
        ties=(("embedding.weight", "head.weight"),),
        vocabulary=50257,
        hidden_size=1024,
        configured_name=None,
    )
    return Facts(target=Target(kind="file", name=file, attribute="build_model"), network=network)


FIRES = _decoder("decoder_350m.py")
SILENT = _decoder("decoder_454m.py")
