"""Run: recipes, run directories and their stages."""

from enfold.run.directory import RunDirectory
from enfold.run.execute import add_method, drop_method, execute, open_run
from enfold.run.recipe import FoldSpec, Recipe, parse_recipe, read_recipe

__all__ = [
    "FoldSpec",
    "Recipe",
    "RunDirectory",
    "add_method",
    "drop_method",
    "execute",
    "open_run",
    "parse_recipe",
    "read_recipe",
]
