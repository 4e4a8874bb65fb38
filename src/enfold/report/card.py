"""The model card: what a reader must know of the shipped network before using it, in Markdown, from stored results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from enfold.data.corruptions.split import OURS
from enfold.errors import EnfoldError
from enfold.report.content import ONE, Content, Headline
from enfold.report.headline import headline
from enfold.report.sections import gain, signed
from enfold.report.table import corrupted_name, marked

SCORES = (  # title, where it lies in a row, metric, scale, digits
    ("accuracy (%)", "scores", "accuracy", 100, 2),
    ("NLL (nats)", "scores", "nll", 1, 4),
    ("Brier", "scores", "brier", 1, 4),
    ("ECE (%)", "scores", "ece", 100, 2),
    ("NLL at the fitted temperature (nats)", "scores", "cnll", 1, 4),
    ("fitted temperature", "scores", "temperature", 1, 2),
    ("accuracy, corrupted (%)", "corrupted", "accuracy", 100, 2),
    ("NLL, corrupted (nats)", "corrupted", "nll", 1, 4),
    ("ECE, corrupted (%)", "corrupted", "ece", 100, 2),
)


def model_card(content: Content) -> str:
    """The card of the headline's model; a run without a fold or share has nothing to ship."""
    found = content.headline
    unchanged = [label for label, row in content.rows.items() if "member" in row]
    if found is None and unchanged:
        raise EnfoldError(
            f"a model card is about a network that differs from its members, but {', '.join(unchanged)} of "
            f"'{content.folder}' has the weights of a member, unchanged: distill for more epochs or at a higher rate, "
            "or merge"
        )
    if found is None:
        raise EnfoldError(
            f"a model card is about an evaluated fold or share, but '{content.folder}' has none: "
            f"make one with  enfold fold {content.folder} kd{content.trust}"
        )
    parts = [
        f"# {_plain(found.label)}, from the run {_plain(content.name)}",
        _plain(headline(content).sentence),
        *_recommended(content, found),
        "## What it is",
        _what(content, found),
        "## How good it is",
        _scores(content, found),
        "\n".join(f"- {_plain(remark)}" for remark in headline(content).remarks),
        "## What it costs",
        _cost(content, found),
        "## Limits",
        _limits(content, found),
        "## How to load it",
        _loading(content, found),
        "## How it was made",
        _made(content),
    ]
    return "\n\n".join(parts) + "\n"


def _recommended(content: Content, found: Headline) -> list[str]:
    """One sentence that recommends the control, where it is better."""
    if found.control is None or found.to_control is None or found.to_control.mean <= 0:
        return []
    shown, interval = signed(found.to_control, 1, 4)
    noise = "" if found.to_control.lower > 0 else ", which is within noise"
    seed = content.seeds[0]
    file = (seed.folder / "controls" / f"{found.control}.safetensors").relative_to(content.folder)
    return [
        f"**Use {_plain(found.control)} ({_code(file)}) instead**: one member trained as long on the labels alone is "
        f"better; the NLL of {_plain(found.label)} is {shown} nats {interval} above it{noise}."
    ]


def _plain(text: str) -> str:
    """Text in which Markdown and HTML mean nothing."""
    return re.sub(r"([\\`*_{}\[\]<>#|&])", r"\\\1", " ".join(text.split()))


def _recipe(content: Content) -> Mapping[str, Any]:
    recipe: Mapping[str, Any] = content.summary["recipe"]
    return recipe


def _spec(content: Content, label: str) -> tuple[str, Mapping[str, Any]]:
    for room in ("folds", "shares"):
        for each in _recipe(content)[room]:
            if each["label"] == label:
                return room, each
    raise EnfoldError(f"a model card is about a fold or share of the run's recipe, got '{label}': choose one")


def _code(value: object) -> str:
    """Anything as code in a line of Markdown, whatever quotes it holds."""
    text = " ".join(str(value).split())
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def _what(content: Content, found: Headline) -> str:
    recipe, (room, spec) = _recipe(content), _spec(content, found.label)
    settings = {key: value for key, value in spec.items() if key not in ("method", "label", "plan") and value}
    kind = "A network of your own class" if found.members == 1 else f"A model of {found.members} members"
    made = "folded from" if room == "folds" else "trained beside"
    lines = [
        f"{kind}, {made} {recipe['members']} members by {_code(spec['method'])}"
        + (f" with {', '.join(_code(f'{key}={value}') for key, value in settings.items())}" if settings else "")
        + ".",
        f"- network: {_code(recipe['network'])}",
        f"- data: {_code(recipe['data']['source'])}",
        f"- members' plan: {_code(recipe['plan'])}",
    ]
    if spec.get("plan"):
        lines.append(f"- its own changes to the plan: {_code(spec['plan'])}")
    return "\n".join([lines[0], "", *lines[1:]])


def _compared(content: Content, found: Headline) -> list[str]:
    named = [found.label, found.control, ONE, "ensemble"]
    return [row for row in named if row is not None and row in content.rows]


