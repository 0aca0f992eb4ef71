"""The report of a run: its schema, and the plan it ran by compared with what happened."""
