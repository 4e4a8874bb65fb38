"""The rows of the study: ways from four members to one network, each a call of a public function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enfold.distill.losses.kd import KD
from enfold.distill.perturb.conf_ods import ConfODS
from enfold.distill.perturb.cutmix import CutMix
from enfold.distill.perturb.cutmix_mixup import CutMixMixup
from enfold.distill.perturb.gaussian import Gaussian
from enfold.distill.perturb.mixup import Mixup
from enfold.distill.perturbation import Perturbation


@dataclass(frozen=True)
class Row:
    """A training of one network.

    Args:
        perturb: The perturbation of inputs.
        labels: Weight of the labels; 1 for a control.
        start: "member", or "random" for new weights.
        length: Epochs as a multiple of the members'.
        targets: "fresh" for the teachers' predictions of what the student sees; "clean" for those of clean examples.
        unlabelled: Whether the images that the members were not trained on are seen as well, in as many steps.
        changes: Changes of the settings of training.
    """

    perturb: Perturbation | None = None
    labels: float = 0.0
    start: str = "member"
    length: float = 1.0
    targets: str = "fresh"
    unlabelled: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> KD:
        """The loss: KL at temperature 1, with a part of labels."""
        return KD(alpha=1 - self.labels)


ROWS: dict[str, Row] = {
    "control": Row(labels=1.0),
    "control + mixup": Row(labels=1.0, perturb=Mixup()),
    "control + cutmix": Row(labels=1.0, perturb=CutMix()),
    "distill": Row(),
    "mixup": Row(perturb=Mixup()),
    "mixup with a of 0.2": Row(perturb=Mixup(alpha=0.2)),
    "cutmix": Row(perturb=CutMix()),
    "noise 0.1": Row(perturb=Gaussian(step=25.5)),
    "noise 0.5": Row(perturb=Gaussian(step=127.5)),
    "labels": Row(labels=0.5),
    "cutmix + labels": Row(perturb=CutMix(), labels=0.5),
    "shifts": Row(changes={"augment": ("pad-crop", "flip")}),
    "shifts + cutmix": Row(perturb=CutMix(), changes={"augment": ("pad-crop", "flip")}),
    "mixup + labels": Row(perturb=Mixup(), labels=0.5),
    "ema": Row(changes={"ema": 0.995}),
    "scratch": Row(start="random"),
    "scratch + mixup": Row(start="random", perturb=Mixup()),
    "scratch + cutmix": Row(start="random", perturb=CutMix()),
    "scratch + cutmix 2x": Row(start="random", perturb=CutMix(), length=2),
    "clean targets": Row(targets="clean", changes={"augment": ()}),
    "ConfODS": Row(perturb=ConfODS()),
    "distill 2x": Row(length=2),
    "mixup 2x": Row(perturb=Mixup(), length=2),
    "cutmix 2x": Row(perturb=CutMix(), length=2),
    "cutmix 4x": Row(perturb=CutMix(), length=4),
    "cutmix 8x": Row(perturb=CutMix(), length=8),
    "cutmix + labels 2x": Row(perturb=CutMix(), labels=0.5, length=2),
    "mixup 4x": Row(perturb=Mixup(), length=4),
    "noise 2x": Row(perturb=Gaussian(step=25.5), length=2),
    "cutmix or mixup": Row(perturb=CutMixMixup()),
    "cutmix or mixup 2x": Row(perturb=CutMixMixup(), length=2),
    "cutmix or mixup 4x": Row(perturb=CutMixMixup(), length=4),
    "cutmix or mixup 8x": Row(perturb=CutMixMixup(), length=8),
    "unlabelled 4x": Row(perturb=CutMixMixup(), length=4, unlabelled=True),
    "unlabelled 8x": Row(perturb=CutMixMixup(), length=8, unlabelled=True),
    "control 2x": Row(labels=1.0, length=2),
    "control 4x": Row(labels=1.0, length=4),
    "control 8x": Row(labels=1.0, length=8),
    "control + cutmix or mixup 2x": Row(labels=1.0, perturb=CutMixMixup(), length=2),
    "control + cutmix or mixup 4x": Row(labels=1.0, perturb=CutMixMixup(), length=4),
    "control + cutmix or mixup 8x": Row(labels=1.0, perturb=CutMixMixup(), length=8),
}
