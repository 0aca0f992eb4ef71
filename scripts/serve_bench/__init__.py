"""The parts of `scripts/bench_serve.py`."""
