"""Forward pass of both towers in training: augmented images and padded captions to pooled features.

Legend: `N` images, `M` captions, `H` side in px, `L` tokens of one image, `T` tokens of the longest caption,
`D` width of a tower.
"""

import torch

from shards.text import Padding, check_tokens, pool_albert_tokens
from shards.towers import TwinTower
from shards.training.augment import NUM_DRAWS, augment, draw, kept_tokens
from shards.training.batch import TrainBatch
from shards.training.settings import TrainSettings
from shards.vision import check_pixels, embed_pixels

CAPTION_GROUP = 64


def image_features(
    towers: TwinTower, pixels_NHHC: torch.Tensor, batch: TrainBatch | None = None, settings: TrainSettings | None = None
) -> torch.Tensor:
    """Run the ViT on images, augmented where a batch and settings are given.

    Args:
        towers: the model.
        pixels_NHHC: uint8 (N, H, H, 3).
        batch: keys and epoch that determine the augmentation; None for none.
        settings: augmentation and patch dropout; None for none.

    Returns:
        (N, D), pooled, in the compute dtype.

    Raises:
        ModelError: pixels aren't of the model's size.
    """
    vision = towers.config.vision
    check_pixels(pixels_NHHC, vision.image_size)
    if batch is None or settings is None or batch.image_keys is None:
        return _pooled(towers, towers.normalise(pixels_NHHC, torch.float32), None)
    num_patches = vision.num_patches if settings.patch_dropout else 0
    draws = draw(batch.image_keys, settings.seed, batch.epoch, NUM_DRAWS + num_patches)
    device = towers.normalise.mean.device
    scaled = pixels_NHHC.to(device).permute(0, 3, 1, 2).float().div_(255)
    varied = augment(scaled, settings.augmentation, draws[:, :NUM_DRAWS])
    normalised = (varied - towers.normalise.mean) / towers.normalise.std
    kept = kept_tokens(draws[:, NUM_DRAWS:], settings.patch_dropout).to(device) if num_patches else None
    return _pooled(towers, normalised, kept)


def _pooled(towers: TwinTower, pixels_N3HH: torch.Tensor, kept_NK: torch.Tensor | None) -> torch.Tensor:
    vit = towers.vision
    x_NLD = embed_pixels(vit, pixels_N3HH)
    if kept_NK is not None:
        prefix, patches = x_NLD[:, : vit.num_prefix_tokens], x_NLD[:, vit.num_prefix_tokens :]
        kept = patches.gather(1, kept_NK[:, :, None].expand(-1, -1, x_NLD.shape[2]))
        x_NLD = torch.cat([prefix, kept], 1)
    for block in vit.blocks:
        x_NLD = block(x_NLD)
    pooled: torch.Tensor = vit.forward_head(vit.norm(x_NLD), pre_logits=True)
    return pooled


def caption_features(towers: TwinTower, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Run the ALBERT on packed captions, in groups of similar length, so that there is little padding.

    Args:
        towers: the model.
        token_ids: int32 (tokens of all captions,).
        lengths: int64 (M,), on the CPU, tokens of each caption.

    Returns:
        (M, D), pooled, in the compute dtype.

    Raises:
        ModelError: an id is outside the vocabulary, or a caption too long.
    """
    check_tokens(token_ids, lengths, towers.config.text)
    captions = torch.split(token_ids, lengths.tolist())
    order = lengths.argsort(stable=True)
    groups = torch.split(order, CAPTION_GROUP)
    features = [_group_features(towers, [captions[row] for row in group.tolist()], lengths[group]) for group in groups]
    return torch.cat(features)[order.argsort().to(features[0].device)]


def _group_features(towers: TwinTower, captions: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
    text, device = towers.config.text, towers.text.device
    ids_MT = Padding.of(lengths, device).pad(torch.cat(captions).to(device), fill=text.pad_token_id)
    is_token = (torch.arange(ids_MT.shape[1]) < lengths[:, None]).long().to(device)
    output = towers.text(input_ids=ids_MT, attention_mask=is_token)
    if text.pool == "pooler":
        pooled: torch.Tensor = output.pooler_output
        return pooled
    return pool_albert_tokens(towers.text, text, output.last_hidden_state, lengths)
