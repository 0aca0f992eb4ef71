"""Performance without a clock: tasks, blocks and bytes of each operator, as the shapes say them."""

import math

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import samples
from embedding_runs import embedded

from embedder import pipeline
from embedder.batch_schema import TENSOR
from embedder.executors.block_size import cut_listing, items_per_block
from embedder.executors.job import handed_on_bytes
from embedder.steps.decode import decode

NUM_ITEMS = 256
ROWS_PER_BATCH = 16  # as many batches as a run of 1,000 with the usual 64
ROWS_PER_PART = 128
OFFSET_BYTES = 8  # of a row in a tensor column
FLOAT_BYTES = TOKEN_BYTES = 4
CAPTION = samples.SENTENCES[0]
SPARE = 0.02  # validity bits; one measurement more, of its loading, from each stage


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures that all have the same caption, so that each row has the same bytes."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(NUM_ITEMS):
        (folder / f"{number:04d}.png").write_bytes(samples.image_bytes(number))
        (folder / f"{number:04d}.txt").write_text(CAPTION)
    return folder


@pytest.fixture
def ran(pictures, make_run, ray_cluster, monkeypatch):
    """A run on Ray: its job, its listing, and Ray's metrics of each operator in order."""
    calls, real = [], pipeline.embedding_graph

    def kept(listing, job):
        listing = list(listing)
        calls.append((job, listing, real(listing, job)))
        return calls[-1][2]

    monkeypatch.setattr(pipeline, "embedding_graph", kept)
    embedded(make_run(pictures, engine="ray", batch_size=ROWS_PER_BATCH, rows_per_part=ROWS_PER_PART))
    [(job, listing, graph)] = calls
    operators, stats = [], graph._write_ds._raw_stats()
    while stats is not None:
        operators.append(stats.extra_metrics)
        stats = stats.parents[0] if stats.parents else None
    return job, listing, operators[::-1]


def expected_bytes(job, rows: pa.Table) -> list[float]:
    """Bytes of a row as decode and each stage hand it on: tensors, what else was decoded, a measurement a step."""
    vision, text = job.model.config.vision, job.model.config.text
    num_tokens = len(rows["token_ids"][0].as_py()) // TOKEN_BYTES
    tensors = {field.name for field in rows.schema if field.type == TENSOR}
    carried = sum(rows[name].nbytes for name in rows.schema.names if name not in tensors) / rows.num_rows
    embedding = job.model.config.embedding_dim * FLOAT_BYTES + OFFSET_BYTES // 2
    sides = {
        "vision": (3 * vision.image_size**2, vision.num_tokens * vision.width * FLOAT_BYTES, vision.depth),
        "text": (num_tokens * TOKEN_BYTES, num_tokens * text.hidden_size * FLOAT_BYTES, text.num_hidden_layers),
    }
    found = [carried + sum(size + OFFSET_BYTES for size, _, _ in sides.values())]
    num_done = dict.fromkeys(sides, 0)
    measurement = pc.list_flatten(rows["trace"]).nbytes / rows.num_rows
    for number, stage in enumerate(job.plan.stages, start=1):
        row = carried + number * measurement
        for side, (before, between, depth) in sides.items():
            num_done[side] += len(getattr(stage.spec, side))
            row += embedding if num_done[side] == depth else OFFSET_BYTES + (between if num_done[side] else before)
        found.append(row)
    return found


@pytest.mark.slow
def test_tasks_blocks_and_bytes_of_each_operator_are_those_of_the_design(ran):
    job, listing, operators = ran
    num_rows = items_per_block(
        job.compute.items_per_task, job.decode.rows_per_batch, max(handed_on_bytes(job.model, job.plan)), NUM_ITEMS
    )
    assert num_rows == ROWS_PER_BATCH
    num_blocks = math.ceil(NUM_ITEMS / num_rows)
    *steps, write = operators[-5:]
    first = next(cut_listing(listing, num_rows))
    shapes = expected_bytes(job, pa.concat_tables(decode(first, spec=job.decode, run=job.run)))
    for step, row_bytes in zip(steps, shapes, strict=True):
        assert step["num_tasks_finished"] == num_blocks, "a task a block of the listing"
        assert step["num_task_outputs_generated"] == num_blocks, "each block whole"
        assert step["rows_task_outputs_generated"] == NUM_ITEMS
        assert step["num_tasks_failed"] == 0
        assert step["obj_store_mem_spilled"] == 0
        assert step["bytes_task_outputs_generated"] / NUM_ITEMS == pytest.approx(row_bytes, rel=SPARE)
    assert write["num_tasks_finished"] == NUM_ITEMS / ROWS_PER_PART
    assert write["num_row_inputs_received"] == NUM_ITEMS
