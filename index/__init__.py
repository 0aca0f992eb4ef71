"""Retrieval: choose, build, update, judge and search a FAISS index. Arrow and NumPy in; no torch, no Ray, no Delta.

    build.build_index    vectors, ids and queries -> a version folder, whole or not at all
    update.update_index  a version folder and what changed -> the next one, or RebuildNeededError
    gate.check_gate      whether a version may go live after the last
    search.open_index    a version folder -> Index, its files checked before FAISS reads them
    versions             the numbered folders of a store

How a build goes: `vectors` collects the table on disk, `queries` sets some aside to measure with, `choose` measures
`designs` on a sample within the `constraints`, `engine` fills the chosen one, `measuring` finds the effort it needs.
FAISS itself is imported when the first index is built or opened, not before.
"""
