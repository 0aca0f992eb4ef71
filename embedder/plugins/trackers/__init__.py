"""Clients of trackers of experiments: MLflow and Weights & Biases."""
