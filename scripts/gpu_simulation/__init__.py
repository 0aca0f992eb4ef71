"""A simulated GPU: what a stage would take of a device that is not there."""
