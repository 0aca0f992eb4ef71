"""A model of timm that is held whole: ConvNeXt, FastViT (MobileCLIP), ResNet and others without layers of one width.

To plans and stages it is one layer, from pixels to the pooled vector. timm builds it by its name and arguments. Names
and shapes of its tensors and its work stand in config.json, as the import found them: plans read that without torch.

Legend: `F` images (frames), `H, W` sides in px, `D` width of the pooled vector. Source: timm 1.0.31, `create_model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from shards.file_schema import ModelSection
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Rows, Shape, Shapes, TowerFlops
from shards.towers.tower_kinds import VisionTower

if TYPE_CHECKING:
    import torch

# Arguments of timm that would load files, or make another kind of model.
_REFUSED_ARGUMENTS = ("pretrained", "checkpoint_path", "cache_dir", "features_only", "device", "dtype")

Argument = bool | int | float | str | None
Sides = Annotated[str, StringConstraints(pattern=r"^([1-9][0-9]{0,9}(x[1-9][0-9]{0,9})*)?$")]
"""Shape of a tensor, such as 96x3x4x4; empty for a single value."""


class WholeCosts(ModelSection):
    """Work of one image, counted operation by operation, as the import found it."""

    flops: float = Field(ge=0, description="floating-point operations")
    peak_values: int = Field(ge=1, description="most values held at once")
    steps: int = Field(1, ge=1, description="usual layers with as many operations, by which a GPU's time is estimated")
    step_values: int = Field(1, ge=1, description="values that such a layer holds")


class WholeTimmTower(VisionTower):
    """A model of timm in one layer, without its classifier; no training takes it."""

    label = "timm model"
    layer_prefix = ""
    depth_field = ""
    is_whole = True

    family: Literal["timm"] = "timm"
    architecture: str = Field(min_length=1, description="timm's name of the model")
    arguments: dict[str, tuple[Argument, ...] | Argument] = Field({}, description="arguments of timm's create_model")
    pool: str | None = Field(None, description="timm global_pool that takes the place of the model's own")
    image_size: int = Field(224, ge=1, description="side of the square image, px")
    width: int = Field(ge=1, description="size of the pooled vector")
    tensors: dict[str, Sides] = Field(min_length=1, description="shapes of the tensors by name, such as 96x3x4x4")
    tables: tuple[str, ...] = Field((), description="matrices that are no weights of linear layers: never int8")
    costs: WholeCosts = Field(description="work of one image; no fingerprint counts it")

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        refused = [name for name in self.arguments if name.startswith(_REFUSED_ARGUMENTS)]
        if refused:
            raise ValueError(f"arguments.{refused[0]} can't be given to timm here; leave it out")
        return self

    @property
    def num_layers(self) -> int:
        """One layer: the whole model."""
        return 1

    @property
    def dim(self) -> int:
        """Width of the pooled vector."""
        return self.width

    @property
    def side_px(self) -> int:
        """Side of the square image, px."""
        return self.image_size

    @property
    def num_tokens(self) -> int:
        """One vector."""
        return 1

    @property
    def num_prefix_tokens(self) -> int:
        """No class and register tokens."""
        return 0

    @property
    def usual_layers(self) -> tuple[int, int]:
        """Number of usual layers that it is as much work as, and the values that each of them holds."""
        return self.costs.steps, self.costs.step_values

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return f"{self.architecture} of timm, whole, {self.image_size} px to {self.width} values"

    def front_shapes(self) -> Shapes:
        """Return no shapes: the front hands on pixels."""
        return {}

    def block_shapes(self) -> Shapes:
        """Return the shapes of all tensors."""
        return {name: tuple(map(int, sides.split("x"))) if sides else () for name, sides in self.tensors.items()}

    def head_shapes(self) -> Shapes:
        """Return no shapes: the model pools by itself."""
        return {}

    def prefix_of(self, number: int) -> str:
        """Return no prefix: the layer is the whole model."""
        del number
        return ""

    def held_dtype(self, name: str, shape: Shape, dtype: str) -> str:
        """Keep BatchNorms in float32, as mixed precision does, and tables out of int8."""
        is_norm = f"{name.rpartition('.')[0]}.running_mean" in self.tensors
        if is_norm or (dtype == "int8" and name in self.tables):
            return "float32"
        return super().held_dtype(name, shape, dtype)

    def fresh_value(self, name: str) -> float | None:
        """Return the value of a scale without a dimension."""
        return None if self.tensors[name] else 1.0

    def flops(self, num_tokens: int) -> TowerFlops:
        """Return the operations for one image, as the import counted them."""
        del num_tokens
        return TowerFlops(0, self.costs.flops, 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Return the most values held at once."""
        del num_tokens
        return self.costs.peak_values

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of a frame's normalised pixels in front of the layer, (3, H, W), and behind it, (D,)."""
        return (self.width,) if layer else (3, self.image_size, self.image_size)

    def build(self) -> Any:
        """Build the model without its classifier; raises a ModelError if the installed timm can't."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            import timm
        name = self.architecture
        try:
            if ":" in name or not timm.is_model(name.partition(".")[0]):  # a name with a colon would be downloaded
                raise ValueError("it has no such model")
            model = timm.create_model(name, pretrained=False, **self.arguments)
            model.reset_classifier(0, **({} if self.pool is None else {"global_pool": self.pool}))
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelError(
                f"vision: timm {timm.__version__} can't build {name!r} with {self.arguments} and pool {self.pool!r} "
                f"({reason}); give a checkpoint of a model that it has"
            ) from None
        return model

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Let timm compute the tables that no weight file holds, such as places in windows."""
        import torch

        owners = list(computed_buffers(module))
        for owner, names in owners:
            for name in names:
                owner.register_buffer(name, torch.empty_like(getattr(owner, name), device=device), persistent=False)
        for owner, _ in owners:
            if hasattr(owner, "init_non_persistent_buffers"):  # the import compares what it gives
                owner.init_non_persistent_buffers()

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Hand on normalised pixels, (F, 3, H, W)."""
        del module, layout
        return values

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the model on normalised pixels; (F, 3, H, W) to (F, D)."""
        del layers, layout
        pooled_FD: torch.Tensor = module(x_FLD)
        return pooled_FD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Convert the pooled vectors to float32, (F, D)."""
        del module, layout
        return x_FLD.float()

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by timm's own forward functions."""
        pooled: torch.Tensor = module.forward_head(module.forward_features(rows.values), pre_logits=True)
        return pooled


def computed_buffers(module: Any) -> list[tuple[Any, list[str]]]:
    """Find the buffers that no weight file holds, by the module that has them."""
    stored = set(module.state_dict())
    found = []
    for prefix, owner in module.named_modules():
        inner = dict(owner.named_buffers(recurse=False))
        names = [name for name in inner if f"{prefix}.{name}".removeprefix(".") not in stored]
        found += [(owner, names)] if names else []
    return found


TOWERS = (WholeTimmTower,)
