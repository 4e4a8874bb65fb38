"""Rules of PyTorch operations: how each labels the axes of its results. Importing this package registers them."""

from enfold.symmetry.rules import contraction, elementwise, indexing, layout, square_matrices

__all__ = ["contraction", "elementwise", "indexing", "layout", "square_matrices"]
