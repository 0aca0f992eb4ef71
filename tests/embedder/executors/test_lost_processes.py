"""Runs whose processes are killed with work in hand."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import samples
import store_samples
from embedding_runs import assert_same, embedded
from ray import cloudpickle

from embedder import pipeline
from embedder.compat import ray_attempts
from embedder.compat.draining import EARLY_END
from embedder.errors import RunFailedError
from embedder.executors.datasink import PartSink, WrittenPart, check_journal
from embedder.executors.job import decode_spec
from embedder.ingest.embed import embed
from embedder.models.model_folder import open_model
from embedder.sources.listing import list_sources
from embedder.steps import decode
from embedder.steps.stage_actor import StageActor
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import entry_path
from embedder.store.journal.model_parts import ModelPart
from embedder.store.journal.part_writer import write_part
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.tables.tables import RecordTable
from shards.model_errors import ModelError

OPTIONS = {"segment_s": 0.5, "rows_per_part": 8, "decode": {"items_per_task": 5}, "num_stages": 2}


@pytest.fixture(autouse=True)
def _sent_to_workers():
    """Ray's processes get what is defined here by value: they can't import this file."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


def first_time(marker):
    """Whether nobody has come here before."""
    try:
        Path(marker).mkdir()
    except FileExistsError:
        return False
    return True


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_processes_that_die_with_work_in_hand_cost_neither_a_row_nor_the_run(
    make_run, tmp_path, ray_cluster, monkeypatch
):
    class StageDiesOnce(StageActor):
        def __call__(self, table):
            result = super().__call__(table)
            if self._spec.index == 1 and table.num_rows and first_time(tmp_path / "stage"):
                die()
            return result

    class WriteDiesTwice(PartSink):
        def write(self, blocks, ctx):
            result = super().write(blocks, ctx)
            if first_time(tmp_path / "before its entry"):
                self.files.delete(entry_path(self.stamp.run_id, result.entry))
                die()
            if first_time(tmp_path / "after its entry"):
                die()
            return result

    def decode_dies_once(listing, **arguments):
        for table in decode.decode_at_low_priority(listing, **arguments):
            yield table
            if first_time(tmp_path / "decode"):
                die()

    source = samples.folder(tmp_path / "in", num_images=30, num_clips=1)
    _, local = embedded(make_run(source, store=str(tmp_path / "local"), **OPTIONS))
    monkeypatch.setattr(pipeline, "StageActor", StageDiesOnce)
    monkeypatch.setattr(pipeline, "PartSink", WriteDiesTwice)
    monkeypatch.setattr(pipeline, "decode_at_low_priority", decode_dies_once)
    _, found = embedded(make_run(source, store=str(tmp_path / "ray"), engine="ray", **OPTIONS))
    assert_same(found, local)
    assert {path.name for path in tmp_path.iterdir()} >= {"stage", "before its entry", "after its entry", "decode"}
    parts = [path.name for path in (tmp_path / "ray" / "embeddings").glob("part-*")]
    first_attempt = [name.replace("-r1.", ".") for name in parts if "-r1." in name]
    assert first_attempt, "the task that ran again wrote files of its own"
    assert not set(first_attempt) & set(parts), "and those of its first attempt are gone with the publication"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "a block"])
def test_a_stage_that_always_kills_its_process_ends_the_run_in_one_line(
    make_run, tmp_path, ray_cluster, monkeypatch, moment
):
    class Deadly(StageActor):
        def _load(self):
            if self._spec.index == 0:
                return super()._load()
            return die() if moment == "loading" else lambda table: die()

    monkeypatch.setattr(pipeline, "StageActor", Deadly)
    config = make_run(samples.folder(tmp_path / "in", num_images=8), engine="ray", **OPTIONS)
    with pytest.raises(RunFailedError, match=rf"^stage 1: {moment} .*killed its process each time") as caught:
        embed(config)
    assert "\n" not in str(caught.value) and os.uname().nodename in str(caught.value)


@pytest.mark.medium
@pytest.mark.skipif(not EARLY_END.is_there(), reason="this Ray leaves the stages of a failed run to the process's end")
@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (KeyError("missing"), RunFailedError, r"^stage 0 could not start on node \S+ \(KeyError: 'missing'\)"),
        (ModelError("no model at /gone"), ModelError, "^no model at /gone$"),  # a mistake stays what it is
    ],
)
def test_what_a_stage_raises_at_its_start_is_one_line_and_its_traceback_is_in_the_log(
    make_run, tmp_path, ray_cluster, monkeypatch, capfd, raised, kind, message
):
    class CannotStart(StageActor):
        def _load(self):
            raise raised

    monkeypatch.setattr(pipeline, "StageActor", CannotStart)
    config = make_run(samples.folder(tmp_path / "in", num_images=3), engine="ray", **OPTIONS)
    with pytest.raises(kind, match=message) as caught:
        embed(config)
    assert "\n" not in str(caught.value) and "attempts" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err, "nor does Ray print its own"
    logs = [log.read_text() for log in (tmp_path / "store").glob("runs/*/log.txt")]
    assert any("in _load" in log for log in logs) == (kind is RunFailedError), "a mistake needs no traceback"


