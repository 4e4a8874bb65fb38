"""The model card of the selected network in Markdown, from stored results."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enfold.data.corruptions.split import OURS
from enfold.errors import EnfoldError
from enfold.report.content import ONE, Content, Headline
from enfold.report.headline import summarize_run
from enfold.report.markdown import escape, inline_code
from enfold.report.sections import format_difference, gain
from enfold.report.table import corrupted_name, format_latency, format_markdown, format_spread, recipe_steps, row_title

SCORES = (  # title, key of the row, metric, scale, digits
    ("accuracy (%)", "scores", "accuracy", 100, 2),
    ("NLL (nats)", "scores", "nll", 1, 4),
    ("mIoU (%)", "scores", "miou", 100, 2),
    ("mAP (%)", "scores", "map", 100, 2),
    ("RMSE", "scores", "rmse", 1, 4),
    ("MAE", "scores", "mae", 1, 4),
    ("CRPS", "scores", "crps", 1, 4),
    ("pinball loss", "scores", "pinball", 1, 4),
    ("coverage of 90 % intervals (%)", "scores", "coverage_90", 100, 1),
    ("Brier", "scores", "brier", 1, 4),
    ("ECE (%)", "scores", "ece", 100, 2),
    ("NLL at the fitted temperature (nats)", "scores", "cnll", 1, 4),
    ("fitted temperature", "scores", "temperature", 1, 2),
    ("accuracy, corrupted (%)", "corrupted", "accuracy", 100, 2),
    ("NLL, corrupted (nats)", "corrupted", "nll", 1, 4),
    ("ECE, corrupted (%)", "corrupted", "ece", 100, 2),
)


def render_card(content: Content) -> str:
    """Return the model card of the headline's model.

    Raises:
        EnfoldError: If the run has no distilled network, merged network or efficient ensemble.
    """
    found = content.headline
    if found is None and content.single_members:
        raise EnfoldError(
            f"a model card needs a network that differs from the members, but {', '.join(content.single_members)} of "
            f"'{content.folder}' has the weights of a member: distill for more epochs or with a higher lr, or merge"
        )
    if found is None:
        raise EnfoldError(
            f"a model card needs an evaluated step, but '{content.folder}' has none: "
            f"create one with  enfold distill {content.folder} kd{content.trust}"
        )
    parts = [
        f"# {escape(found.label)}, from the run {escape(content.name)}",
        escape(summarize_run(content).sentence),
        *_recommend(content, found),
        "## Model",
        _describe(content, found),
        "## Quality",
        _scores(content, found),
        "\n".join(f"- {escape(remark)}" for remark in summarize_run(content).remarks),
        "## Cost",
        _cost(content, found),
        "## Limits",
        _limits(content, found),
        "## Usage",
        _loading(content, found),
        "## Reproducibility",
        _made(content),
    ]
    return "\n\n".join(parts) + "\n"


def _recommend(content: Content, found: Headline) -> list[str]:
    """Return one sentence that recommends the control if it is better."""
    if found.control is None or found.to_control is None or found.to_control.mean <= 0:
        return []
    shown, interval = format_difference(found.to_control, 1, 4)
    noise = "" if found.to_control.lower > 0 else ", which is within noise"
    seed = content.seeds[0]
    file = _weights(content, seed.folder, found.control)
    return [
        f"**Use {escape(found.control)} ({inline_code(file)}) instead**: one member trained further on labels for as "
        f"many epochs is better; the NLL of {escape(found.label)} is {shown} nats {interval} above it{noise}."
    ]


def _recipe(content: Content) -> Mapping[str, Any]:
    recipe: Mapping[str, Any] = content.summary["recipe"]
    return recipe


def _step(content: Content, label: str) -> Mapping[str, Any]:
    for step in recipe_steps(content.summary):
        if step["label"] == label:
            return step
    raise EnfoldError(f"label must name a step of the run's recipe, got '{label}': choose one of its steps")


def _weights(content: Content, seed: Path, label: str) -> Path:
    """Return the file with the weights of a row, relative to the run."""
    manifest = next(iter(sorted(seed.glob(f"*/{glob.escape(label)}.json"))), seed / f"{label}.json")
    return manifest.with_name(f"{label}.safetensors").relative_to(content.folder)


def _describe(content: Content, found: Headline) -> str:
    recipe, spec = _recipe(content), _step(content, found.label)
    settings = {key: value for key, value in spec.items() if key not in ("method", "label", "plan", "train") and value}
    kind = "A network of your own class" if found.members == 1 else f"A model of {found.members} members"
    changes, train = spec.get("train") or spec.get("plan"), recipe.get("train") or recipe.get("plan")
    lines = [
        f"{kind}, made by {inline_code(spec['method'])} in a run with {recipe['members']} members"
        + (f" with {', '.join(inline_code(f'{key}={value}') for key, value in settings.items())}" if settings else "")
        + ".",
        f"- network: {inline_code(recipe['network'])}",
        f"- data: {inline_code(recipe['data']['source'])}",
        f"- training of the members: {inline_code(train)}",
    ]
    if changes:
        lines.append(f"- changes to the training of this step: {inline_code(changes)}")
    return "\n".join([lines[0], "", *lines[1:]])


def _compare(content: Content, found: Headline) -> list[str]:
    named = [found.label, found.control, ONE, "ensemble"]
    return [row for row in named if row is not None and row in content.rows]


def _scores(content: Content, found: Headline) -> str:
    rows = _compare(content, found)
    names = [escape(row_title(row, content.rows[row])) for row in rows]
    lines: list[Sequence[str]] = [["test data", *names], ["---", *("---:" for _ in rows)]]
    for title, place, metric, scale, digits in SCORES:
        values = [(content.rows[row].get(place) or {}).get(metric) for row in rows]
        if any(values):
            title = title.replace("corrupted", corrupted_name(content.rows))
            lines.append([title, *(_spread(value, scale, digits) for value in values)])
    lines += _ood(content, rows)
    lines.append(["gain recovered", *(gain(content, row) for row in rows)])
    shifts = [content.differences.get(row, {}).get(content.criterion) for row in rows]
    if any(shifts):
        cells = ["–" if shift is None else " ".join(format_difference(shift, 1, 4)) for shift in shifts]
        lines.append([f"{content.loss} minus the {ONE}'s", *cells])
    seeds = content.summary["seeds"]
    spread = "mean ± standard deviation over seeds" if len(seeds) > 1 else "one seed"
    note = f"{spread}; intervals: 95 %, paired bootstrap over seeds and test examples."
    return format_markdown(lines) + f"\n\n{note}"


def _ood(content: Content, rows: Sequence[str]) -> list[Sequence[str]]:
    """Return the AUROC of OOD detection by entropy, which every model has."""
    sets = content.rows[rows[0]].get("ood") or {}
    results = {name: [(content.rows[row].get("ood") or {}).get(name) for row in rows] for name in sets}
    return [
        [
            f"AUROC by entropy, {escape(name)} (%)",
            *(_spread((each or {"scores": {}})["scores"].get("entropy", {}).get("auroc"), 100, 1) for each in found),
        ]
        for name, found in results.items()
    ]


def _spread(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    return format_spread(value, scale, digits) if value else "–"


def _cost(content: Content, found: Headline) -> str:
    rows = [row for row in _compare(content, found) if content.rows[row].get("cost")]
    if not rows:
        return "Not measured (`cost: false` in the recipe)."
    lines: list[Sequence[str]] = [["", *map(escape, rows)], ["---", *("---:" for _ in rows)]]
    costs = [content.rows[row]["cost"] for row in rows]
    lines.append(["parameters", *(f"{cost['parameters']:,}" for cost in costs)])
    lines.append(["bytes", *(f"{cost['bytes']:,}" for cost in costs)])
    lines.append(["MFLOPs per prediction", *(f"{cost['flops'] / 1e6:.2f}" for cost in costs)])
    for batch in costs[0]["latency"]:
        cells = [format_latency(cost, batch, False) for cost in costs]
        lines.append([f"latency at batch size {batch} (ms)", *cells])
    return format_markdown(lines)


def _limits(content: Content, found: Headline) -> str:
    recipe = _recipe(content)
    name = corrupted_name(content.rows)
    evaluated = [
        *(["corrupted copies of it" if name == OURS else name] if content.rows[found.label].get("corrupted") else []),
        *map(escape, content.rows[found.label].get("ood") or {}),
    ]
    other = f"other data: only {', '.join(evaluated)}" if evaluated else "no other data were evaluated"
    lines = [f"- Scores are on the test split of {inline_code(recipe['data']['source'])}; {other}."]
    if len(content.summary["seeds"]) == 1:
        lines.append("- One seed: the variation over training runs is unknown.")
    if not content.rows[found.label].get("corrupted"):
        lines.append("- Corrupted inputs were not evaluated: the behaviour under distribution shift is unknown.")
    if not any(seed.ood for seed in content.seeds):
        lines.append("- OOD inputs were not evaluated: its confidence on such inputs is unknown.")
    if found.to_control is not None and found.to_control.upper >= 0:
        lines.append(
            "- The difference to its control is within noise or worse: more training of one member does as well."
        )
    if content.rows[found.label].get("warning"):
        lines.append(f"- {escape(str(content.rows[found.label]['warning']))}")
    lines.append("- Calibration was measured on the test split; check it on your own data.")
    return "\n".join(lines)


def _loading(content: Content, found: Headline) -> str:
    seed = content.seeds[0]
    file = _weights(content, seed.folder, found.label)
    network = _recipe(content)["network"]
    own = ":" in str(network["name"] if isinstance(network, Mapping) else network)
    lines = ["```python", "import enfold", ""]
    lines += [f'model = enfold.load("{file}"{", make_network" if own else ""})  # seed {seed.seed}', "```", ""]
    if found.members == 1:
        lines += [
            "The file has the keys of the network's `state_dict`, so it can be loaded without enfold:",
            "",
            "```python",
            "from safetensors.torch import load_file",
            "",
            f'network.load_state_dict(load_file("{file}"))',
            "```",
        ]
    else:
        lines.append("Its output has a member axis, (members, batch, classes); average the probabilities over members.")
    return "\n".join(lines)


def _made(content: Content) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    facts = [
        f"- date: {content.summary.get('date', 'in progress')}",
        f"- seeds: {', '.join(map(str, content.summary['seeds']))}",
        f"- versions: {escape(versions)}",
    ]
    recipe = content.recipe.rstrip()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", recipe)), default=0))
    return "\n".join([*facts, "", f"{fence}yaml", recipe, fence])
