"""Vector index: choose, build, update, check and search a FAISS index. Input is Arrow and NumPy; no torch, Ray, Delta.

build.build_index    vectors, ids and queries -> a version folder, atomically
update.update_index  a version folder and what changed -> the next one, or RebuildNeededError
gate.check_gate      whether a version may be published after the previous one
search.open_index    a version folder -> Index, its files checked before FAISS reads them
versions             the numbered folders of a store

Steps of a build: `vectors` collects the table on disk, `queries` holds some out for measuring, `choose` has
`design_trials` measure `designs` on samples within the `constraints`, `faiss_build` fills the chosen one, and
`autotune` finds its search parameters. `disk_build` makes designs in parts, with codes of vectors weighted by
`query_weights`, even if memory does not hold the vectors; `disk_index` searches them, and `disk_files` opens them.
`build`, `update` and `search` import FAISS; the modules of ids, manifests and versions do not.
"""
