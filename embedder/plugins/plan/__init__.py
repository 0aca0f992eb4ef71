"""Plan of a model's cut and of its stages' devices, for this machine, named devices or a cluster."""
