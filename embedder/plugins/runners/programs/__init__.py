"""Programs of the kinds, run by path; they import only pyarrow, NumPy, their framework, and one another."""
