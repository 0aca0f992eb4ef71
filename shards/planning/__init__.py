"""Planning on paper: what a cut costs, and which is best. Pure; no torch. `shards.plan` is the public door."""
