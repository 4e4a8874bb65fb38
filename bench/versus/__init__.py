"""enfold beside its neighbours: the same work, measured in one run. `make versus` makes the environment and runs all.

- `rows`: what is measured; each row is a table of functions that do the same work.
- `neighbours`: the ensembles of other packages, made as their documentation makes them.
- `measure`: one row in a fresh process; `__main__`: all rows, results/versus.json; `page`: docs/versus.md.
"""
