"""The explanation of a compression: what to ship and why, in a few plain sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from enfold.evaluate import LARGEST_GAIN

if TYPE_CHECKING:
    from enfold.compress.result import Compression, Trial

NEARLY = 0.9  # part of the gain of the recommended ensemble at which a single network is mentioned


def explain(result: Compression) -> str:
    """Return the recommendation and its reasons.

    Args:
        result: The compression.
    """
    parts = (_training(result), _choice(result), _controls(result), _cheaper(result), _merging(result), _rest(result))
    return " ".join(sentence for part in parts for sentence in part)


def shown_gain(gain: float) -> str:
    """Return the gain in percent; networks far from members and ensemble have no meaningful number."""
    if not math.isfinite(gain):
        return "-"
    if gain > LARGEST_GAIN:
        return f"> {100 * LARGEST_GAIN:.0f} %"
    return "< -100 %" if gain < -1 else f"{round(100 * gain)} %"


def _training(result: Compression) -> Iterator[str]:
    if result.trained_longer:
        yield f"The members were trained {result.trained_longer} epochs longer first."
    if result.needs_training:
        remedy = "" if result.trained_longer else " (train_longer=True)"
        yield f"Train the members longer first{remedy}: it helps a member more than the ensemble does."


def _choice(result: Compression) -> Iterator[str]:
    name, chosen = result.diagnosis.criterion, result.chosen
    text = f"Ship `{chosen.name}` ({name.upper()} {chosen.scores[name]:.4f}"
    has_gain = math.isfinite(chosen.gain) and result.diagnosis.has_gain
    text += f", {shown_gain(chosen.gain)} of the ensemble's gain{_calibrated(chosen)}" if has_gain else ""
    yield f"{text}, {chosen.cost:.2f}x cost)."
    if not result.diagnosis.has_gain:
        low, high = result.diagnosis.gain
        yield (
            f"The ensemble itself gains nothing over its mean member beyond noise ({low:.4f} to {high:.4f}), so that "
            "there is little to compress."
        )


def _controls(result: Compression) -> Iterator[str]:
    chosen, control = result.chosen, result.control
    if chosen.kind == "control":
        yield f"No route from the ensemble is better than {_without_ensemble(chosen)}."
    elif control is not None and result.diagnosis.has_gain:
        text = _without_ensemble(control)
        yield f"{text[0].upper()}{text[1:]} gives {shown_gain(control.gain)}{_calibrated(control)}."
    if chosen.name.startswith("best member"):
        yield "No route is better than the best member as it is."


def _calibrated(trial: Trial) -> str:
    if not math.isfinite(trial.calibrated_gain):
        return ""
    return f" and {shown_gain(trial.calibrated_gain)} of that at a fitted temperature"


def _without_ensemble(control: Trial) -> str:
    if control.name.startswith("refit"):
        return "refitting one network on all data"
    return "training one member longer"


def _cheaper(result: Compression) -> Iterator[str]:
    """Name the best network of one pass if several passes are recommended."""
    chosen, name = result.chosen, result.diagnosis.criterion
    cheaper = [each for each in result.trials if each.is_candidate and each.cost < 0.9 * chosen.cost]
    best = min(cheaper, key=lambda each: each.scores[name], default=None)
    if chosen.cost > 1.1 and best is not None and best.gain > NEARLY * chosen.gain:
        yield f"`{best.name}` recovers {shown_gain(best.gain)} at {best.cost:.2f}x cost."


def _merging(result: Compression) -> Iterator[str]:
    basin = result.diagnosis.basin
    if result.is_mixed:
        yield "Members have different architectures, so that only distillation applies."
    elif basin is None:
        return
    elif not basin.is_one_basin:
        yield f"Averaging weights does not apply: members lie in different basins (barrier {basin.largest:.2f})."
    elif result.chosen.kind == "merge":
        yield f"Members lie in one basin (barrier {basin.largest:.2f}), so that their weights can be averaged."


def _rest(result: Compression) -> Iterator[str]:
    if result.left_out:
        yield f"Not tried for lack of time: {', '.join(result.left_out)}."
    stopped = [trial.name for trial in result.trials if trial.note.startswith("stopped")]
    if stopped:
        yield f"Stopped by the time limit: {', '.join(dict.fromkeys(stopped))}."
    if result.resumed:
        trainings = "1 training was" if result.resumed == 1 else f"{result.resumed} trainings were"
        yield f"{trainings} taken from an earlier search."
