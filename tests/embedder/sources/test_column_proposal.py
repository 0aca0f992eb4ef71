"""Columns that are proposed for a table whose user named none, or not all."""

import json
import tomllib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hugging_face import IMAGE, write_shard

from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.errors import SourceError
from embedder.sources.column_keys import ColumnOptions, setting
from embedder.sources.column_proposal import propose_columns
from embedder.sources.listing import list_sources

TEXT, BYTES, INT = pa.string(), pa.binary(), pa.int64()


def proposed(named=None, unique=True, labels=None, **types):
    schema = pa.schema(list(types.items()))
    features = {name: {"_type": "ClassLabel", "names": names} for name, names in (labels or {}).items()}
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return propose_columns(schema, Columns(**(named or {})), lambda _: unique)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"image": IMAGE, "text": TEXT}, {"image": "image", "caption": "text", "id": "content"}),
        ({"pixels": IMAGE, "image": BYTES, "text": TEXT}, {"image": "pixels", "caption": "text", "id": "content"}),
        ({"mask": IMAGE, "image": IMAGE}, {"image": "image", "id": "content"}),
        ({"image": IMAGE, "title": TEXT, "caption_0": TEXT}, {"image": "image", "caption": "title", "id": "content"}),
        ({"image": IMAGE, "caption_0": TEXT, "url": TEXT}, {"image": "image", "caption": "caption_0", "id": "content"}),
        ({"image": IMAGE, "captions": pa.list_(TEXT)}, {"image": "image", "caption": "captions", "id": "content"}),
        ({"sku": TEXT, "photo_uri": TEXT, "title": TEXT}, {"image": "photo_uri", "caption": "title", "id": "sku"}),
        ({"url": TEXT, "caption": TEXT}, {"image": "url", "caption": "caption"}),
        ({"image": pa.struct([("path", TEXT)]), "id": INT}, {"image": "image.path", "id": "id"}),
        ({"question": TEXT, "score": INT}, {"caption": "question", "id": "file+row"}),
        ({"a": TEXT, "b": TEXT, "image": IMAGE}, {"image": "image", "id": "content"}),
        ({"score": INT, "x": pa.float64()}, {}),
    ],
)  # fmt: skip
def test_the_likely_columns_are_chosen_by_name_and_type(types, expected):
    assert proposed(**types) == expected


def test_labels_are_captions_where_nothing_better_is_there_and_never_ids():
    assert proposed(image=IMAGE, id=INT, labels={"id": ["cat", "dog"]}) == {
        "image": "image", "caption": "id", "id": "content",
    }  # fmt: skip


def test_ids_that_repeat_are_not_proposed():
    assert proposed(unique=False, image=IMAGE, image_id=INT, caption=TEXT)["id"] == "content"
    assert proposed(unique=True, image=IMAGE, image_id=INT, caption=TEXT)["id"] == "image_id"


def test_what_is_named_stays_and_only_the_id_is_added():
    assert proposed({"image": "b"}, image=IMAGE, b=BYTES, caption=TEXT) == {"image": "b", "id": "content"}
    assert proposed({"caption": "b"}, image=IMAGE, b=TEXT) == {"caption": "b", "id": "file+row"}


def test_the_line_is_one_that_the_user_can_copy():
    found = {"image": 'a "b"', "caption": "c d", "id": "file+row"}
    assert tomllib.loads(setting(Columns(), found))["columns"] == found
    assert setting(ColumnOptions(), found) == """--image-column 'a "b"' --caption-column 'c d' --id-column file+row"""


def test_the_table_s_own_values_tell_whether_ids_repeat(tmp_path):
    for name, ids in (("once", [1, 2]), ("twice", [1, 1]), ("null", [1, None])):
        write_shard(tmp_path / f"{name}.parquet", [b"a", b"b"], image_id=pa.array(ids, pa.int64()))
    ends = {"once": 'id = "image_id" }', "twice": 'id = "content" }', "null": 'id = "content" }'}
    for name, end in ends.items():
        with pytest.raises(SourceError) as caught:
            list_sources([SourceConfig(path=str(tmp_path / f"{name}.parquet"))])
        assert str(caught.value).endswith(end)


@pytest.mark.medium
def test_an_empty_or_wide_table_gets_a_message_of_bounded_length(tmp_path):
    pq.write_table(pa.table({f"column_{number}": [1] for number in range(1000)}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"column_19 and 980 more; name one of them$"):
        list_sources([SourceConfig(path=str(tmp_path / "t.parquet"))])
