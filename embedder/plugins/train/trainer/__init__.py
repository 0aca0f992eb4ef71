"""Training of a twin tower: settings, batches, losses, augmentation, the step, checkpoints, deltas, metrics.

`Trainer.step` takes any batch of tensors: no Ray, media or tables here. `.train_settings` and
`embedder.retrieval.rank_metrics` need no torch. This module imports nothing heavy.
"""
