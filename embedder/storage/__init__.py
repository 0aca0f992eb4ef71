"""Access to bytes, below everything that lists or stores: clients of buckets, ranged reads, atomic writes, names."""
