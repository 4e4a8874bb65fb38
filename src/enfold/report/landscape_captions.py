"""Titles, captions and alt texts of the figures of a loss landscape, with their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

Facts = Mapping[str, Any]
Caption = dict[str, str]


def landscape_table(parts: Mapping[str, Any]) -> Table:
    """Return a table of the analyses and their main results, for a terminal."""
    from rich.table import Table

    table = Table("analysis", "", "seconds", "result", box=None, pad_edge=False)
    for name, row in parts.items():
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        table.add_row(name, row["state"], seconds, row.get("reason") or _summarize(name, row["facts"]))
    return table


def _summarize(name: str, facts: Facts) -> str:
    if name == "similarity" and not facts["trajectory"]:
        return f"cosine {_number(facts['cosine_between'])}, disagreement {_percent(facts['disagreement_between'])}"
    if name == "similarity":
        return (
            f"cosine within runs {_number(facts['cosine_within'])}, between {_number(facts['cosine_between'])}; "
            f"disagreement {_percent(facts['disagreement_within'])} and {_percent(facts['disagreement_between'])}"
        )
    if name == "paths":
        heights = {path: found["loss"]["height"] for path, found in facts["barriers"].items()}
        return "loss barriers (nats): " + ", ".join(f"{path} {height:.3f}" for path, height in heights.items())
    if name == "diversity":
        return f"base {100 * facts['base_accuracy']:.1f} %, {len(facts['groups'])} groups"
    if name == "ood":
        return f"{facts['networks']} networks of {len(facts['groups'])} groups on {', '.join(facts['sets'])}"
    if name == "map":
        return f"samples: {_list(kind for kind in facts['kinds'] if kind != 'training')}"
    if name == "sizes":
        return f"{_list(facts['groups'])}; severities {', '.join(map(str, facts['severities']))}"
    return f"{facts['size']} x {facts['size']} networks"


def _similarity(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    runs = len(np.unique(arrays["member"]))
    if facts["trajectory"]:
        result = (
            f"In the second half of training, two networks of one run have a cosine of "
            f"{_number(facts['cosine_within'])} and differ in {_percent(facts['disagreement_within'])} of the "
            f"predictions; two of different runs {_number(facts['cosine_between'])} and "
            f"{_percent(facts['disagreement_between'])}."
        )
        how = "Each block on the diagonal is one run, its epochs from left to right; blocks off it compare two runs."
    else:
        result = (
            f"Two members have a mean cosine of {_number(facts['cosine_between'])} and "
            f"differ in {_percent(facts['disagreement_between'])} of the predictions."
        )
        how = "Each cell compares two members."
    return {
        "title": "Similarity in weights and in predictions",
        "caption": f"{how} {result} {_data_note(settings)}",
        "alt": f"Two square matrices of {len(arrays['member'])} networks of {runs} runs. {result}",
    }


def _map(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    runs = len(np.unique(arrays["member"]))
    return {
        "title": "Trainings in function space",
        "caption": "Each point is a network; close points have similar predictions. A line is one run, with dots that "
        "grow with the epoch; other markers of its colour are samples around its end and the mean of its last weights. "
        "Runs that end at different points are different functions. t-SNE preserves neighbourhoods, not distances; "
        f"principal components preserve large distances. {_data_note(settings)}",
        "alt": f"Two maps of predictions: {runs} runs as coloured paths, with samples drawn around the end of each.",
    }


def _diversity(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    result = ""
    if "independent training" in facts["groups"]:
        a, y = (arrays[f"independent training/{key}"].mean() for key in ("accuracy", "diversity"))
        result = f"Independent runs: {100 * a:.1f} % accurate, {y:.2f} disagreements per error. "
    return {
        "title": "Diversity and accuracy",
        "caption": "Disagreement with the base network (run 1) divided by the error rate, against accuracy. Upper "
        "curve: errors independent of the base; lower curve: the base with random changes of predictions. Good members "
        "of an ensemble are at the upper right: diverse and accurate. "
        f"{result}{_data_note(settings)}",
        "alt": f"Scatter of {_list(facts['groups'])} between two limiting curves. {result}".strip(),
    }


def _paths(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    heights = ", ".join(f"{name} {facts['barriers'][name]['loss']['height']:.3f}" for name in facts["paths"])
    return {
        "title": "Paths between two networks",
        "caption": "Loss, accuracy and disagreement along paths between runs 1 and 2 (for an efficient ensemble: "
        "between its first two members, with batch statistics). A path of low loss on which predictions change "
        "connects different functions. The barrier is the largest excess of the loss over linear interpolation of the "
        f"ends, in nats: {heights}. {_data_note(settings)}",
        "alt": f"Three panels of curves along paths between two networks. Loss barriers in nats: {heights}.",
    }


def _plane(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    size = f"{facts['size']} x {facts['size']} networks"
    if facts["kind"] == "radial":
        return {
            "title": "The plane through the origin and two networks",
            "caption": "Every point is a network u·e1 + v·e2; distances are norms of weights. A dotted ray is one "
            "network at all scales. Separate wedges of high accuracy are separate modes, each with one function. "
            f"{size}. {_data_note(settings)}",
            "alt": "Three maps over a plane of weights through the origin and two runs: accuracy, and disagreement "
            "with each run.",
        }
    return {
        "title": "The plane through three networks",
        "caption": "Every point is a mixture of the weights of three runs; distances are norms of weights. Low loss "
        f"around each with barriers between them means separate modes. {size}. {_data_note(settings)}",
        "alt": "Three maps over the plane through three networks: loss, accuracy, and disagreement with run 1.",
    }


def _sizes(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    first, last = (float(arrays["original/0/nll"][at]) for at in (0, -1))
    count = len(arrays["original/0/nll"])
    inside = ", ".join(
        f"{group_name(name)} {float(values[0]):.3f} to {float(values[-1]):.3f}"
        for name, values in ((name, arrays[f"{name}/within/nll"]) for name in facts["within"])
    )
    below = "Second row: samples of one mode on the same scale, mean over modes. " if facts["within"] else ""
    below += "Last row: by severity of corruption, one mode and all modes. " if len(facts["severities"]) > 1 else ""
    result = f"From 1 to {count} runs the members' NLL goes from {first:.3f} to {last:.3f}. "
    if inside:
        result += f"Inside one run, from 1 sample to all: {inside}. "
    return {
        "title": "Scores by number of modes",
        "caption": "Scores of the mean prediction over the number of modes (runs), each the mean over all subsets of "
        f"that size (of {facts['subsets']} where there are more). “Original” are the members, “averaged” the means "
        f"of their last weights; of samples, each mode is the mean prediction of all its samples. {below}"
        f"{result}{_data_note(settings)}",
        "alt": f"Curves of accuracy, NLL, Brier score and ECE over the number of modes. {result}".strip(),
    }


def _ood(facts: Facts, arrays: Facts, settings: Facts) -> Caption:
    first = facts["groups"][0]
    result = "; ".join(f"{where}: {float(arrays[f'{first}/{where}']):.3f}" for where in facts["sets"])
    return {
        "title": "Diversity on OOD inputs",
        "caption": f"Jensen-Shannon divergence of {facts['networks']} networks by group and kind of input: the entropy "
        "of their mean prediction minus their mean entropy, averaged over inputs, over subsets of networks and, for "
        "samples, over runs. 0: equal predictions. Large values on OOD inputs mean that the ensemble detects them. "
        f"Independent trainings, in nats: {result}. {_data_note(settings)}",
        "alt": f"Dot plot of the Jensen-Shannon divergence of {_list(facts['groups'])}. Of {first} (nats): {result}.",
    }


def group_name(group: str) -> str:
    """Return the name of a group as shown; labels of steps are not changed."""
    return {"pca_random": "pca-random"}.get(group, group)


def _list(groups: Iterable[str]) -> str:
    return ", ".join(map(group_name, groups))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}".replace("-", "−")


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def _data_note(settings: Facts) -> str:
    return f"Seed {settings['seed']}, up to {settings['examples']:,} test examples, sampled at random."


CAPTIONS: dict[str, Callable[[Facts, Facts, Facts], Caption]] = {
    "similarity": _similarity,
    "map": _map,
    "diversity": _diversity,
    "paths": _paths,
    "radial": _plane,
    "three": _plane,
    "sizes": _sizes,
    "ood": _ood,
}
