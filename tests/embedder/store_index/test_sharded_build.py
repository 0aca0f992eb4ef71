"""An index filled by tasks on Ray is the one filled here."""

from contextlib import contextmanager

import numpy as np
import pytest
from index_stores import DIM, indexed_run, item, vector_of
from store_samples import INFO
from store_states import new_store

from embedder.store.layout import read_current
from embedder.store_index import build_or_update as index_builder
from embedder.store_index.build_or_update import IndexJob, build_anew
from embedder.store_index.index_versions import version_folder
from embedder.store_index.indexed_rows import IndexRows
from embedder.store_index.keep_index import DEFAULT_INDEX_CONFIG
from embedder.store_index.sharded_build import ROWS_PER_PART, ClusterFiller, ClusterGroup, cluster_filler, plan_groups
from index import faiss_build
from index.designs import parse_design
from index.search import open_index
from index.vectors import VectorTable


def test_neighbouring_files_become_one_part_up_to_a_size():
    sizes = [("a", 5), ("b", 5), ("c", 1), ("d", 30), ("e", 0), ("f", 10)]
    assert plan_groups(sizes, 10) == [
        ClusterGroup(("a", "b"), 10),
        ClusterGroup(("c",), 1),
        ClusterGroup(("d",), 30),
        ClusterGroup(("e", "f"), 10),
    ]
    assert plan_groups([], 10) == []


@pytest.mark.medium
def test_parts_made_by_tasks_are_merged_into_the_index_of_one_go(ray_cluster, tmp_path, monkeypatch, said):
    files = new_store(tmp_path / "store")
    for start in range(0, 400, 50):
        texts = [item(1000 + start, image_embedding=None, modality="text")]
        indexed_run(files, *texts, *(item(number) for number in range(start, start + 50)))
    rows = IndexRows(files, read_current(files).embeddings)
    vectors = np.concatenate(list(rows.vectors()))
    table, design = VectorTable(len(vectors), DIM, vectors), parse_design("IVF8,SQ8,Refine(SQfp16)")
    with faiss_build.threads(1):
        whole = faiss_build.build(design, table)
        faiss_build.write(whole, tmp_path / "whole")
        monkeypatch.setattr("embedder.store_index.sharded_build.ROWS_PER_PART", 100)
        filler = ClusterFiller(files, rows, 2)
        faiss_build.write(filler(design, table, None), tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()
    assert len(said) >= 4 and said[-1].startswith("index: 400 of 400 vectors in parts")

    @contextmanager
    def running(address, *arguments):
        yield filler

    monkeypatch.setattr(index_builder, "cluster_filler", running)
    job = IndexJob(files, rows.version, INFO, None, DEFAULT_INDEX_CONFIG, "a cluster")
    number, manifest = build_anew(job, "IVF8,Flat")
    assert (manifest.design, manifest.num_vectors) == ("IVF8,Flat", 400)
    index = open_index(version_folder(files, number))
    ids = index.ids["item_id"].to_pylist()
    found = index.search(np.stack([vector_of(each) for each in ids]), 1, parameters={"nprobe": 8})
    assert found.rows[:, 0].tolist() == list(range(400))


def test_a_graph_is_built_here_and_a_small_store_asks_no_cluster(tmp_path, said):
    files = new_store(tmp_path / "store")
    indexed_run(files, *(item(number) for number in range(50)))
    rows = IndexRows(files, read_current(files).embeddings)
    assert rows.ids.num_rows < ROWS_PER_PART
    with cluster_filler("nowhere:1", files, rows) as fill:
        assert fill is None
    vectors = np.concatenate(list(rows.vectors()))
    index = ClusterFiller(files, rows, 2)(parse_design("HNSW8,Flat"), VectorTable(50, DIM, vectors), None)
    assert (index.ntotal, [line for line in said if "parts" in line]) == (50, [])