@pytest.mark.medium
def test_a_store_that_nodes_do_not_share_ends_the_run(tmp_path, ray_cluster):
    class OwnDisk(PartSink):
        def write(self, blocks, ctx):
            if ctx.task_idx == 1:
                self.models = (replace(self.models[0], files=StoreFiles(str(tmp_path / "other"))),)
            return super().write(blocks, ctx)

    run, stamp = store_samples.begin(StoreFiles(str(tmp_path / "store")))
    sink = OwnDisk([ModelPart(run.files, stamp)], rows_per_part=1)
    dataset = ray_cluster.data.from_blocks([store_samples.table(store_samples.row(name)) for name in "abc"])
    with pytest.raises(RunFailedError, match="1 of 3 parts that write tasks finished on .*-000001") as caught:
        dataset.write_datasink(sink, ray_remote_args={"num_cpus": 0.1})
    assert "must share the store" in str(caught.value)


def test_the_journal_has_to_be_what_the_write_tasks_returned():
    written = [WrittenPart("s-000000", "n1"), WrittenPart("s-000001", "n2")]
    check_journal(written, {"s-000000", "s-000001"}, "/store")
    with pytest.raises(RunFailedError, match=r"store /store: 1 of 2 parts .* on n2 can't be seen .*first: s-000001"):
        check_journal(written, {"s-000000"}, "/store")
    with pytest.raises(RunFailedError, match=r"1 part that no write task returned \(first: s-000002\)"):
        check_journal(written, {"s-000000", "s-000001", "s-000002"}, "/store")


@pytest.mark.parametrize("last", [0, 1])
def test_a_write_task_that_ran_twice_has_written_its_rows_once(tmp_path, last):
    run, stamp = store_samples.begin(StoreFiles(str(tmp_path)))
    rows = store_samples.table(*map(store_samples.row, "abc"))
    for attempt in (1 - last, last):
        write_part(run.files, stamp, 0, rows, attempt=attempt)
    (entry,) = run.entries()
    assert all(("-r1" in part.path) == bool(last) for part in entry.parts), "one attempt's files, whole"
    publish([ModelWork(run, stamp)])
    assert sorted(RecordTable(run.files, "embeddings").read(["item_id"])["item_id"].to_pylist()) == ["a", "b", "c"]
    assert len(list((tmp_path / "embeddings").glob("part-*"))) == 1


@pytest.mark.medium
def test_a_decode_task_that_runs_again_makes_as_many_tables_whatever_came_or_went(
    make_run, tmp_path, ray_cluster, monkeypatch
):
    source = samples.folder(tmp_path / "in", num_images=3, num_clips=2)
    config = make_run(source, segment_s=0.1, batch_size=2)
    listing = pa.concat_tables(list_sources(config.source)).sort_by("item_id")
    spec, (run, _) = (
        decode_spec(config.rows, open_model(config.model), 2),
        store_samples.begin(StoreFiles(config.store)),
    )
    gone, late = source / "clips/0.mp4", source / "clips/1.mp4"
    late.rename(tmp_path / "away")

    @ray_cluster.remote(num_cpus=0.1, max_retries=-1)
    def decoded():
        decode.RAY_TABLE_BYTES = 1
        tables = [
            table.select(["item_id", "segment"]).to_pylist()
            for table in decode.decode_at_low_priority(listing, spec=spec, run=run)
        ]
        if first_time(tmp_path / "first"):
            (tmp_path / "tables").write_text(json.dumps(tables))
            gone.unlink()
            (tmp_path / "away").rename(late)
            die()
        return tables

    again = ray_cluster.get(decoded.remote())
    ray_attempts.delete_notes()
    first = json.loads((tmp_path / "tables").read_text())
    assert len(first) == len(again) > 10, "the clip that was there has filled several"
    assert first != again and [] in again
    stills = [[[row for row in table if "clips" not in row["item_id"]] for table in each] for each in (first, again)]
    assert stills[0] == stills[1], "each in the table in which it was"
