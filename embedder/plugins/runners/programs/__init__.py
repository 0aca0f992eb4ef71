"""Programs of the kinds; run by their paths, so they import pyarrow, NumPy and their framework, and one another."""
