"""The page about the zoo: docs/foreign-networks.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "foreign-networks.md"
OUTCOMES = ("ok", "refused", "skipped", "wrong", "crash", "abort", "slow")
BAD = ("wrong", "crash", "abort", "slow")
INTRODUCTION = """# Networks from elsewhere

{networks} small networks, {foreign} of them from {packages} packages and {hazards} written for something that ensembles
stumble over, each tried with {capabilities} capabilities of enfold. Every check compares enfold with plain PyTorch:
members with networks built anew from the same seed, training with a loop of `torch.optim`, merges of equal members with
the member itself, permuted networks with themselves. (`make zoo`; {date}, enfold {enfold}, torch {torch};
[results/zoo.json](../results/zoo.json) holds every outcome with its message and the packages' versions.)

| outcome | meaning | count |
| --- | --- | ---: |
{outcomes}

A difference above rounding (a part in a thousand in float32) counts as wrong if it is there in float64 too. Each
network runs in a process of its own, so that a process that ends is seen. {missing}

## What is not well

{bad}
"""
RENAMED = {  # since they were measured
    "share: AveragedModes": "share: MultiSWA",
    "share: HyperBatchEnsembles": "share: HyperBatchEnsemble",
    "share: HyperDeepEnsembles": "share: HyperDeepEnsemble",
    "share: MixtureEnsembles": "share: MixtureEnsemble",
    "share: PackedEnsembles": "share: PackedEnsemble",
    "share: SnapshotEnsembles": "share: SnapshotEnsemble",
    "share: Subspace": "share: SubspaceSampling",
}
MEANINGS = {
    "ok": "as plain PyTorch",
    "refused": "an `EnfoldError` says why, and what to do",
    "skipped": "plain PyTorch has nothing to compare with (no class labels, no dropout)",
    "wrong": "something else than plain PyTorch gives",
    "crash": "another exception",
    "abort": "the process ended",
    "slow": "more than 60 s",
}


def page(record: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    networks = {name: named(row) for name, row in record["networks"].items() if "network" not in row["capabilities"]}
    missing = [name for name in record["networks"] if name not in networks]
    packages = {row["package"] for row in networks.values()} - {"by hand"}
    hazards = sum(row["package"] == "by hand" for row in networks.values())
    total = counted(networks.values())
    head = INTRODUCTION.format(
        networks=len(networks),
        foreign=len(networks) - hazards,
        packages=len(packages),
        hazards=hazards,
        capabilities=len(capabilities(networks)),
        date=record["date"],
        enfold=record["versions"]["enfold"],
        torch=record["versions"]["torch"],
        outcomes="\n".join(f"| {name} | {MEANINGS[name]} | {total[name]:,} |" for name in OUTCOMES),
        missing=f"Left out, because their packages are not installed: {', '.join(missing)}." if missing else "",
        bad="\n".join(failures(networks)) or "Nothing.",
    )
    return head + "\n" + "\n".join([*by_network(networks), "", *by_capability(networks), ""])


def named(row: dict[str, Any]) -> dict[str, Any]:
    """A network's outcomes by the names that capabilities have now."""
    return {**row, "capabilities": {RENAMED.get(name, name): each for name, each in row["capabilities"].items()}}


def capabilities(networks: dict[str, Any]) -> list[str]:
    """All that were tried, in their order."""
    return list(dict.fromkeys(name for row in networks.values() for name in row["capabilities"]))


def counted(rows: Iterable[dict[str, Any]]) -> Counter[str]:
    """How often each outcome was found."""
    return Counter(result["outcome"] for row in rows for result in row["capabilities"].values())


def failures(networks: dict[str, Any]) -> Iterator[str]:
    """One line for each message: where it was seen."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for network, row in networks.items():
        for capability, result in row["capabilities"].items():
            if result["outcome"] in BAD:
                seen.setdefault((network, result["outcome"], result["message"]), []).append(capability)
    for (network, outcome, message), where in seen.items():
        text = message.replace("|", "\\|").replace("`", "'")
        yield f"- **{outcome}**, {network}, {', '.join(where)}: `{text[:240]}`"


def by_network(networks: dict[str, Any]) -> Iterator[str]:
    """A table of outcome counts."""
    yield "## By network\n"
    yield f"| network | package | {' | '.join(OUTCOMES)} |"
    yield f"| --- | --- | {' | '.join('---:' for _ in OUTCOMES)} |"
    for name, row in networks.items():
        counts = counted([row])
        yield f"| {name} | {row['package']} | {' | '.join(str(counts[o] or '') for o in OUTCOMES)} |"


def by_capability(networks: dict[str, Any]) -> Iterator[str]:
    """A table of outcome counts."""
    yield "## By capability\n"
    yield f"| capability | {' | '.join(OUTCOMES)} |"
    yield f"| --- | {' | '.join('---:' for _ in OUTCOMES)} |"
    for name in capabilities(networks):
        rows = [
            {"capabilities": {name: row["capabilities"][name]}}
            for row in networks.values()
            if name in row["capabilities"]
        ]
        counts = counted(rows)
        yield f"| {name} | {' | '.join(str(counts[o] or '') for o in OUTCOMES)} |"
