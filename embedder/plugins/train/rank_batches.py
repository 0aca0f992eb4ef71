"""Stream of several training workers: one block of listed items for each batch and worker, and its decoded examples.

Shares of a batch are equal and in its order, so together they are the batch of one worker. Ray Data's `streaming_split`
gives the next block to the worker with the fewest rows, the first in a tie: with blocks of one size, each worker gets
its share of each batch. Blocks carry their numbers, and `take_share` refuses an unexpected one.
"""

from collections.abc import Iterator

import pyarrow as pa

from embedder.plugins.train.batches import ExampleCounts, Pair, SamplerConfig, checked_pair
from embedder.plugins.train.examples import ExampleSpec, decode_examples, examples_of
from embedder.plugins.train.items import Items, TeacherRow
from embedder.plugins.train.sampler import epoch_order, num_batches

# Columns besides those of a listing, and of EXAMPLES.
NUMBERS = ("key", "concept", "epoch", "batch", "share")
TEACHER = ("teacher_image", "teacher_caption", "teacher_version")
"""The teacher's vectors of each item and the version of their content, if there is a teacher."""


def cut_shares(
    items: Items, sampler: SamplerConfig, num_workers: int, epoch: int, first: int, num_epochs: int
) -> Iterator[pa.Table]:
    """Yield blocks of listed items with their NUMBERS, batch after batch, worker after worker.

    There must be at least one batch of items, and the batch size must be a multiple of the workers. The stream starts
    with batch `first` of `epoch`.
    """
    rows = sampler.batch_size // num_workers
    for number in range(epoch, epoch + num_epochs):
        order = epoch_order(items.keys, sampler.seed, number)
        for batch in range(first if number == epoch else 0, num_batches(len(items), sampler.batch_size)):
            for share in range(num_workers):
                start = batch * sampler.batch_size + share * rows
                yield _number_items(items.take(order[start : start + rows]), number, batch, share)


def _number_items(items: Items, *position: int) -> pa.Table:
    columns = [items.keys, items.concepts, *([number] * len(items) for number in position)]
    table = items.listing.combine_chunks()
    for name, values in zip(NUMBERS, columns, strict=True):
        table = table.append_column(name, pa.array(values, pa.int64()))
    if (teacher := items.teacher) is not None:
        rows = teacher.rows
        for name, vectors in zip(TEACHER, (teacher.images, teacher.captions), strict=False):
            flat = pa.array(vectors[rows].reshape(-1), pa.float32())
            table = table.append_column(name, pa.FixedSizeListArray.from_arrays(flat, teacher.dim))
        table = table.append_column(TEACHER[-1], teacher.versions.take(pa.array(rows)))
    return table


def decode_share(block: pa.Table, *, spec: ExampleSpec) -> pa.Table:
    """Decode one block of `cut_shares`: a row of EXAMPLES for each item, in their order, with the same NUMBERS.

    Raises `RuntimeError` if the decoder gave other items than asked for, or in another order.
    """
    added = [name for name in (*NUMBERS, *TEACHER) if name in block.schema.names]
    examples = pa.concat_tables(decode_examples(block.drop_columns(added), spec=spec)).combine_chunks()
    if examples["item_id"].to_pylist() != block["item_id"].to_pylist():
        raise RuntimeError(f"decoding gave {examples.num_rows} items where {block.num_rows} others were due")
    for name in added:
        examples = examples.append_column(name, block[name].combine_chunks())
    return examples


def take_share(table: pa.Table, position: tuple[int, int, int], image_size: int, counts: ExampleCounts) -> list[Pair]:
    """Return the pairs of a block from `decode_share` that can be trained on; `counts` counts every example.

    Raises `RuntimeError` if it isn't the block that is due at `position` (epoch, batch, share).
    """
    found = tuple(table[name][0].as_py() for name in NUMBERS[2:])
    if found != position:
        raise RuntimeError(f"the stream gave epoch, batch and share {found} where {position} were due")
    numbers = table["key"].to_pylist(), table["concept"].to_pylist(), _teacher_rows(table)
    pairs = [checked_pair(*of) for of in zip(examples_of(table, image_size), *numbers, strict=True)]
    for pair in pairs:
        counts.count(pair.example)
    return [pair for pair in pairs if pair.example.is_pair]


def _teacher_rows(table: pa.Table) -> list[TeacherRow | None]:
    """The teacher's vectors of each row; all None without a teacher."""
    if TEACHER[0] not in table.schema.names:
        return [None] * table.num_rows
    images, captions = (
        table[name].combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1) for name in TEACHER[:2]
    )
    return [TeacherRow(*of) for of in zip(images, captions, table[TEACHER[2]].to_pylist(), strict=True)]
