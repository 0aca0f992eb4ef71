"""Training of a twin tower: settings, batches, losses, augmentation, the step, checkpoints, deltas, metrics.

The step takes any iterator of batches; no Ray, no media, no tables. `shards.training.settings` and
`shards.training.metrics` need no torch. Nothing heavy is imported here.
"""
