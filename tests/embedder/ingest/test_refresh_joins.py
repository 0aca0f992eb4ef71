"""A row that changes only in a joined table: its items, and no others, are brought up to date."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from refresh_runs import refreshed

import embedder
from embedder.ingest.dry_run import forecast
from embedder.ingest.work import IngestOptions

pytestmark = pytest.mark.medium

NUM = 8


@pytest.fixture
def joined(make_run, tmp_path):
    """Writes the table of captions and prices; gives the configuration."""
    pictures = samples.folder(tmp_path / "in", num_images=NUM, captions=False)

    def write(captions, prices):
        names = [f"pictures/{number:04d}.png" for number in captions]
        table = pa.table(
            {"file": names, "text": list(captions.values()), "price": [prices.get(number) for number in captions]}
        )
        pq.write_table(table, tmp_path / "texts.parquet")
        join = {"path": str(tmp_path / "texts.parquet"), "on": {"id": "file"}, "columns": ["price"], "caption": "text"}
        return make_run(pictures, join=[join], rows_per_part=3)

    return write


def by_number(rows):
    return {int(item_id.rpartition("/")[2][:4]): row for (item_id, _), row in rows.items()}


def test_a_changed_caption_embeds_its_item_again_and_a_changed_price_rewrites_its_columns_alone(joined):
    captions = {number: samples.SENTENCES[number] for number in range(NUM - 1)}  # the last picture has no row
    prices = {number: 10 * number for number in captions}
    config = joined(captions, prices)
    report, before = refreshed(config)
    before = by_number(before)
    assert (report.num_new, report.num_vectors) == (NUM, NUM)
    assert {number: row["caption"] for number, row in before.items()} == captions | {NUM - 1: None}
    assert {number: row["price"] for number, row in before.items()} == prices | {NUM - 1: None}
    assert [row["text_embedding"] is None for _, row in sorted(before.items())] == [False] * (NUM - 1) + [True]

    config = joined(captions | {2: "something else entirely"}, prices | {5: 999})
    plan = forecast(config, IngestOptions(kind="refresh"))
    assert (plan.num_to_embed, plan.num_unchanged) == (2, NUM - 2)
    report, after = refreshed(config)
    after = by_number(after)
    assert (report.num_changed, report.num_equal, report.num_unchanged) == (2, 1, NUM - 2), "of the two one is embedded"
    assert (after[2]["caption"], after[5]["price"]) == ("something else entirely", 999)
    assert after[2]["text_embedding"] != before[2]["text_embedding"]
    assert after[2]["run_id"] != before[2]["run_id"]
    for number in set(range(NUM)) - {2}:
        expected = before[number] | ({"price": 999} if number == 5 else {})
        assert after[number] == expected, "vector, run and time stay, also where the price is another"
    assert [
        hit.item_id for hit in embedder.open_store(config.store).search("two cats", k=NUM, where="price = 999")
    ] == ["pictures/0005.png"]
    assert refreshed(config)[0].num_unchanged == NUM


def test_a_row_that_comes_or_goes_touches_its_item_alone(joined):
    captions = {number: samples.SENTENCES[number] for number in range(NUM)}
    refreshed(joined(captions, {}))
    del captions[3]
    report, rows = refreshed(joined(captions, {}))
    rows = by_number(rows)
    assert (report.num_changed, report.num_unchanged) == (1, NUM - 1)
    assert (rows[3]["caption"], rows[3]["text_embedding"], rows[3]["modality"]) == (None, None, "image")
    report, rows = refreshed(joined(captions | {3: "back again"}, {}))
    assert (report.num_changed, by_number(rows)[3]["caption"]) == (1, "back again")
