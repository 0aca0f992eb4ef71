"""Training of a twin tower: settings, batches, losses, augmentation, the step, checkpoints, deltas, metrics.

`Trainer.step` takes any batch of tensors; no Ray, no media, no tables. `embedder.plugins.train.trainer.settings` and
`embedder.retrieval.rank_metrics` need no torch. Nothing heavy is imported here.
"""
