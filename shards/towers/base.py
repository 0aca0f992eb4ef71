"""Interface of a tower: all that the rest of the project asks a family about.

A family is one subclass in one file. Its fields are the tower's section of config.json, its methods are of two kinds:
arithmetic, which plans need and which imports no torch; and the work on a module that `build` made of the library's
own parts. Names of tensors are those of that library, relative to the tower.

Legend: `F` images (frames) or captions, `N` elements of a batch's inputs one after the other, `L` tokens of one input,
`D` width of the tower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from shards.ranges import LayerRange
from shards.schema import ModelSection

if TYPE_CHECKING:
    import torch

    from shards.layouts import Layout

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Part = Literal["front", "layers", "head"]

PARTS: tuple[Part, ...] = ("front", "layers", "head")


@dataclass(frozen=True)
class TowerFlops:
    """Operations of one tower for one input.

    A multiply and an add count as two operations. Norms, activations, biases and softmax are left out: they are a few
    percent, and about the same share of every layer.

    Attributes:
        front: operations of the embeddings (and stem), which belong to the first layer.
        layer: operations of one layer.
        head: operations of norm and pooling, which belong to the last layer.
    """

    front: float
    layer: float
    head: float


@dataclass(frozen=True)
class TowerImport:
    """Reading of one kind of tower from a checkpoint of transformers.

    Attributes:
        config_class: name of transformers' class of its configuration.
        read: makes the tower of that configuration, the names of its tensors (without weights none: then it has what
            the library's class has), and the path for messages; a ModelError says what can't be built.
        theirs: finds the checkpoint's tensors of one of ours: of our name, and all of their names. Several are
            concatenated. Names are relative to the tower on both sides; `head.` begins those of the projection head.
        ignored: prefixes of the names of tensors that an encoder doesn't need.
        has_projection: whether the checkpoint's tower has the projection into the common space among its own layers.
        rows: by the end of our name, which rows of the checkpoint's tensor ours is: (first, stop, parts) counts parts
            of equal size, so (0, 1, 3) is its first third. All of them where no end is named.
        combined: by our name, what computes ours of the checkpoint's tensors where joining doesn't.
        positions: how transformers fits them to images of another size than the configuration's: not at all; by
            rotation, of any size; by resampling their table, antialiased or not.
        flattened: our names of tensors that the checkpoint has as a matrix: all dimensions but the last one are one.
        has_pooled_output: whether the checkpoint's class pools; without that, transformers' class of two arbitrary
            towers computes no features of it.
    """

    config_class: str
    read: Callable[[Any, frozenset[str], Path], Tower]
    theirs: Callable[[str, frozenset[str]], tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    has_projection: bool = False
    rows: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    combined: Mapping[str, Callable[[list[torch.Tensor]], torch.Tensor]] = field(default_factory=dict)
    positions: Literal["fixed", "rotary", "resampled", "antialiased"] = "fixed"
    flattened: tuple[str, ...] = ()
    has_pooled_output: bool = True

    def rows_of(self, name: str) -> tuple[int, int, int] | None:
        """Find which rows of the checkpoint's tensor one of ours is; None for all of them."""
        return next((rows for end, rows in self.rows.items() if name.endswith(end)), None)


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers with two towers.

    Attributes:
        vision_type: `model_type` of its vision tower; None where its configuration names it.
        text_type: the same of its text tower.
        has_projections: whether it has them; without them, the text tower's own is the only one.
    """

    vision_type: str | None = None
    text_type: str | None = None
    has_projections: bool = True

    @property
    def types(self) -> dict[str, str | None]:
        """Kinds of its towers, by side."""
        return {"vision": self.vision_type, "text": self.text_type}


class Tower(ModelSection):
    """One tower: its section of config.json, and what it can do."""

    label: ClassVar[str]
    """Name of the family in displays."""
    layer_prefix: ClassVar[str]
    """Prefix of the names of the layers' tensors, before the layer's number."""
    depth_field: ClassVar[str]
    """Name of the field that holds the number of layers."""
    head_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of the tensors of norm and pooling."""
    float32_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of tensors outside the head that stay in float32, whatever the compute dtype."""
    lookup_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the names of embedding tables, of which a lookup reads a few rows only: never int8."""

    # Arithmetic, without torch.

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Width of the activations between layers: `D`."""

    @abstractmethod
    def front_shapes(self) -> Shapes:
        """Compute the shapes of the embeddings' tensors, by name."""

    @abstractmethod
    def block_shapes(self) -> Shapes:
        """Compute the shapes of a usual layer's tensors, by name below the layer's own prefix."""

    def shapes_of(self, number: int) -> Shapes:
        """Compute the shapes of the tensors of one set of weights; in most families all sets have the same."""
        del number
        return self.block_shapes()

    @abstractmethod
    def head_shapes(self) -> Shapes:
        """Compute the shapes of the tensors of norm and pooling, by name."""

    @abstractmethod
    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one input of `num_tokens`; a tower whose inputs all have as many ignores it."""

    @abstractmethod
    def workspace_values(self, num_tokens: int) -> int:
        """Count the values that are held at once while one input is computed."""

    @abstractmethod
    def input_bytes(self, num_tokens: int) -> int:
        """Compute the bytes of one input in front of the first layer."""

    @abstractmethod
    def tokens_in(self, num_tokens: int) -> int:
        """Compute the tokens of one input inside the layers, `L`, of the planned number."""

    @property
    def has_head_pooler(self) -> bool:
        """Whether a dense layer and tanh follow pooling, as part of the projection head."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Describe the tower in a few words, with its sizes."""

    def weights_of(self, layer: int) -> int:
        """Find the number of the weights that a layer applies; layers of some families share theirs."""
        return layer

    def weight_numbers(self, layers: LayerRange) -> list[int]:
        """Find the numbers of all weights that a range of layers applies."""
        return sorted({self.weights_of(layer) for layer in range(layers.start, layers.stop)})

    def at_depth(self, num_layers: int) -> Self:
        """Make the tower with another number of layers, one or more, all else equal."""
        return self.model_copy(update={self.depth_field: num_layers})

    def shapes(self, layers: LayerRange) -> Shapes:
        """Compute the shapes of all tensors of a range of layers, with front and head where it holds them."""
        shapes: Shapes = self.front_shapes() if layers.holds_front() else {}
        for number in self.weight_numbers(layers):
            prefix = self.prefix_of(number)
            shapes |= {prefix + name: shape for name, shape in self.shapes_of(number).items()}
        return shapes | (self.head_shapes() if layers.holds_head(self.num_layers) else {})

    def prefix_of(self, number: int) -> str:
        """Give the prefix of the names of the tensors of one set of weights."""
        return f"{self.layer_prefix}{number}."

    def part_of(self, name: str) -> Part:
        """Find the part of the tower that a tensor belongs to."""
        if name.startswith(self.layer_prefix):
            return "layers"
        return "head" if name.startswith(self.head_prefixes) else "front"

    def fresh_value(self, name: str) -> float | None:
        """Give the value that a tensor of a fresh tower is filled with, where the family has a rule of its own."""
        del name
        return None

    # Work on a module.

    @abstractmethod
    def build(self) -> Any:
        """Build the whole tower on torch's current default device; its weights are loaded later."""

    @abstractmethod
    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove the modules that a shard with these layers doesn't own; the others keep their names."""

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the buffers that are in no weight file, of a module whose weights are loaded."""

    @abstractmethod
    def layer_modules(self, module: Any) -> Any:
        """Give the module that holds the layers; its linear layers are those that int8 replaces."""

    @abstractmethod
    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> Layout:
        """Lay out inputs for the layers, on the host.

        Args:
            lengths: int64 (R,), on the CPU, all 1 or more.
            grids: int32 (R, 3), on the CPU: frames, patch rows and patch columns of each row, of a tower whose images
                keep their own proportions.
        """

    @abstractmethod
    def tokens_per_sequence(self, lengths: torch.Tensor, grids: torch.Tensor | None) -> torch.Tensor | None:
        """Count the tokens by which rows are grouped, so that a group has little padding.

        Args:
            lengths: int64 (R,), on the CPU, all 1 or more: elements of each row.
            grids: as `layout` takes them.

        Returns:
            int64 (R,), on the CPU; None where all inputs have as many.
        """

    @abstractmethod
    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Make the lengths of a usual batch, int64 (R,), each an input; the first and the mean are `num_tokens`."""

    def sample_grids(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """Make the grids of inputs of these lengths, int32 (R, 3), where rows have some."""
        del lengths
        return None

    @abstractmethod
    def sample_input(self, lengths: torch.Tensor) -> torch.Tensor:
        """Make random inputs of these lengths."""

    @abstractmethod
    def input_layout(self) -> tuple[torch.dtype, Shape]:
        """Give dtype and shape of one element of the tower's input: a frame, or a token id."""

    @abstractmethod
    def activation_shape(self) -> Shape:
        """Give the shape of one element of an activation in transit: (L, D), or (D,)."""

    @abstractmethod
    def check_input(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Check the input of the front; on a GPU a wrong id would end the whole process.

        Raises:
            ModelError: it doesn't fit the tower.
        """

    @abstractmethod
    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed the inputs; normalised pixels (F, 3, H, W) or token ids (N,), to (F, L, D).

        Args:
            module: what `build` made, whole or pruned.
            values: (F, 3, H, W) or (N,).
            layout: of the inputs, as `layout` made it.
        """

    @abstractmethod
    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run a range of layers; (F, L, D) to (F, L, D).

        Args:
            module: what `build` made, whole or pruned.
            layers: those to run; the module has them.
            x_FLD: activations, in the compute dtype.
            layout: of the inputs, as `layout` made it.
        """

    @abstractmethod
    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run norm and pooling in float32; (F, L, D) to (F, D).

        Args:
            module: what `build` made, whole or pruned.
            x_FLD: activations behind the last layer.
            layout: of the inputs, as `layout` made it.
        """

    @abstractmethod
    def reference(
        self, module: Any, values: torch.Tensor, lengths: torch.Tensor, grids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute pooled features by the library's own forward function.

        Args:
            module: the whole tower.
            values: as the front takes them.
            lengths: int64 (R,), on the CPU, all 1 or more.
            grids: as `layout` takes them.

        Returns:
            (F, D).
        """

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""


def linear_shapes(name: str, num_in: int, num_out: int, *, bias: bool = True) -> Shapes:
    """Give the shapes of a linear layer, (out, in) as in torch.

    Args:
        name: name of the layer.
        num_in: width of its input.
        num_out: width of its output.
        bias: whether it has one.
    """
    weight: Shapes = {f"{name}.weight": (num_out, num_in)}
    return weight | ({f"{name}.bias": (num_out,)} if bias else {})


def norm_shapes(name: str, width: int) -> Shapes:
    """Give the shapes of a norm with bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def attention_flops(num_tokens: int, width: int, mlp_width: int) -> float:
    """Count the operations of a transformer block.

    For L tokens of width D and an MLP of M: q, k, v take 2*L*D*3D, scores and their sum 2*L*L*D each, the output
    projection 2*L*D*D, the MLP 2*L*D*M twice.
    """
    return 8 * num_tokens * width**2 + 4 * num_tokens**2 * width + 4 * num_tokens * width * mlp_width
