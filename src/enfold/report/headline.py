"""The headline of a run: one network, how much of the ensemble's gain it keeps, at what cost, beside its control."""

from __future__ import annotations

from dataclasses import dataclass

from enfold.report.content import ONE, Content
from enfold.report.sections import gain, percent, ratio, signed


@dataclass(frozen=True)
class Tile:
    """A figure and what it is."""

    figure: str
    words: str
    kind: str


@dataclass(frozen=True)
class Words:
    """What a reader shall take away."""

    sentence: str
    tiles: tuple[Tile, ...]
    remarks: tuple[str, ...]


def headline(content: Content) -> Words:
    """From stored results; while there are none, it says so."""
    if not content.rows:
        return Words(
            "Nothing is evaluated yet: members, folds and their scores appear here as they are finished.", (), ()
        )
    return Words(_sentence(content), tuple(_tiles(content)), tuple(_remarks(content)))


def _sentence(content: Content) -> str:
    found = content.headline
    members = content.summary["recipe"]["members"]
    if found is None:
        shift = content.differences.get("ensemble", {}).get("nll")
        words = "" if shift is None else f" NLL changes by {' '.join(signed(shift, 1, 4))} nats."
        members_alone = [label for label, row in content.rows.items() if "member" in row]
        own = f"the weights of {', '.join(members_alone)} are a member's own"
        folded = own if members_alone else "nothing is folded yet"
        return f"An ensemble of {members} beside its mean member; {folded}.{words}"
    what = "One network" if found.members == 1 else f"{found.members} members in one model"
    if content.rows[found.label].get("gain_recovered") is None:
        return f"{what}, {found.label}: the ensemble of {members} has no gain over its mean member that could be kept."
    cost = ratio(content, found.label)
    price = "" if cost is None else f" at {cost} the operations of one network"
    kept = gain(content, found.label)
    beside = f"; its control keeps {gain(content, found.control)}" if found.control else ""
    return f"{what}, {found.label}, keeps {kept} of the gain of a {members}-member ensemble{price}{beside}."


def _tiles(content: Content) -> list[Tile]:
    found = content.headline
    if found is None or content.rows[found.label].get("gain_recovered") is None:
        return []
    kind = "fold" if found.members == 1 else "share"
    tiles = [Tile(gain(content, found.label), f"of the ensemble's gain in NLL is kept by {found.label}", kind)]
    cost, dear = ratio(content, found.label), ratio(content, "ensemble")
    if cost and dear:
        tiles.append(Tile(cost, f"the operations of one network; the ensemble takes {dear}", kind))
    if found.control:
        words = f"is kept by the {found.control}: one member, trained as long"
        tiles.append(Tile(gain(content, found.control), words, "control"))
    return tiles


def _remarks(content: Content) -> list[str]:
    found, remarks = content.headline, []
    ensemble, seeds = content.differences.get("ensemble", {}).get("nll"), len(content.summary["seeds"])
    if ensemble is not None:
        shown, interval = signed(ensemble, 1, 4)
        remarks.append(f"Ensemble minus {ONE}: {shown} nats of NLL {interval}.")
    if found is None:
        return remarks
    if "member" in content.rows[found.label]:
        remarks.append(f"{found.label} has the weights of member {content.rows[found.label]['member'][0]}, unchanged.")
    if found.to_control is not None:
        shown, interval = signed(found.to_control, 1, 4)
        verdict = ": the control is better" if found.to_control.lower > 0 else ", which is within noise"
        verdict = "" if found.to_control.upper < 0 else verdict
        remarks.append(f"{found.label} minus {found.control}: {shown} nats of NLL {interval}{verdict}.")
    elif found.members == 1:
        remarks.append("No control was trained for it, as it needs no training of its own.")
    if found.accuracy_gain is not None:
        remarks.append(f"Of the ensemble's gain in accuracy it keeps {percent(found.accuracy_gain)}.")
    elif ensemble is not None:
        remarks.append("The ensemble's own gain in accuracy is within noise, so none is given for it.")
    if found.candidates > 1:
        remarks.append(f"It was chosen from {found.candidates} by its NLL on validation data.")
    remarks.append("One seed: the spread over trainings is not known." if seeds == 1 else f"{seeds} seeds, mean ± std.")
    return remarks
