"""Parts of `bench_large_index.py`: vectors made block by block, limits of memory, and what is measured within them."""
