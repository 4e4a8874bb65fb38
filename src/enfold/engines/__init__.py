"""Engines: how the M networks of an ensemble run.

- `base`: the protocol of engines, and `Loop`; `stacked` with `tracing`, and `vmap`; `choose`: the choice of one.
- `skeleton`: a network without values, into which the values of a member are put; `copying`: deep copies of networks.
- `verify`: the comparison of members with their own networks, with examples from `examples`.
- `inference`, `factored`, `joint`, `trunk`: faster forms for convolutional inference, BatchEnsemble, joint batch norm
  and common trunks; each file states what it saves.
- `parameters`, `layout`, `inputs`, `outputs`, `modes`, `initialization`, `pool`: helpers.
"""
