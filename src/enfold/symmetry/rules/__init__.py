"""Rules: how each operation of PyTorch labels the axes of what it returns. Importing this package registers them."""

from enfold.symmetry.rules import contraction, elementwise, indexing, layout, square_matrices

__all__ = ["contraction", "elementwise", "indexing", "layout", "square_matrices"]
