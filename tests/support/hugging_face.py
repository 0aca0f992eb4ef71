"""Tables as Hugging Face's `datasets` 5.2 writes them: images as structs, and the columns described in the metadata."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_shard(path, images, labels=None, row_group_size=None, **columns):
    """Write one file of a split.

    `images` are bytes, structs or None; `columns` are values by name; `labels` are the names of a column's numbers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = [
        {"bytes": each, "path": f"{number}.png"} if isinstance(each, bytes) else each
        for number, each in enumerate(images)
    ]
    table = pa.table({"image": pa.array(structs, IMAGE), **columns})
    features = {"image": {"_type": "Image"}}
    features |= {name: {"names": list(names), "_type": "ClassLabel"} for name, names in (labels or {}).items()}
    about = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), path, row_group_size=row_group_size)
    return path
