"""Merges of members that were fine-tuned from one network."""
