"""The recipe's sets from outside: another source, held-out classes, or noise."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from enfold.analysis.ood import INSIDE
from enfold.data import Data, Split
from enfold.data import load as load_data
from enfold.data.dataset import Part, length
from enfold.data.ood import Noise, Outside, noise, of_classes, outside
from enfold.errors import EnfoldError


class OodSpec(BaseModel):
    """One set: `source`, `noise` or `classes`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str | None = None  # its test part
    noise: Noise | None = None
    classes: tuple[int, ...] | None = None  # of those that data.exclude_classes leaves out, numbered as in the source
    examples: int | None = Field(
        default=None, ge=1
    )  # so many of them; all, and of noise as many as tested, if left out
    size: int | None = None  # images of a folder are resized to it
    seed: int = 0  # of the noise
    label: str = ""

    @model_validator(mode="after")
    def _one_kind(self) -> OodSpec:
        given = [name for name in ("source", "noise", "classes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a set from outside must have one of source, noise and classes, got {', '.join(given) or 'none'}: "
                "give one, and a set of its own for each other"
            )
        if self.name == INSIDE:
            raise ValueError(f"'{INSIDE}' is the name of the test part: choose another label")
        return self

    @property
    def name(self) -> str:
        """Of its rows and files."""
        if self.label:
            return self.label
        if self.noise is not None:
            return f"{self.noise} noise"
        return self.source or "classes " + ", ".join(map(str, self.classes or ()))


def check_sets(sets: tuple[OodSpec, ...], source: str, excluded: tuple[int, ...]) -> None:
    """Refuse sets of one name, the data's own, and classes that it has learnt from; a ValueError for pydantic."""
    names = [each.name for each in sets]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"every set from outside must have its own name, got '{twice[0]}' twice: add label: ...")
    for each in sets:
        if each.source == source:
            raise ValueError(f"a set from outside must be another source than the data's own, got '{source}'")
        learnt = [number for number in each.classes or () if number not in excluded]
        if learnt or each.classes == ():
            raise ValueError(
                "classes from outside must be among those of data.exclude_classes, "
                f"got {learnt[0] if learnt else 'none'}: add it there, so that it is not learnt from"
            )


def made_set(spec: OodSpec, data: Data, everything: Part) -> Outside:
    """The set as the data's network is shown it; `everything` is the test part with all classes."""
    if spec.noise is not None:
        made = noise(spec.noise, data, spec.examples or length(data.test) or 1, spec.seed)
        return Outside(made.inputs, made.labels, spec.name, made.adapted)
    part = everything if spec.source is None else load_data(spec.source, size=spec.size).test
    if not isinstance(part, Split):
        raise EnfoldError(
            f"a set from outside must be in memory, got {type(part).__name__} for '{spec.name}': return a Split there"
        )
    if spec.classes is not None:
        part = of_classes(part, spec.classes)
    return outside(part, data, spec.name, spec.examples)
