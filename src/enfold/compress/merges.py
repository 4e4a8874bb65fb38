"""Merges that `compress` tries: routes without training, or with a short one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from enfold.compress.routes import Route, Setting
from enfold.data import Data
from enfold.merge.average import average
from enfold.merge.dare import dare
from enfold.merge.fisher import fisher
from enfold.merge.lora import lora
from enfold.merge.merge_many import merge_many
from enfold.merge.model_stock import model_stock
from enfold.merge.perm_avg import perm_avg
from enfold.merge.regmean import regmean
from enfold.merge.slerp import slerp
from enfold.merge.soup import soup
from enfold.merge.task_arithmetic import task_arithmetic
from enfold.merge.ties import ties
from enfold.merge.weight_matching import weight_matching
from enfold.merge.wise_ft import wise_ft

PERMUTATION_EPOCHS = 5  # in which permAVG learns the permutations


def find_merges(setting: Setting, *, expensive: bool = False) -> Iterator[Route]:
    """Yield the merges that can reach the members' quality, within one basin or between several.

    Args:
        setting: The members and the data.
        expensive: Whether to include those that train.
    """
    if not setting.members.is_expandable or setting.students:
        return
    if any("lora_A" in name for name in setting.members.skeleton.parameters):
        # Averages of A and of B apart have another product than the average of the members' changes.
        yield _merge("lora", "the mean of the products of low-rank factors", lora, setting)
        return
    if setting.base is not None:
        yield from _merges_with_base(setting)
    if setting.diagnosis.is_one_basin:
        yield from _merges_in_one_basin(setting)
        return
    yield _merge("weight matching", "units matched by weights, averaged", weight_matching, setting)
    repaired = {"repair": "repair"}
    yield _merge("weight matching + repair", "and statistics repaired", weight_matching, setting, **repaired)
    if setting.members.num_members > 2:
        yield _merge(
            "merge many + repair", "members matched to the mean of the others", merge_many, setting, **repaired
        )
    if expensive:
        yield _merge(
            "permAVG",
            "units matched by learned permutations, averaged",
            perm_avg,
            setting,
            matched=1.0,
            task=setting.task,
            epochs=PERMUTATION_EPOCHS,
            quiet=True,
        )


def _merges_in_one_basin(setting: Setting) -> Iterator[Route]:
    data, task = setting.data, setting.task
    yield _merge("average", "the mean of the members' weights", average, setting)
    if task.is_categorical:
        score: Any = setting.diagnosis.criterion
        yield _merge("greedy soup", "members that help, averaged", soup, setting, data, score=score)
        yield _merge("learned soup", "learned weights of the members", soup, setting, data, kind="learned")
    yield _merge("fisher", "a mean weighted by the Fisher information", fisher, setting, task=task)
    yield _merge("regmean", "layers that fit the members' activations", regmean, setting)
    yield _merge("spherical mean", "the mean on a sphere (Karcher mean)", slerp, setting)


def _merges_with_base(setting: Setting) -> Iterator[Route]:
    """Yield the merges of members that were fine-tuned from one network."""
    base = setting.base
    yield _merge("wise-ft", "a line from the base to the mean", wise_ft, setting, setting.data, base=base)
    yield _merge("model stock", "layers between base and mean", model_stock, setting, base=base)
    yield _merge("task arithmetic", "the sum of the changes", task_arithmetic, setting, base=base)
    yield _merge("ties", "changes of one sign", ties, setting, base=base)
    yield _merge("dare", "the mean of changes with dropped entries", dare, setting, base=base)


def _merge(
    name: str, idea: str, function: Callable[..., nn.Module], setting: Setting, *validation: Data, **options: Any
) -> Route:
    make = partial(function, setting.members, setting.data, *validation, **options)
    return Route(name, idea, "merge", make=make)
