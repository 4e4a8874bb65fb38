"""Out-of-distribution sets of a recipe: another source, excluded classes, or noise."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from enfold.analysis.ood import INSIDE
from enfold.data import Data, Split
from enfold.data import load as load_data
from enfold.data.dataset import Part, length
from enfold.data.ood import Noise, Outside, noise, of_classes, outside
from enfold.errors import EnfoldError
from enfold.run.specs import Count, Whole


class OodSpec(BaseModel):
    """One out-of-distribution set: `source`, `noise` or `classes`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = None  # its test split
    noise: Noise | None = None
    classes: tuple[Whole, ...] | None = None  # of data.exclude_classes, numbered as in the source
    examples: Count | None = None  # all by default; for noise the number of test examples
    size: Count | None = None  # images of a folder are resized to it
    seed: Whole = 0  # of the noise
    label: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> OodSpec:
        given = [name for name in ("source", "noise", "classes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "an out-of-distribution set must have one of source, noise and classes, got "
                f"{', '.join(given) or 'none'}: "
                "give one of them per set"
            )
        if self.source == "noise":
            raise ValueError("noise must have a kind, got 'noise': write  - noise: gaussian  or  - noise: uniform")
        if self.name == INSIDE:
            raise ValueError(f"'{INSIDE}' is the name of the test split: choose another label")
        return self

    @property
    def name(self) -> str:
        """The name of its rows and files."""
        if self.label:
            return self.label
        if self.noise is not None:
            return f"{self.noise} noise"
        return self.source or "classes " + ", ".join(map(str, self.classes or ()))


def check_sets(sets: tuple[OodSpec, ...], source: str, excluded: tuple[int, ...]) -> None:
    """Raise a ValueError for duplicate names, the source of the data, and classes of the training data."""
    names = [each.name for each in sets]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"every out-of-distribution set must have its own name, got '{twice[0]}' twice: add label: ..."
        )
    for each in sets:
        if each.source == source:
            raise ValueError(f"an out-of-distribution set must be another source than the data's own, got '{source}'")
        trained = [number for number in each.classes or () if number not in excluded]
        if trained or each.classes == ():
            raise ValueError(
                "out-of-distribution classes must be among those of data.exclude_classes, "
                f"got {trained[0] if trained else 'none'}: add it there, so that it is not trained on"
            )


def make_set(spec: OodSpec, data: Data, everything: Part) -> Outside:
    """Return the set in the form that the network takes; `everything` is the test split with all classes."""
    if spec.noise is not None:
        made = noise(spec.noise, data, spec.examples or length(data.test) or 1, spec.seed)
        return Outside(made.inputs, made.labels, spec.name, made.adapted)
    part = everything if spec.source is None else load_data(spec.source, size=spec.size).test
    if not isinstance(part, Split):
        raise EnfoldError(
            f"an out-of-distribution set must be in memory, got {type(part).__name__} for '{spec.name}': "
            "return a Split there"
        )
    if spec.classes is not None:
        part = of_classes(part, spec.classes)
    return outside(part, data, spec.name, spec.examples)
