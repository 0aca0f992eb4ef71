"""How a store and a run grow with the number of items: their parts, for `measure_growth.py`."""
