"""Process group of workers that train one model: each embeds its share of every batch, the loss sees all of it.

Embeddings are gathered, every worker computes the loss of the whole batch and sends gradients back only through its own
rows; their sum, in one message per step, is that of one worker. Only BatchNorm (a convolutional stem's) differs: each
worker normalises by its own share, as torch's DistributedDataParallel does, and the running statistics are averaged.
Such a run is equivalent to that of one worker, but not equal in numbers.

Legend: `R` rows of this worker, `S` rows of all workers, `E` embedding size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from embedder.plugins.train.trainer.batch import FeatureBatch, TrainBatch

AnyBatch = TrainBatch | FeatureBatch


class ProcessGroup:
    """Rank of this process, and collective operations of the group that `torch.distributed.init_process_group` made."""

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def gather(self, rows_RE: torch.Tensor) -> torch.Tensor:
        """Gather all workers' rows in the order of their ranks, (S, E); own rows keep their gradient.

        All workers must call it, with any number of rows, but the same dtype and the same sizes after the first.
        """
        gathered: torch.Tensor = _GatherRows.apply(rows_RE, self)
        return gathered

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter], means: Sequence[torch.Tensor] = ()) -> None:
        """Sum gradients over the workers, in place; a gradient stays None if it is None on every worker.

        `means` are float32 tensors that are averaged over the workers in the same message.
        """
        device = parameters[0].device
        has_gradient = torch.tensor([each.grad is not None for each in parameters], dtype=torch.float32, device=device)
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        sent = [has_gradient, *gradients, *(mean / self.size for mean in means)]
        summed = torch.cat([each.detach().flatten() for each in sent])
        distributed.all_reduce(summed)
        is_there, *pieces = torch.split(summed, [each.numel() for each in sent])
        for parameter, num_workers, piece in zip(parameters, is_there.tolist(), pieces, strict=False):
            parameter.grad = piece.view_as(parameter) if num_workers else None
        for mean, piece in zip(means, pieces[len(parameters) :], strict=True):
            mean.copy_(piece.view_as(mean))

    def total(self, number: int, device: torch.device) -> int:
        """Sum a number over the workers."""
        summed = torch.tensor(number, device=device)
        distributed.all_reduce(summed)
        return int(summed)

    def gather_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Gather all workers' rows without gradients, (S, ...), and the number of rows of each worker."""
        counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(self.size)]
        distributed.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        sizes = [int(count) for count in counts]
        # Messages of all workers must have the same size.
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), sizes


class _GatherRows(torch.autograd.Function):
    """Rows of all workers; in the backward pass, each worker takes the gradient of its own rows.

    The backward pass sends no message, so it doesn't matter which workers have rows that learn.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        gathered, sizes = group.gather_values(rows)
        ctx.start, ctx.size = sum(sizes[: group.rank]), len(rows)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][ctx.start : ctx.start + ctx.size], None


def gather_batch(
    group: ProcessGroup,
    images_RE: torch.Tensor | None,
    captions_RE: torch.Tensor | None,
    batch: AnyBatch,
    none_0E: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None, AnyBatch]:
    """Gather what the loss needs of the whole batch; all workers must call this.

    Embeddings are None where this worker's share has none; then `none_0E`, float32 (0, E) on their device, stands in.
    Concepts are gathered; pixels, tokens and features stay those of the share.
    """
    images, captions = (group.gather(none_0E if rows is None else rows) for rows in (images_RE, captions_RE))

    def gather_whole(values: torch.Tensor) -> torch.Tensor:
        # Not every backend sends booleans.
        as_numbers = values.to(none_0E.device, torch.uint8 if values.dtype == torch.bool else values.dtype)
        return group.gather_values(as_numbers)[0].to(values.dtype)

    gathered = replace(
        batch, image_concepts=gather_whole(batch.image_concepts), caption_concepts=gather_whole(batch.caption_concepts)
    )
    if batch.teacher_images is not None and batch.teacher_captions is not None:
        gathered = replace(
            gathered,
            teacher_images=gather_whole(batch.teacher_images),
            teacher_captions=gather_whole(batch.teacher_captions),
        )
    if isinstance(gathered, TrainBatch) and gathered.caption_positives is not None:
        gathered = replace(gathered, caption_positives=gather_whole(gathered.caption_positives))
    return (images if len(images) else None), (captions if len(captions) else None), gathered
