"""Figures of a run in two steps: a state of each batch where its rows are, and their sum once the run has ended.

States are plain JSON. `merge` is associative and commutative to the last bit: counts are integers, sums are exact, and
what is rounded is rounded by row, before anything is added. So how rows are cut into parts changes no figure.
"""
