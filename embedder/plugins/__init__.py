"""Plug-ins: commands, trackers, kinds of models, deploy targets. The core imports none of them."""
