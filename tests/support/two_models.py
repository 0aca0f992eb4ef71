"""Runs of two models whose tasks are written by hand, `tags` next to the main one."""

import pyarrow as pa
from store_samples import INFO, MODEL, PREPROCESSING, row, table

from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import Run, begin_model_run, start_run
from embedder.store.publish.interim import UnpublishedWork
from embedder.store.publish.publish import (
    InterimWork,
    ModelWork,
    PublishIntent,
    finish_publication,
    publish,
    publish_interim,
)
from embedder.store.store_info import bind_store
from embedder.store.tables.models import model_files

OTHER = INFO.model_copy(update={"model": "tags", "model_fingerprint": "other-fingerprint", "has_vectors": True})
INTENTS = (PublishIntent(kind="refresh", info=INFO), PublishIntent(kind="refresh", info=OTHER))
NO_ITEMS = pa.chunked_array([], pa.string())


def view_of(files: StoreFiles) -> StoreFiles:
    return model_files(files, "tags")


class TwoModels:
    """Session of a run of two models, which writes its tasks by hand: the second model's part before the first's."""

    def __init__(self, files, in_work=(), of_tags=None):
        finish_publication(files)
        view = view_of(files)
        bind_store(view, OTHER)
        self.run = start_run(files, INFO, pa.schema([]), [(view, OTHER)])
        self.own = Run(view, begin_model_run(view, self.run.info, OTHER), self.run.session)
        fingerprints = (MODEL, OTHER.model_fingerprint)
        self.metadata = [
            RunMetadata(self.run.run_id, self.run.session, each, PREPROCESSING, pa.schema([])) for each in fingerprints
        ]
        works = ((self.run, in_work), (self.own, in_work if of_tags is None else of_tags))
        self.works = [UnpublishedWork(run, pa.chunked_array([list(ids)], pa.string())) for run, ids in works]
        self.num_tasks = 0

    def write_tags(self, *rows):
        write_part(self.own.files, self.metadata[1], self.num_tasks, table(*rows) if rows else table(row("x"))[:0])

    def write_main(self, *rows):
        write_part(self.run.files, self.metadata[0], self.num_tasks, table(*rows) if rows else table(row("x"))[:0])
        self.num_tasks += 1

    def write(self, *rows, tags=None):
        self.write_tags(*(rows if tags is None else tags))
        self.write_main(*rows)

    def publish_interim(self):
        batch = self.works[0].next()
        tags = self.works[1].next(self.works[0].seen)
        if not (batch.whole.num_rows or tags.whole.num_rows):
            return None
        main = InterimWork(self.run, batch, self.metadata[0], INTENTS[0])
        further = [InterimWork(self.own, tags, self.metadata[1], INTENTS[1])] if tags.whole.num_rows else []
        record = publish_interim([main, *further])
        self.works[0].note_published(batch)
        if further:
            self.works[1].note_published(tags)
        return record

    def end(self):
        work = ModelWork(self.own, self.metadata[1], INTENTS[1], NO_ITEMS)
        return publish([ModelWork(self.run, self.metadata[0], INTENTS[0]), *[work]])
