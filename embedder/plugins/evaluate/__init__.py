"""Evaluation of a store: recall of its images by texts, exact and through the index; speed and memory."""
