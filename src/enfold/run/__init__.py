"""Run: recipes, run directories and their stages."""

from enfold.run.directory import RunDirectory
from enfold.run.execute import add_method, drop_method, execute, open_run
from enfold.run.recipe import Recipe, parse_recipe, read_recipe
from enfold.run.specs import FoldSpec

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
