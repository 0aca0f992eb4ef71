"""Rows of a Ray dataset as items, block by block."""

import pyarrow as pa
import pytest

from embedder.executors.dataset_rows import DatasetColumns, list_block

COLUMNS = DatasetColumns(None, "image", None, None, (), "", "/data")


@pytest.mark.parametrize(
    ("address", "item_id"),
    [
        ("https://b.example/a.jpg?X-Amz-Date={0}&X-Amz-Signature={0}", "https://b.example/a.jpg"),
        ("https://b.example/a.jpg?size=9&token={0}", "https://b.example/a.jpg?size=9&token=***"),
        ("https://b.example/a.jpg?page=1", "https://b.example/a.jpg?page=1"),
        ("a?token=1.jpg", "/data/a?token=1.jpg"),
    ],
    ids=range(4),
)
def test_an_id_that_is_an_address_is_that_of_a_table_and_has_no_secrets(address, item_id):
    signed = [address.format(secret) for secret in ("5ecret1", "5ecret2")]
    listed = list_block(pa.table({"image": signed}), COLUMNS)
    assert listed["item_id"].to_pylist() == [item_id] * 2, "signed again, it is the same item"
    assert listed["uri"].to_pylist() == [each if "://" in each else f"/data/{each}" for each in signed]
