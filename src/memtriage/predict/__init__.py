"""Predicts the peak memory of a training step without a GPU."""
