"""Distillation: train one network, or an efficient ensemble, to predict as an ensemble does."""
