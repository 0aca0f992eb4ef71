"""Clients of experiment trackers: MLflow and Weights & Biases."""
