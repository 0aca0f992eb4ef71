"""A night without a change at the size that is promised; the store is made by hand, so that this takes seconds."""

import resource

import pyarrow as pa
import pytest
import store_samples
from refresh_runs import contents
from store_samples import table

from embedder.ingest.inputs import open_inputs
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import start_run
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, publish
from embedder.store.store_info import bind_store

NUM_ITEMS, ROWS_PER_PART = 10_000, 512


def publish_as_listed(inputs):
    """Publish a made-up vector for each listed item."""
    bind_store(inputs.files, inputs.info)
    run = start_run(inputs.files, inputs.info, pa.schema([]))
    prints = (inputs.info.model_fingerprint, inputs.info.preprocess_fingerprint)
    stamp = RunMetadata(run.run_id, run.session, *prints, pa.schema([]))
    facts = ("uri", "size_bytes", "modified")
    rows = [
        store_samples.row(item["item_id"], **{name: item[name] for name in facts}, image_embedding=[0.1] * 24)
        for listed in inputs.listing.tables()
        for item in listed.to_pylist()
    ]
    for start in range(0, NUM_ITEMS, ROWS_PER_PART):
        write_part(inputs.files, stamp, start // ROWS_PER_PART, table(*rows[start : start + ROWS_PER_PART]))
    publish([ModelWork(run, stamp, PublishIntent(kind="refresh", info=inputs.info))])


def cpu_s_of_children():
    """Seconds of CPU of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.medium
def test_ten_thousand_unchanged_items_take_less_than_ten_seconds_of_cpu(make_run, tmp_path, run_embedder_apart):
    source = tmp_path / "in"
    source.mkdir()
    for number in range(NUM_ITEMS):
        (source / f"{number:05d}.png").write_bytes(b"picture %d" % number)
    config = make_run(source)
    publish_as_listed(open_inputs(config))
    before = contents(config.store)
    path = tmp_path / "nightly.toml"
    # The store made by hand has no index.
    index = "[index]\nbuild = false\n"
    path.write_text(f'model = "{config.model}"\nstore = "{config.store}"\n{index}[[source]]\npath = "{source}"\n')
    before_s = cpu_s_of_children()
    code, report, stderr = run_embedder_apart("refresh", path, "--json")
    taken_s = cpu_s_of_children() - before_s
    assert code == 0, stderr
    assert (report["outcome"], report["num_unchanged"]) == ("nothing to do", NUM_ITEMS)
    assert taken_s < 10
    assert contents(config.store) == before
