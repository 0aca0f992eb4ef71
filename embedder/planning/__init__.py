"""Planning of a run: costs on this machine, and the plan for a model and devices."""
