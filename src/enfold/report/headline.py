"""The headline of a run: one network, its gain recovered, its cost, and its control."""

from __future__ import annotations

from dataclasses import dataclass

from enfold.report.content import ONE, Content
from enfold.report.sections import format_difference, format_percent, format_ratio, gain
from enfold.report.table import WITHIN_NOISE


@dataclass(frozen=True)
class Tile:
    """A number with its description."""

    figure: str
    words: str
    kind: str


@dataclass(frozen=True)
class Words:
    """The summary of a run in one sentence, a few numbers and remarks."""

    sentence: str
    tiles: tuple[Tile, ...]
    remarks: tuple[str, ...]


def summarize_run(content: Content) -> Words:
    """Return the headline from stored results, or a note that there are none yet."""
    if not content.rows:
        return Words("No results yet. Models and their scores appear here when they have been evaluated.", (), ())
    sentence = " ".join(filter(None, [_recommendation(content), _sentence(content)]))
    return Words(sentence, tuple(_tiles(content)), tuple(_remarks(content)))


def _recommendation(content: Content) -> str:
    """Return which single network to ship; an empty string if there is none to compare.

    The network of the headline is compared with its control; without a control, with the mean member.
    """
    found = content.headline
    if found is None or found.members > 1:
        return ""
    if found.to_control is not None:
        if found.to_control.lower > 0:
            return f"Train one member longer: {found.control} is better than {found.label}."
        if found.to_control.upper < 0:
            return f"Ship {found.label}."
        if found.to_control.lower == found.to_control.upper == 0:
            return f"Train one member longer: {found.label} chose the same network as {found.control}."
        return f"Ship {found.label} or {found.control}: their difference is within noise."
    change = content.differences.get(found.label, {}).get(content.criterion)
    if change is None or change.lower <= 0 <= change.upper:
        return ""
    if change.upper < 0:
        return f"Ship {found.label}."
    better = [name for name in content.rows if name.split("-")[0] == "control" and _is_better(content, name)]
    instead = f"Train one member longer: {better[0]} is better than a member" if better else "Ship a member"
    return f"{instead}; {found.label} is worse than one."


def _is_better(content: Content, label: str) -> bool:
    """Return whether a model is better than the mean member beyond noise."""
    change = content.differences.get(label, {}).get(content.criterion)
    return change is not None and change.upper < 0


def _sentence(content: Content) -> str:
    found = content.headline
    members = content.summary["recipe"]["members"]
    if found is None:
        shift = content.differences.get("ensemble", {}).get(content.criterion)
        nats = " nats" if content.criterion == "nll" else ""
        shown = "" if shift is None else " ".join(format_difference(shift, 1, 4))
        change = "" if shift is None else f" The {content.loss} changes by {shown}{nats}."
        unchanged = f"{', '.join(content.single_members)} has the weights of a single member"
        status = unchanged if content.single_members else "no distilled or merged network yet"
        return f"An ensemble of {members} and its mean member; {status}.{change}"
    what = "One network" if found.members == 1 else f"One model of {found.members} members"
    recovered = gain(content, found.label)
    if content.rows[found.label].get("gain_recovered") is None:
        return f"{what}, {found.label}: the ensemble of {members} has no gain over its mean member to recover."
    if recovered == WITHIN_NOISE:
        return f"{what}, {found.label}: the gain of the {members}-member ensemble over its mean member is within noise."
    cost = format_ratio(content, found.label)
    price = "" if cost is None else f" at {cost} the FLOPs of a single network"
    control = f"; its control recovers {gain(content, found.control)}" if found.control else ""
    return f"{what}, {found.label}, recovers {recovered} of the gain of a {members}-member ensemble{price}{control}."


def _tiles(content: Content) -> list[Tile]:
    found = content.headline
    if found is None or gain(content, found.label) in ("–", WITHIN_NOISE):
        return []
    kind = "network" if found.members == 1 else "efficient"
    tiles = [
        Tile(gain(content, found.label), f"of the ensemble's gain in {content.loss} recovered by {found.label}", kind)
    ]
    cost, reference = format_ratio(content, found.label), format_ratio(content, "ensemble")
    if cost and reference:
        tiles.append(Tile(cost, f"the FLOPs of a single network; the ensemble needs {reference}", kind))
    if found.control:
        text = f"recovered by the {found.control}: one member trained further on labels for as many epochs"
        tiles.append(Tile(gain(content, found.control), text, "control"))
    return tiles


def _remarks(content: Content) -> list[str]:
    found, remarks = content.headline, []
    ensemble = content.differences.get("ensemble", {}).get(content.criterion)
    seeds, has_accuracy = len(content.summary["seeds"]), "accuracy" in content.rows[ONE]["scores"]
    if ensemble is not None:
        shown, interval = format_difference(ensemble, 1, 4)
        remarks.append(f"Ensemble minus {ONE}: {shown} {content.unit} {interval}.")
    if found is None:
        return remarks
    if "member" in content.rows[found.label]:
        remarks.append(f"{found.label} has the weights of member {content.rows[found.label]['member'][0]}, unchanged.")
    if found.to_control is not None:
        shown, interval = format_difference(found.to_control, 1, 4)
        verdict = ": the control is better" if found.to_control.lower > 0 else ", which is within noise"
        verdict = "" if found.to_control.upper < 0 else verdict
        remarks.append(f"{found.label} minus {found.control}: {shown} {content.unit} {interval}{verdict}.")
    elif found.members == 1:
        remarks.append("It has no control, because the method does not train.")
    if found.accuracy_gain is not None:
        remarks.append(f"It recovers {format_percent(found.accuracy_gain)} of the ensemble's gain in accuracy.")
    elif ensemble is not None and has_accuracy:
        remarks.append("The ensemble's gain in accuracy is within noise, so no recovered fraction is given for it.")
    if found.candidates > 1:
        remarks.append(f"It was selected from {found.candidates} models by {content.loss} on validation data.")
    one = "One seed: the variation over training runs is unknown."
    remarks.append(one if seeds == 1 else f"{seeds} seeds, mean ± standard deviation.")
    return remarks
