"""Retrieval: choose, build and search a FAISS index. Arrow and NumPy in; no torch, no Ray, no Delta.

    build.build_index    vectors and ids -> a version folder, whole or not at all
    search.open_index    a version folder -> Index, its files checked before FAISS reads them
    versions             the numbered folders of a store

FAISS itself is imported when the first index is built or opened, not before.
"""
