"""Damage that a run detects at no cost: a publication with fewer or more vectors than its items record."""

from collections.abc import Sequence

from embedder.ingest.model_work import ModelPlan
from embedder.ingest.work import IngestOptions
from embedder.quantities import plural
from embedder.store.files import StoreFiles
from embedder.store.layout import PUBLISHED_FILE, Current, Published, read_record, run_file
from embedder.store.publish.current import record_of


def damage_lines(
    files: StoreFiles, current: Current | None, plans: Sequence[ModelPlan], options: IngestOptions
) -> list[str]:
    """Describe the models whose items record another number of vectors than the publication does.

    Finding these items means reading all rows: that is left to `embedder store check`, or to a run that repairs.
    """
    if current is None or options.repair:
        return []
    record = read_record(files, run_file(current.run_id, PUBLISHED_FILE), Published)
    lines = []
    for plan in plans:
        published = record_of(record, plan.model.name)
        if published is not None and published.num_vectors != plan.work.num_vectors:
            lines.append(
                f"{plan.prefix}its items tell of {plural(plan.work.num_vectors, 'vector')}, and "
                f"{published.num_vectors:,} are "
                f"published: `embedder store check {files.option}` names the items, --repair embeds them again"
            )
    return lines
