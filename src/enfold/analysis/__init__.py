"""Analyses of weights and predictions: arrays in, arrays out. Figures of them are in `enfold.report`."""

from importlib import import_module
from typing import Any

_MODULES = {
    "alignment": (
        "average_scores",
        "learned_alignment",
        "matrix_statistics",
        "row_statistics",
        "temperature_sweep",
    ),
    "corruptions": (
        "corrupted_scores",
        "corruption_error",
    ),
    "diversity_plane": (
        "disagreement_with",
        "diversity_points",
        "limits",
    ),
    "interpolation": (
        "barrier",
        "interpolation",
    ),
    "ood": ("outside_scores",),
    "paths": (
        "along",
        "bezier",
        "matched",
        "straight",
        "tunnel",
    ),
    "planted_permutations": ("planted_recovery",),
    "size_curves": (
        "curves_by_severity",
        "size_curve",
        "within_and_over",
    ),
    "states": (
        "each",
        "mixture",
        "predictions",
        "state_of",
    ),
    "trajectory": (
        "cosine_matrix",
        "function_map",
        "similarity",
        "visited",
    ),
    "weight_planes": (
        "plane_map",
        "radial",
        "through",
    ),
}
__all__ = [name for names in _MODULES.values() for name in names if name not in _MODULES]


def __getattr__(name: str) -> Any:
    """Import a public function from its module on first use."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
