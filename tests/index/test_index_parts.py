"""An index made in parts and merged on disk is, byte for byte, the one made in one go."""

import faiss
import numpy as np
import pytest
from index_samples import make_vectors

from index import faiss_build, faiss_merge
from index.designs import parse_design
from index.list_reach import Projection
from index.vectors import VectorTable

DIM = 32
MERGED = (
    "IVF16,Flat",
    "IVF16,SQ8",
    "IVF16,PQ4x4,Refine(SQfp16)",
    "OPQ4,IVF16,PQ4x4,RFlat",
    "IVF16,RaBitQ,Refine(SQ8)",
    "LeanVec8,IVF16,Flat,Refine(SQfp16)",
)
PROJECTION = np.ascontiguousarray(np.linalg.qr(make_vectors(DIM, DIM))[0][:8], np.float32)
ROWS = np.split(np.arange(3000), [700, 701, 2000, 2000])
"""Parts of unlike sizes, one of a single row and one of none."""


@pytest.fixture(scope="module")
def table():
    return VectorTable(3000, DIM, make_vectors(3000, DIM))


def in_parts(template, table, folder):
    path, out = folder / "template.faiss", folder / "merged.faiss"
    faiss.write_index(template, str(path))
    parts = []
    for number, rows in enumerate(ROWS):
        parts.append(folder / f"{number}.faiss")
        assert faiss_merge.build_part(path, [table.take(some) for some in np.array_split(rows, 2)], parts[-1]) == len(
            rows
        )
    assert faiss_merge.merge_parts(path, parts, out) == table.num_vectors
    return out


@pytest.mark.medium
@pytest.mark.parametrize("design", MERGED)
def test_parts_merged_are_the_file_of_one_go(design, table, tmp_path):
    with faiss_build.threads(1):
        template = faiss_build.train(
            parse_design(design), table, Projection(PROJECTION) if "LeanVec" in design else None
        )
        assert faiss_merge.can_be_merged(template)
        merged = in_parts(template, table, tmp_path)
        faiss_build.add(template, table.blocks())
        faiss_build.write(template, tmp_path / "whole.faiss")
    if "LeanVec" not in design:  # BLAS projects blocks of another size with other roundings, 6e-8 apart
        assert merged.read_bytes() == (tmp_path / "whole.faiss").read_bytes()
    mapped, whole = faiss_build.map_file(merged), faiss_build.map_file(tmp_path / "whole.faiss")
    queries = make_vectors(20, DIM, seed=1)
    (scores, rows), (whole_scores, whole_rows) = mapped.search(queries, 10), whole.search(queries, 10)
    assert np.array_equal(rows, whole_rows)
    assert np.allclose(scores, whole_scores, atol=1e-6)


def test_few_filled_lists_are_written_as_such(tmp_path):
    near = np.repeat(make_vectors(2, DIM), 50, axis=0)
    table = VectorTable(100, DIM, near)
    template = faiss_build.train(parse_design("IVF16,Flat"), VectorTable(3000, DIM, make_vectors(3000, DIM)))
    path = tmp_path / "template.faiss"
    faiss.write_index(template, str(path))
    for number in range(2):
        faiss_merge.build_part(path, [near[number * 50 : number * 50 + 50]], tmp_path / str(number))
    faiss_merge.merge_parts(path, [tmp_path / "0", tmp_path / "1"], tmp_path / "merged")
    faiss_build.add(template, table.blocks())
    faiss_build.write(template, tmp_path / "whole")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("design", ["Flat", "HNSW8,Flat", "IVF16,PQ4x4fs,Refine(SQfp16)"])
def test_what_has_no_plain_lists_is_not_offered(design, table):
    assert not faiss_merge.can_be_merged(faiss_build.train(parse_design(design), table))
