"""Comparison of the shards with the unsplit towers, and of dtypes with float32."""
