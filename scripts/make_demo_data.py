"""Make the demo's data: a WebDataset tar of the Noto emoji with their captions.

    python scripts/make_demo_data.py NOTO_PARQUET [--out embedder/demo_data/noto.tar]

Two members an item: `<hexcode>.json` (caption, tags, group) and `<hexcode>.png`, the bytes as they are in the table.
The same table always gives the same tar, byte for byte. docs/decisions.md says why images are not compressed again.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import pyarrow.parquet as pq

OUT = Path(__file__).resolve().parent.parent / "embedder" / "demo_data" / "noto.tar"
FACTS = ["caption", "emoji", "tags", "openmoji_tags", "group", "subgroup"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's WebDataset tar from the table of Noto emoji.")
    parser.add_argument("table", type=Path, metavar="NOTO_PARQUET")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rows = pq.read_table(options.table, columns=["hexcode", "image", *FACTS]).to_pylist()
    with tarfile.open(options.out, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in sorted(rows, key=lambda row: row["hexcode"]):
            text = json.dumps({key: row[key] for key in FACTS}, ensure_ascii=False, separators=(",", ":"))
            for kind, data in ("json", text.encode()), ("png", row["image"]):
                member = tarfile.TarInfo(f"{row['hexcode']}.{kind}")  # without owner and time
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    print(f"{options.out}: {len(rows):,} images, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
