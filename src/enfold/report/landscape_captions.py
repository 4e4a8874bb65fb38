"""Titles, captions and alt texts of a landscape's figures, with the figures' own numbers in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

Facts = Mapping[str, Any]
Words = dict[str, str]


def landscape_table(parts: Mapping[str, Any]) -> Table:
    """What became of each part, for a terminal."""
    from rich.table import Table

    table = Table("part", "", "seconds", "what it says", box=None, pad_edge=False)
    for name, row in parts.items():
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        table.add_row(name, row["state"], seconds, row.get("reason") or _in_short(name, row["facts"]))
    return table


def _in_short(name: str, facts: Facts) -> str:
    if name == "similarity" and not facts["trajectory"]:
        return f"cosine {_number(facts['cosine_between'])}, different answers {_percent(facts['disagreement_between'])}"
    if name == "similarity":
        return (
            f"cosine within runs {_number(facts['cosine_within'])}, between {_number(facts['cosine_between'])}; "
            f"different answers {_percent(facts['disagreement_within'])} and {_percent(facts['disagreement_between'])}"
        )
    if name == "paths":
        heights = {path: found["loss"]["height"] for path, found in facts["barriers"].items()}
        return "barriers of loss (nats): " + ", ".join(f"{path} {height:.3f}" for path, height in heights.items())
    if name == "diversity":
        return f"base {100 * facts['base_accuracy']:.1f} %, {len(facts['groups'])} groups"
    if name == "outside":
        return f"{facts['networks']} networks of {len(facts['groups'])} groups on {', '.join(facts['sets'])}"
    if name == "map":
        return f"trainings with samples: {_list(kind for kind in facts['kinds'] if kind != 'training')}"
    if name == "sizes":
        return f"{_list(facts['groups'])}; severities {', '.join(map(str, facts['severities']))}"
    return f"{facts['size']} x {facts['size']} networks"


def _similarity(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    runs = len(np.unique(arrays["member"]))
    if facts["trajectory"]:
        told = (
            f"In the later half of training two networks of one run have a cosine of {_number(facts['cosine_within'])} "
            f"and answer {_percent(facts['disagreement_within'])} of the examples differently; two of different runs "
            f"{_number(facts['cosine_between'])} and {_percent(facts['disagreement_between'])}."
        )
        how = "Each block on the diagonal is one run, its epochs from left to right; blocks off it compare two runs."
    else:
        told = (
            f"Two members have a mean cosine of {_number(facts['cosine_between'])} and answer "
            f"{_percent(facts['disagreement_between'])} of the examples differently."
        )
        how = "Each cell compares two members."
    return {
        "title": "How alike the networks are, in weights and in answers",
        "caption": f"{how} {told} {_asked(settings)}",
        "alt": f"Two square matrices of {len(arrays['member'])} networks of {runs} runs. {told}",
    }


def _map(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    runs = len(np.unique(arrays["member"]))
    return {
        "title": "Where trainings go in the space of functions",
        "caption": "Each point is a network, and near points answer alike. A line is one run, dots growing with the "
        "epochs; shapes of its colour are samples around its end and the mean of its last weights. Runs that end "
        "apart are different functions; samples that stay with their run are nearly the same one. t-SNE keeps "
        f"neighbourhoods, not distances; principal components keep large distances. {_asked(settings)}",
        "alt": f"Two maps of predictions: {runs} runs as coloured paths, with samples drawn around the end of each.",
    }


def _diversity(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    told = ""
    if "independent training" in facts["groups"]:
        a, y = (arrays[f"independent training/{key}"].mean() for key in ("accuracy", "diversity"))
        told = f"Independent runs: {100 * a:.1f} % accurate, {y:.2f} different answers for each error. "
    return {
        "title": "Diversity for accuracy",
        "caption": "How often a network answers unlike the base network (run 1), divided by its own error rate, over "
        "its accuracy. The upper curve is that of errors independent of the base's, the lower one that of the base "
        "with answers exchanged at random. High and far right is what an ensemble wants: different and good. "
        f"{told}{_asked(settings)}",
        "alt": f"Scatter of {_list(facts['groups'])} between two limiting curves. {told}".strip(),
    }


def _paths(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    heights = ", ".join(f"{name} {facts['barriers'][name]['loss']['height']:.3f}" for name in facts["paths"])
    return {
        "title": "Ways from one network to another",
        "caption": "Loss, accuracy and answers along paths between runs 1 and 2 (inside a share: between its first two "
        "members, batch norm by batch). A low path on which answers still change from one end's to the other's joins "
        "different functions of equal loss. The barrier is the highest rise of loss above the line between the ends' "
        f"own, in nats: {heights}. {_asked(settings)}",
        "alt": f"Three panels of curves along paths between two networks. Barriers of loss in nats: {heights}.",
    }


def _plane(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    size = f"{facts['size']} x {facts['size']} networks"
    if facts["kind"] == "radial":
        return {
            "title": "The plane through the origin and two networks",
            "caption": "Every point is a network u·e1 + v·e2; distances are lengths of weights. A dotted ray is one "
            "network at all scales. Where each ray lies in a wedge of its own, with high accuracy and its run's "
            f"answers, the runs are two valleys, and each valley is one function. {size}. {_asked(settings)}",
            "alt": "Three maps over a plane of weights through the origin and two runs: accuracy, and answers unlike "
            "those of each run.",
        }
    return {
        "title": "The plane through three networks",
        "caption": "Every point is a mixture of the three runs' weights; distances are lengths of weights. Low loss "
        f"around each, with ridges between, means separate valleys. {size}. {_asked(settings)}",
        "alt": "Three maps over the plane through three networks: loss, accuracy, and answers unlike the first run's.",
    }


def _sizes(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    first, last = (float(arrays["original/0/nll"][at]) for at in (0, -1))
    count = len(arrays["original/0/nll"])
    inside = ", ".join(
        f"{called(name)} {float(arrays[f'{name}/within/nll'][0]):.3f} to {float(arrays[f'{name}/within/nll'][-1]):.3f}"
        for name in facts["within"]
    )
    below = "Below, on the same scale, samples of one mode alone, mean over modes. " if facts["within"] else ""
    below += "Last, by severity of corruption, one mode beside all. " if len(facts["severities"]) > 1 else ""
    told = f"From 1 to {count} runs the members' NLL goes from {first:.3f} to {last:.3f}. "
    if inside:
        told += f"Inside one run, from 1 sample to all: {inside}. "
    return {
        "title": "What further members give",
        "caption": "Scores of the mean prediction over the number of modes (runs), each the mean over all subsets of "
        f"that size (of {facts['subsets']} where there are more). “Original” are the members, “averaged” the means "
        f"of their last weights; of samples, each mode is the mean prediction of all its samples. {below}"
        f"{told}{_asked(settings)}",
        "alt": f"Curves of accuracy, NLL, Brier score and ECE over the number of modes. {told}".strip(),
    }


def _outside(facts: Facts, arrays: Facts, settings: Facts) -> Words:
    first = facts["groups"][0]
    told = "; ".join(f"{where}: {float(arrays[f'{first}/{where}']):.3f}" for where in facts["sets"])
    return {
        "title": "Who disagrees where nobody can know",
        "caption": f"How far {facts['networks']} networks are at odds, by group and kind of input: the entropy of "
        "their mean prediction minus their own mean entropy (the Jensen-Shannon divergence), mean over inputs, "
        "over all choices of so many networks and, of samples, over the runs they surround. 0 is one voice. The "
        "further right on inputs from outside, the better an ensemble knows that it does not know. Of independent "
        f"trainings, in nats: {told}. {_asked(settings)}",
        "alt": f"Dot plot of the Jensen-Shannon divergence of {_list(facts['groups'])}. Of {first} (nats): {told}.",
    }


def called(group: str) -> str:
    """A group as people read it; labels of shares and folds stay as they are."""
    return {"pca_random": "pca-random"}.get(group, group)


def _list(groups: Iterable[str]) -> str:
    return ", ".join(map(called, groups))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}".replace("-", "−")


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"


def _asked(settings: Facts) -> str:
    return f"Seed {settings['seed']}, up to {settings['examples']:,} test examples, drawn at random."


WORDS: dict[str, Callable[[Facts, Facts, Facts], Words]] = {
    "similarity": _similarity,
    "map": _map,
    "diversity": _diversity,
    "paths": _paths,
    "radial": _plane,
    "three": _plane,
    "sizes": _sizes,
    "outside": _outside,
}
