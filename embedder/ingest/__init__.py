"""The main job of `embed` and `refresh`: comparison, run, guards, and publication."""
