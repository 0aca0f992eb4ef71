"""Training of a twin tower: settings, batches, losses, augmentation, the step, checkpoints, deltas, metrics.

`Trainer.step` takes any batch of tensors; no Ray, no media, no tables. `shards.training.settings` and
`shards.training.metrics` need no torch. Nothing heavy is imported here.
"""
