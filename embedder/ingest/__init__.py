"""The main job of `embed` and `refresh`: what is new, the run, the guards, and the publication."""
