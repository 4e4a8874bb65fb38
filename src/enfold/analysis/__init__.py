"""Analyses of weights and functions as arrays: similarity, paths, planes, alignment. Figures of them are in report."""
