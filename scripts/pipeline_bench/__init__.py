"""The parts of `scripts/bench_pipeline.py`."""
