"""Runs: recipes, run directories and their stages."""

from enfold.run.directory import RunDirectory
from enfold.run.execute import add_step, drop_step, execute, open_run
from enfold.run.recipe import Recipe, parse_recipe, read_recipe
from enfold.run.specs import StepSpec

__all__ = [
    "Recipe",
    "RunDirectory",
    "StepSpec",
    "add_step",
    "drop_step",
    "execute",
    "open_run",
    "parse_recipe",
    "read_recipe",
]
