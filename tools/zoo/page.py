"""Write the page about compatibility: docs/compatibility.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
OUTCOMES = ("ok", "refused", "skipped", "wrong", "crash", "abort", "slow")
BAD = ("wrong", "crash", "abort", "slow")
INTRODUCTION = """# Compatibility with third-party networks

{networks} small networks, {third_party} of them from {packages} packages and {hazards} written for known hazards, are
tested with {capabilities} capabilities of enfold. Every check compares enfold with plain PyTorch: members with networks
built again from the same seed, training with a loop of `torch.optim`, merges of equal members with the member, and
permuted networks with the original. (`make zoo`; {date}, enfold {enfold}, torch {torch};
[results/zoo.json](../results/zoo.json) contains every outcome with its message and the packages' versions.)

| outcome | meaning | count |
| --- | --- | ---: |
{outcomes}

A difference above rounding (a relative difference of 10⁻³ in float32) counts as wrong if it exists in float64, too.
Each network runs in a separate process, so that a crash of the process is an outcome. {missing}

## Failures

{bad}
"""
RENAMED = {  # old names in stored results
    "share: AveragedModes": "ensemble: MultiSWA",
    "share: HyperBatchEnsembles": "ensemble: HyperBatchEnsemble",
    "share: HyperDeepEnsembles": "ensemble: HyperDeepEnsemble",
    "share: Hydra": "ensemble: HydraEnsemble",
    "share: MixtureEnsembles": "ensemble: MixtureEnsemble",
    "share: PackedEnsembles": "ensemble: PackedEnsemble",
    "share: SnapshotEnsembles": "ensemble: SnapshotEnsemble",
    "share: Subspace": "ensemble: SubspaceSampling",
    "distill: HydraDistillation": "distill: Hydra",
    "merge: Average": "merge: average",
    "merge: WeightMatching": "merge: weight_matching",
    "merge: ActivationMatching": "merge: activation_matching",
    "merge: MergeMany": "merge: merge_many",
    "merge: C2M3": "merge: c2m3",
    "merge: StraightThrough": "merge: straight_through",
    "merge: OTFusion": "merge: ot_fusion",
    "merge: OTFusion by weights": "merge: ot_fusion by weights",
    "merge: CCAMerge": "merge: cca_merge",
    "merge: ZipIt": "merge: zipit",
    "merge: Soup": "merge: soup",
    "merge: PermAVG": "merge: perm_avg",
    "merge: WeightMatching >> Repair": "merge: weight_matching, repair",
    "merge: Repair, closed form": "merge: average, closed-form repair",
}
MEANINGS = {
    "ok": "as plain PyTorch",
    "refused": "an `EnfoldError` names the reason and the remedy",
    "skipped": "plain PyTorch has nothing to compare with (no class labels, no dropout)",
    "wrong": "differs from plain PyTorch",
    "crash": "another exception",
    "abort": "the process ended",
    "slow": "more than 60 s",
}


def page(record: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    networks = {name: named(row) for name, row in record["networks"].items() if "network" not in row["capabilities"]}
    missing = [name for name in record["networks"] if name not in networks]
    packages = {row["package"] for row in networks.values()} - {"by hand"}
    hazards = sum(row["package"] == "by hand" for row in networks.values())
    total = counted(networks.values())
    head = INTRODUCTION.format(
        networks=len(networks),
        third_party=len(networks) - hazards,
        packages=len(packages),
        hazards=hazards,
        capabilities=len(capabilities(networks)),
        date=record["date"],
        enfold=record["versions"]["enfold"],
        torch=record["versions"]["torch"],
        outcomes="\n".join(f"| {name} | {MEANINGS[name]} | {total[name]:,} |" for name in OUTCOMES),
        missing=f"Omitted, because their packages are not installed: {', '.join(missing)}." if missing else "",
        bad="\n".join(failures(networks)) or "None.",
    )
    return head + "\n" + "\n".join([*by_network(networks), "", *by_capability(networks), ""])


def named(row: dict[str, Any]) -> dict[str, Any]:
    """Return the outcomes of a network by the present names of capabilities."""
    found = row["capabilities"].items()
    return {**row, "capabilities": {_present_name(name): result for name, result in found}}


def _present_name(name: str) -> str:
    return RENAMED.get(name, name.replace("share: ", "ensemble: "))


def capabilities(networks: dict[str, Any]) -> list[str]:
    """Return the capabilities in their order."""
    return list(dict.fromkeys(name for row in networks.values() for name in row["capabilities"]))


def counted(rows: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return the number of each outcome."""
    return Counter(result["outcome"] for row in rows for result in row["capabilities"].values())


def failures(networks: dict[str, Any]) -> Iterator[str]:
    """Yield one line per message, with its networks and capabilities."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for network, row in networks.items():
        for capability, result in row["capabilities"].items():
            if result["outcome"] in BAD:
                seen.setdefault((network, result["outcome"], result["message"]), []).append(capability)
    for (network, outcome, message), where in seen.items():
        text = message.replace("|", "\\|").replace("`", "'")
        yield f"- **{outcome}**, {network}, {', '.join(where)}: `{text[:240]}`"


def by_network(networks: dict[str, Any]) -> Iterator[str]:
    """Return a table of outcome counts by network."""
    yield "## By network\n"
    yield f"| network | package | {' | '.join(OUTCOMES)} |"
    yield f"| --- | --- | {' | '.join('---:' for _ in OUTCOMES)} |"
    for name, row in networks.items():
        counts = counted([row])
        yield f"| {name} | {row['package']} | {' | '.join(str(counts[o] or '') for o in OUTCOMES)} |"


def by_capability(networks: dict[str, Any]) -> Iterator[str]:
    """Return a table of outcome counts by capability."""
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