def _scores(content: Content, found: Headline) -> str:
    rows = _compared(content, found)
    names = [_plain(marked(row, content.rows[row])) for row in rows]
    lines: list[Sequence[str]] = [["test data", *names], ["---", *("---:" for _ in rows)]]
    for title, place, metric, scale, digits in SCORES:
        values = [(content.rows[row].get(place) or {}).get(metric) for row in rows]
        if any(values):
            title = title.replace("corrupted", corrupted_name(content.rows))
            lines.append([title, *(_spread(value, scale, digits) for value in values)])
    lines += _outside(content, rows)
    lines.append(["gain recovered", *(gain(content, row) for row in rows)])
    shifts = [content.differences.get(row, {}).get("nll") for row in rows]
    if any(shifts):
        cells = ["–" if shift is None else " ".join(signed(shift, 1, 4)) for shift in shifts]
        lines.append([f"NLL minus the {ONE}'s", *cells])
    seeds = content.summary["seeds"]
    spread = "mean ± standard deviation over seeds" if len(seeds) > 1 else "one seed"
    note = f"{spread}; intervals: 95 %, paired bootstrap over seeds and test examples."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note}"


def _outside(content: Content, rows: Sequence[str]) -> list[Sequence[str]]:
    """How well each tells the test part from sets from outside, by the score that every model has."""
    sets = content.rows[rows[0]].get("ood") or {}
    told = {name: [(content.rows[row].get("ood") or {}).get(name) for row in rows] for name in sets}
    return [
        [
            f"AUROC by entropy, {_plain(name)} (%)",
            *(_spread((each or {"scores": {}})["scores"].get("entropy", {}).get("auroc"), 100, 1) for each in found),
        ]
        for name, found in told.items()
    ]


def _spread(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    if not value:
        return "–"
    text = f"{scale * value['mean']:.{digits}f}"
    return text if value["std"] is None else f"{text} ± {scale * value['std']:.{digits}f}"


def _cost(content: Content, found: Headline) -> str:
    rows = [row for row in _compared(content, found) if content.rows[row].get("cost")]
    if not rows:
        return "It was not measured: the recipe says `cost: false`."
    lines: list[Sequence[str]] = [["", *map(_plain, rows)], ["---", *("---:" for _ in rows)]]
    costs = [content.rows[row]["cost"] for row in rows]
    lines.append(["parameters", *(f"{cost['parameters']:,}" for cost in costs)])
    lines.append(["bytes", *(f"{cost['bytes']:,}" for cost in costs)])
    lines.append(["MFLOPs a prediction", *(f"{cost['flops'] / 1e6:.2f}" for cost in costs)])
    for batch in costs[0]["latency"]:
        cells = [f"{1e3 * cost['latency'][batch]['median']:.2f}" for cost in costs]
        lines.append([f"latency at batch {batch} (ms)", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _limits(content: Content, found: Headline) -> str:
    recipe = _recipe(content)
    name = corrupted_name(content.rows)
    tried = [
        *(["corrupted copies of it" if name == OURS else name] if content.rows[found.label].get("corrupted") else []),
        *map(_plain, content.rows[found.label].get("ood") or {}),
    ]
    beside = f"beside it only {', '.join(tried)} were tried" if tried else "other data were not tried"
    lines = [f"- Scores are of the test part of {_code(recipe['data']['source'])}; {beside}."]
    if len(content.summary["seeds"]) == 1:
        lines.append("- One seed: how much another training would differ is not known.")
    if not content.rows[found.label].get("corrupted"):
        lines.append("- Corrupted inputs were not tried: how it fails under shift is not known.")
    if not any(seed.ood for seed in content.seeds):
        lines.append("- Inputs of other kinds were not tried: its confidence says nothing about them.")
    if found.to_control is not None and found.to_control.upper >= 0:
        lines.append("- It is not better than its control beyond noise: longer training alone does as well, or better.")
    if content.rows[found.label].get("warning"):
        lines.append(f"- {_plain(str(content.rows[found.label]['warning']))}")
    lines.append("- Probabilities are those of the data it was trained on; check calibration anew where they differ.")
    return "\n".join(lines)


def _loading(content: Content, found: Headline) -> str:
    room, _ = _spec(content, found.label)
    seed = content.seeds[0]
    file = (seed.folder / room / f"{found.label}.safetensors").relative_to(content.folder)
    network = _recipe(content)["network"]
    own = ":" in str(network["name"] if isinstance(network, Mapping) else network)
    lines = ["```python", "import enfold", ""]
    lines += [f'model = enfold.load("{file}"{", make_network" if own else ""})  # seed {seed.seed}', "```", ""]
    if found.members == 1:
        lines += [
            "The values carry the names of the network's own `state_dict`, so enfold is not needed:",
            "",
            "```python",
            "from safetensors.torch import load_file",
            "",
            f'network.load_state_dict(load_file("{file}"))',
            "```",
        ]
    else:
        lines.append(
            "It answers with one more axis, (members, batch, classes); probabilities are averaged over members."
        )
    return "\n".join(lines)


def _made(content: Content) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content.versions.items())
    facts = [
        f"- date: {content.summary.get('date', 'not finished')}",
        f"- seeds: {', '.join(map(str, content.summary['seeds']))}",
        f"- versions: {_plain(versions)}",
    ]
    recipe = content.recipe.rstrip()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", recipe)), default=0))
    return "\n".join([*facts, "", f"{fence}yaml", recipe, fence])
