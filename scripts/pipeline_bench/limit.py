"""The limit: forward passes alone, all inputs decoded in memory before the first.

    python -m pipeline_bench.limit TASK      # in processes that share the cores, or in one

One process with all threads waits at the end of each operation for its slowest thread; processes of one thread each
never do, and can be faster. The pipeline may win by that as well, so both are measured. Freed memory is kept, as the
stages do it: this is what the hardware allows, not what a script would reach.
"""

import os
import sys

import numpy as np

from embedder.compat.malloc import keep_freed_memory
from pipeline_bench.plain import Pair, PlainDecoder, as_batch, embed_batch, load_whole
from pipeline_bench.task import FinishLog, Task, write_vectors


def main() -> None:
    task = Task.from_command_line()
    pairs = decoded(task)
    children = [fork(task, pairs, number) for number in range(1, task.num_workers)]
    embed_share(task, pairs, 0)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    sys.exit(1 if failed else 0)


def decoded(task: Task) -> list[Pair]:
    """Every distinct pair."""
    decode = PlainDecoder(task.model)
    return [decode(picture) for picture in task.pictures()[: task.num_distinct]]


def fork(task: Task, pairs: list[Pair], number: int) -> int:
    """Start a process that embeds its share, before this one has started any thread of torch; gives its id."""
    pid = os.fork()
    if pid == 0:
        embed_share(task, pairs, number)
        sys.stdout.flush()
        os._exit(0)
    return pid


def embed_share(task: Task, pairs: list[Pair], number: int) -> None:
    """Embed every so-many-th batch."""
    keep_freed_memory()
    model, log = load_whole(task.model, task.dtype, task.num_threads), FinishLog(task.out)
    names = [picture.name for picture in task.pictures()]
    ids, images, texts = [], [], []
    for start in range(number * task.batch_size, len(names), task.num_workers * task.batch_size):
        mine = names[start : start + task.batch_size]
        batch = as_batch([pairs[at % len(pairs)] for at in range(start, start + len(mine))])
        image, text = embed_batch(model, batch)
        log.note(len(mine))
        ids.extend(mine)
        images.append(image)
        texts.append(text)
    if ids:
        write_vectors(task, str(number), ids, np.concatenate(images), np.concatenate(texts))


if __name__ == "__main__":
    main()
