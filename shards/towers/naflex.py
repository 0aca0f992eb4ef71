"""timm's NaFlexVit and NaFlex SigLIP 2: images keep their proportions, within a budget of patches each.

An image is resized to a whole number of patches along both sides, and the position table is resized to that grid.
Images of a batch lie in a rectangle as wide as the longest one; no patch attends to its padding.

Legend: `R` rows, `F` images (frames) of all rows, `N` patches of one image, `L` tokens of one image, `D` width, `P`
values of one patch: 3 for each pixel. Source: timm 1.0.31, `NaFlexVit.forward_features` and `forward_head`, whose steps
these methods follow; transformers 5.23, `Siglip2VisionModel.forward`, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Rows, Shape, Shapes, TowerImport, linear_shapes
from shards.towers.from_transformers import check_settings, vision_fields
from shards.towers.siglip import IMPORTS as SIGLIP_IMPORTS
from shards.towers.siglip import siglip_vision_names
from shards.towers.timm_tower import TimmVisionTower, known_options
from shards.towers.vit import VisionActivation
from shards.towers.vit_imports import vision_activation

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from shards.layouts import PatchGrids

# Settings under timm's own names.
_TIMM_NAMES = {"patch_size", "depth", "num_heads", "mlp_ratio", "scale_mlp_norm", "qkv_bias", "qk_norm", "init_values"}
_TIMM_NAMES |= {"class_token", "pre_norm", "final_norm", "fc_norm", "pos_embed_interp_mode", "pos_embed_ar_preserving"}
_TIMM_NAMES |= {"pos_embed_antialias", "pos_embed_align_corners"}
_UNSET = {"pos_embed_antialias": True, "pos_embed_align_corners": False}  # from timm 1.0.31 on


class NaFlexTower(TimmVisionTower):
    """A NaFlexVit as timm builds it; `image_size` is the side of the square whose patches fit the position table."""

    label = "NaFlex ViT"
    lookup_prefixes = ("embeds.",)  # the patches' linear layer stays with the table, like a ViT's convolution

    family: Literal["naflex"] = "naflex"
    max_patches: int = Field(256, ge=1, description="budget: an image is resized to at most so many patches")
    class_token: bool = False
    pool: Literal["token", "avg", "avgmax", "max", "map"] = Field("map", description="timm global_pool")
    mlp: Literal["mlp"] = "mlp"
    no_embed_class: Literal[True] = Field(True, description="class and register tokens have no position embedding")
    factorized_pos_embed: bool = Field(False, description="one table of rows and one of columns, which are added")
    pos_embed_interp_mode: Literal["bilinear", "bicubic"] = "bicubic"
    pos_embed_ar_preserving: bool = Field(False, description="resize the table to a square, and cut the grid out of it")
    pos_embed_antialias: bool = True
    pos_embed_align_corners: bool = False
    activation: VisionActivation = "gelu"

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        require_multiple("image_size", self.image_size, "patch_size", self.patch_size)
        if self.factorized_pos_embed and self.pos_embed == "none":
            raise ValueError('factorized_pos_embed belongs to pos_embed = "learn"; write that, or leave it out')
        return self

    @property
    def num_patches(self) -> int:
        """Number of patches of one image: the budget, which most images use up."""
        return self.max_patches

    @property
    def patch_px(self) -> int | None:
        """Side of a patch, px: images keep their proportions."""
        return self.patch_size

    def at_patches(self, num_patches: int) -> Self:
        """Copy the tower for images of so many patches, at most its budget."""
        return self.model_copy(update={"max_patches": min(num_patches, self.max_patches)})

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return (
            f"{self.label} {self.depth} layers x {self.width}, images of up to {self.max_patches} patches of "
            f"{self.patch_size} px"
        )

    def front_shapes(self) -> Shapes:
        """Return the shapes of patches, class and register tokens, and positions."""
        width, side = self.width, self.grid_side
        # timm omits the patch bias where a norm follows directly.
        shapes = linear_shapes("embeds.proj", self.patch_values, width, bias=not self.pre_norm)
        if self.class_token:
            shapes["embeds.cls_token"] = (1, 1, width)
        if self.num_reg_tokens:
            shapes["embeds.reg_token"] = (1, self.num_reg_tokens, width)
        if self.factorized_pos_embed:
            shapes |= {"embeds.pos_embed_y": (1, side, width), "embeds.pos_embed_x": (1, side, width)}
        elif self.pos_embed == "learn":
            shapes["embeds.pos_embed"] = (1, side, side, width)
        return shapes | (self.norm_shapes("norm_pre", width) if self.pre_norm else {})

    def block_shapes(self) -> Shapes:
        """Return the shapes of a block."""
        width = self.width
        scales: Shapes = {"ls1.gamma": (width,), "ls2.gamma": (width,)} if self.init_values else {}
        return (
            self.norm_shapes("norm1", width)
            | linear_shapes("attn.qkv", width, 3 * width, bias=self.qkv_bias)
            | self.attention_norm_shapes()
            | linear_shapes("attn.proj", width, width)
            | self.norm_shapes("norm2", width)
            | self.mlp_shapes()
            | scales
        )

    def build(self) -> Any:
        """Build the whole tower without its head, which `ProjectionHead` provides."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from timm.layers import LayerNorm
            from timm.models import naflexvit

        config = naflexvit.NaFlexVitCfg(
            embed_dim=self.width,
            global_pool=self.pool,
            reg_tokens=self.num_reg_tokens,
            scale_attn_inner_norm=self.scale_attn_norm,
            pos_embed="factorized" if self.factorized_pos_embed else {"learn": "learned"}.get(self.pos_embed, "none"),
            pos_embed_grid_size=(self.grid_side, self.grid_side),
            norm_layer=partial(LayerNorm, eps=self.norm_eps),
            act_layer=None if self.activation == "gelu" else self.activation,  # the default is torch's own exact GELU
            **known_options(naflexvit.NaFlexVitCfg, self.model_dump(include=_TIMM_NAMES), _UNSET),
        )
        # Initial weights are pointless, as all are loaded; on the meta device, they would import torch's compiler.
        bare_class: Any = type(
            "NaFlexVit", (naflexvit.NaFlexVit,), {"init_weights": lambda *arguments, **settings: None}
        )
        return bare_class(config, num_classes=0)

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Store the position table channel by channel, as transformers up to 5.23 does.

        For images one patch wide, torch 2.15 resizes such a table differently than the filters say, and timm's own
        layout as they say. The layout stays, because another one would change the vectors of all other images in their
        last bits.
        """
        del device
        if module.embeds is not None and module.embeds.pos_embed is not None:
            table = module.embeds.pos_embed
            table.data = table.data.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)

    def filter_places(self, num_rows: int, num_columns: int) -> NDArray[np.int64]:
        """Find the filters of each patch of a grid among those of `filtered_positions`, by row and column; (N, 2)."""
        sides = np.array([num_rows, num_columns])
        lengths = np.full(2, sides.max()) if self.pos_embed_ar_preserving else sides
        places = np.stack(np.divmod(np.arange(num_rows * num_columns), num_columns), 1)
        found: NDArray[np.int64] = (places + lengths * (lengths - 1) // 2).astype(np.int64)
        return found

    def filtered_positions(self, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what computes positions as products of the table with filters, instead of a resize to each grid.

        It maps the `filter_places` of one grid's patches to (N, D), so one traced graph takes grids of every size.
        """
        embeds, filters = module.embeds, self._filters()  # (1 + 2 + ... + the longest side, S)

        def compute(places_N2: torch.Tensor) -> torch.Tensor:
            along_y, along_x = filters[places_N2[:, 0]], filters[places_N2[:, 1]]
            if self.factorized_pos_embed:
                positions: torch.Tensor = along_y @ embeds.pos_embed_y[0] + along_x @ embeds.pos_embed_x[0]
            else:
                weights_NSS = along_y[:, :, None] * along_x[:, None]
                positions = weights_NSS.flatten(1) @ embeds.pos_embed.flatten(0, 2)
            return positions

        return compute

    @property
    def _resizing(self) -> dict[str, Any]:
        """Settings by which torch resizes the one table."""
        return {
            "mode": self.pos_embed_interp_mode,
            "align_corners": self.pos_embed_align_corners,
            "antialias": self.pos_embed_antialias,
        }

    def _filters(self) -> torch.Tensor:
        """Compute how much each position of a table's side contributes to each position of a side of every length."""
        import torch
        from torch.nn.functional import interpolate

        if self.factorized_pos_embed:
            settings: dict[str, Any] = {"mode": "bilinear", "align_corners": False, "antialias": False}
        else:
            settings = self._resizing
        table_1SS2 = torch.eye(self.grid_side)[None, :, :, None].repeat(1, 1, 1, 2)
        sides = range(1, self.max_patches + 1)
        return torch.cat([interpolate(table_1SS2, size=(side, 2), **settings)[0, :, :, 0].T for side in sides])

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> PatchGrids:
        """Lay out frames in a rectangle as wide as the longest; raises a ModelError if grids don't match."""
        from shards.layouts import PatchGrids

        if grids is None:
            raise ModelError(f"images of a {self.label} come with their grids of patches, and these have none")
        layout = PatchGrids.of(grids, self.num_prefix_tokens)
        if not (lengths.equal(layout.patches_per_row) or lengths.equal(layout.elements_per_row)):
            raise ModelError(
                f"pixels: rows of {lengths.tolist()[:5]} patches or tokens, their grids (frames, rows, columns of "
                f"patches) are {grids.tolist()[:5]}; decode with the model folder's preprocess"
            )
        return layout

    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor | None:
        """Count the tokens of a frame of each row, int64 (R,)."""
        return None if rows.grids is None else rows.grids[:, 1:].long().prod(1) + self.num_prefix_tokens

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return the lengths of images that use up the budget, as most do."""
        import torch

        del num_tokens
        return torch.full((num_rows,), self.max_patches)

    def sample_grids(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return grids of these lengths, as square as possible."""
        import torch

        sides = [next(side for side in range(isqrt(n), 0, -1) if n % side == 0) for n in lengths.tolist()]
        return torch.tensor([(1, side, n // side) for side, n in zip(sides, lengths.tolist(), strict=True)]).int()

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of a token, (D,)."""
        del layer
        return (self.width,)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches, class and register tokens, and positions; (patches of all rows, P) to (F, L, D)."""
        import torch

        embeds = module.embeds
        x_FND = embeds.proj(layout.patches.pad(values))
        if self.pos_embed != "none":
            layout.add_positions(x_FND, partial(self._positions, embeds, x_FND.dtype))
        tokens = [each for each in (embeds.cls_token, embeds.reg_token) if each is not None]
        x_FLD = torch.cat([*(each.expand(x_FND.shape[0], -1, -1) for each in tokens), x_FND], 1)
        normed: torch.Tensor = module.norm_pre(x_FLD)
        return normed

    def _positions(self, embeds: Any, dtype: torch.dtype, num_rows: int, num_columns: int) -> torch.Tensor:
        """Resize the table of positions to a grid, (1, N, D); timm's own code copies to the device for each size."""
        sides = (num_rows, num_columns)
        sizes = (max(sides),) * 2 if self.pos_embed_ar_preserving else sides
        if self.factorized_pos_embed:
            tables = (embeds.pos_embed_y, embeds.pos_embed_x)
            y_1RD, x_1CD = (
                _resize(table, (size,), mode="linear")[:, :side].to(dtype)
                for table, size, side in zip(tables, sizes, sides, strict=True)
            )
            return (y_1RD[:, :, None] + x_1CD[:, None]).flatten(1, 2)
        resized = _resize(embeds.pos_embed, sizes, **self._resizing)
        return resized[:, :num_rows, :num_columns].flatten(1, 2).to(dtype)

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run blocks in order, without attention to padding; (F, L, D) to (F, L, D)."""
        mask = layout.added_mask(x_FLD)
        for layer in range(layers.start, layers.stop):
            x_FLD = module.blocks[layer](x_FLD, attn_mask=mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run timm's last norm and pooling in float32, without padding; (F, L, D) to (F, D)."""
        # The norm works token by token: if only the class token is kept, the others need no norm.
        x_FLD = x_FLD[:, :1] if self.pool == "token" else x_FLD
        normed = module.norm(x_FLD.float())
        pooled: torch.Tensor = module.forward_head(normed, pre_logits=True, patch_valid=layout.is_patch)
        return pooled

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by timm's own forward functions, with timm's own mask."""
        layout = self.layout(rows.lengths, rows.grids).move_to(lambda each: each.to(rows.values.device))
        patches, is_patch = layout.patches.pad(rows.values), layout.is_patch
        features = module.forward_features(patches, patch_coord=layout.coordinates(), patch_valid=is_patch)
        pooled: torch.Tensor = module.forward_head(**features, pre_logits=True)
        return pooled


def _resize(table: torch.Tensor, sizes: tuple[int, ...], **settings: Any) -> torch.Tensor:
    """Resize a table, (1, sides, D), to other sides in float32; one that has them is returned as it is."""
    from torch.nn.functional import interpolate

    if table.shape[1:-1] == sizes:
        return table
    return interpolate(table.movedim(-1, 1).float(), size=sizes, **settings).movedim(1, -1)


def _read_siglip2(theirs: Any, names: frozenset[str], where: Path) -> NaFlexTower:
    """Read the configuration of a NaFlex vision tower; its patch budget comes from the image processor."""
    del names
    fields, side = vision_fields(theirs, where), isqrt(theirs.num_patches)
    if side**2 != theirs.num_patches:
        raise ModelError(f"{where}: vision_config.num_patches = {theirs.num_patches}; a position table is a square")
    return check_settings(
        NaFlexTower,
        where,
        theirs,
        {"num_channels": 3, "vision_use_head": True},
        **(fields | {"image_size": side * fields["patch_size"]}),
        max_patches=theirs.num_patches,
        pos_embed_interp_mode="bilinear",
        activation=vision_activation(theirs.hidden_act, where),
    )


def siglip2_vision_names(name: str, names: frozenset[str]) -> tuple[str, ...]:
    """Return transformers' names of one of a NaFlexVit's tensors: those of the fixed tower's patches and table."""
    name = name.replace("embeds.proj", "patch_embed.proj").removeprefix("embeds.")
    return siglip_vision_names(name, names)


TOWERS = (NaFlexTower,)
IMPORTS = {
    "siglip2_vision_model": TowerImport(
        "Siglip2VisionConfig",
        _read_siglip2,
        siglip2_vision_names,
        ignored=SIGLIP_IMPORTS["siglip_vision_model"].ignored,
        rows=SIGLIP_IMPORTS["siglip_vision_model"].rows,
        flattened=("embeds.pos_embed",),
    )
}
