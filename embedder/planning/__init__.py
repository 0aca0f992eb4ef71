"""Planning a run: costs of this machine, options of the command, and how a plan is shown."""
