"""Analyses of weights and predictions: arrays in, arrays out. Figures of them are in `enfold.report`."""

from importlib import import_module
from typing import Any

_MODULES = {
    "alignment": (
        "score_average",
        "train_alignment",
        "compute_matrix_statistics",
        "compute_row_statistics",
        "sweep_temperatures",
    ),
    "corruptions": (
        "score_corruptions",
        "compute_mce",
    ),
    "diversity_plane": (
        "compute_disagreement",
        "compute_diversity",
        "compute_limits",
    ),
    "interpolation": (
        "compute_barriers",
        "interpolate",
    ),
    "ood": ("score_ood",),
    "paths": (
        "score_path",
        "train_bezier",
        "match_to",
        "make_line",
        "train_tunnel",
    ),
    "planted_permutations": ("recover_planted",),
    "size_curves": (
        "compute_curves_by_severity",
        "compute_size_curve",
        "compare_samples_and_modes",
    ),
    "states": (
        "unstack_states",
        "mix_states",
        "predict_states",
        "copy_state",
    ),
    "trajectory": (
        "compute_cosines",
        "map_predictions",
        "compute_similarity",
        "load_trajectory",
    ),
    "weight_planes": (
        "map_plane",
        "make_radial_plane",
        "make_plane",
    ),
}
__all__ = [name for names in _MODULES.values() for name in names if name not in _MODULES]


def __getattr__(name: str) -> Any:
    """Import a public function from its module on first use."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
