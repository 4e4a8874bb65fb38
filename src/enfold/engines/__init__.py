"""Engines: how M networks of one architecture run: one after the other, stacked, or by vmap."""
