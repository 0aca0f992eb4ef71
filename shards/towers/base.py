"""Interface of a tower: everything that the rest of the project asks of a family.

A family is one subclass in one file. Its fields are the tower's section of config.json. Its methods are either
arithmetic for plans (no torch) or work on the module that `build` made from the library's own parts. Tensor names are
the library's, relative to the tower.

Legend: `F` images (frames) or captions, `N` elements of a batch's inputs in sequence, `L` tokens of one input, `D`
width of the tower.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from shards.file_schema import ModelSection
from shards.ranges import LayerRange

if TYPE_CHECKING:
    import torch

    from shards.layouts import Layout

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Part = Literal["front", "layers", "head"]

PARTS: tuple[Part, ...] = ("front", "layers", "head")
SHARE_TOKENS = 256  # of a caption, by which layers of several kinds are compared: as many as a picture has
CLIP = "{clip}"
"""Mark in `OneTowerImport.clip_frame`."""


class Rows(Protocol):
    """Rows of one side, as `shards.activations.TowerState` has them."""

    @property
    def values(self) -> torch.Tensor:
        """Values of all rows, one after the other."""

    @property
    def lengths(self) -> torch.Tensor:
        """Number of values of each row."""

    @property
    def grids(self) -> torch.Tensor | None:
        """Frames, patch rows and patch columns of each row."""

    @property
    def text(self) -> Rows | None:
        """Token ids of a text that each image comes with, or of all that a clip is in."""


@dataclass(frozen=True)
class TowerFlops:
    """Operations of one tower for one input; a multiply and an add count as two.

    Embeddings and stem (`front`) belong to the first layer, norm and pooling (`head`) to the last. Norms, activations,
    biases and softmax are left out: they are a few percent of every layer.
    """

    front: float
    layer: float
    head: float


@dataclass(frozen=True)
class TowerImport:
    """How to read one kind of tower from a transformers checkpoint. Names are relative to the tower on both sides.

    Attributes:
        config_class: name of transformers' configuration class.
        read: makes the tower from that configuration, the names of its tensors (empty before weights exist: then the
            library class's own) and the path for messages; raises a ModelError for what can't be built.
        theirs: finds the checkpoint's tensors for one of the tower, given its name and all of their names; several are
            concatenated. `head.` begins the names of the projection head.
        ignored: name prefixes of tensors that an encoder doesn't need.
        has_projection: whether the checkpoint's tower itself contains the projection into the common space.
        rows: by the end of our name, the rows to take from the checkpoint's tensor: (first, stop, parts) counts equal
            parts, so (0, 1, 3) is the first third. All rows where no entry matches.
        combined: by our name, the function that computes our tensor where joining isn't enough.
        positions: how transformers adapts positions to another image size: not at all, by rotation, or by resampling
            the table, bicubically with or without antialiasing, or linearly with it.
        flattened: our names of tensors that the checkpoint stores as a matrix (all dimensions but the last are one).
        has_pooled_output: whether the checkpoint's class pools; if not, transformers' dual-encoder class can't use it.
    """

    config_class: str
    read: Callable[[Any, frozenset[str], Path], Tower]
    theirs: Callable[[str, frozenset[str]], tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    has_projection: bool = False
    rows: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    combined: Mapping[str, Callable[[list[torch.Tensor]], torch.Tensor]] = field(default_factory=dict)
    positions: Literal["fixed", "rotary", "resampled", "antialiased", "linear"] = "fixed"
    flattened: tuple[str, ...] = ()
    has_pooled_output: bool = True

    def rows_of(self, name: str) -> tuple[int, int, int] | None:
        """Return the rows of the checkpoint's tensor that make the tower's; None for all."""
        return next((rows for end, rows in self.rows.items() if name.endswith(end)), None)


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a checkpoint has one of our tensors: key of a prefix, the name behind it, and rows as in `TowerImport`."""

    prefix: str
    name: str
    rows: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class OneTowerImport:
    """How to read a model whose pictures pass through the layers of its texts from a checkpoint of transformers.

    Attributes:
        config_class: name of transformers' configuration class.
        read: makes the vision tower, with its decoder, or the text tower of a checkpoint without a vision part, from
            that configuration and the path for messages; raises a ModelError for what can't be built.
        prefixes: by side, what begins the checkpoint's names of a tower's tensors, behind `model.` if there is that.
        ignored: name prefixes of tensors that an encoder doesn't need.
        older: as `prefixes`, but of whole names, for checkpoints of older releases; empty if there is no other form.
        place: finds a tensor that isn't under its side's prefix with its own name, given our whole name and the number
            of the decoder's layers; None for all others.
        is_chat: whether a chat template writes a conversation around an item; else the tokeniser's own tokens stand
            around it.
        video_processor: name of the library's class that prepares a clip's frames.
        clip_frame: what its processor writes for the frames that are computed together, as in `ClipForm`, with a mark
            in place of what stands around a whole clip.
        clip_shares_pixels: whether the frames of a clip share the pixels that it may have.
    """

    config_class: str
    read: Callable[[Any, Path], Any]
    prefixes: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    older: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[str, int], CheckpointPlace | None] | None = None
    is_chat: bool = True
    video_processor: str = "Qwen2VLVideoProcessor"
    clip_frame: str = "{place}"
    clip_shares_pixels: bool = False

    def place_of(self, name: str, num_layers: int) -> CheckpointPlace:
        """Return the place of one of our tensors; arguments as for `place`."""
        side, _, inner = name.partition(".")
        found = None if self.place is None else self.place(name, num_layers)
        return found or CheckpointPlace(side, inner)

    def prefixes_in(self, names: Collection[str]) -> dict[str, str]:
        """Return by side what begins the names of a tower's tensors in a checkpoint with these names."""
        outer = "model." if any(name.startswith("model.") for name in names) else ""
        whole = {side: outer + prefix for side, prefix in self.prefixes.items()}
        is_older = self.older and not any(name.startswith(whole["text"]) for name in names)
        return dict(self.older) if is_older else whole


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers with two towers; a `model_type` is None where the configuration names it.

    Without projections (`has_projections`), the text tower's own is the only one, if it has one.
    """

    vision_type: str | None = None
    text_type: str | None = None
    has_projections: bool = True

    @property
    def types(self) -> dict[str, str | None]:
        """Return the `model_type` of each side."""
        return {"vision": self.vision_type, "text": self.text_type}


class Tower(ModelSection):
    """One tower: its section of config.json, and what it can do."""

    label: ClassVar[str]
    """Name of the family for display."""
    layer_prefix: ClassVar[str]
    """Prefix of the layers' tensor names, before the layer number."""
    depth_field: ClassVar[str]
    """Name of the field that holds the number of layers."""
    head_prefixes: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of the tensors of norm and pooling."""
    float32_prefixes: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors outside the head that stay in float32, whatever the compute dtype."""
    lookup_prefixes: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of embedding tables: never int8, because a lookup reads only a few rows."""
    pads_rows: ClassVar[bool] = True
    """Whether rows of different lengths may be computed together, the shorter ones padded."""
    kernels_per_layer: ClassVar[int] = 15
    """Kernels that a layer launches in half precision, not compiled; each step of a norm or a rotation may be one."""

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
        """Return the shapes of the embeddings' tensors, by name."""

    @abstractmethod
    def block_shapes(self) -> Shapes:
        """Return the shapes of a typical layer's tensors, by name below the layer's prefix."""

    def shapes_of(self, number: int) -> Shapes:
        """Return the tensor shapes of one set of weights; the same for all sets in most families."""
        del number
        return self.block_shapes()

    @abstractmethod
    def head_shapes(self) -> Shapes:
        """Return the shapes of the tensors of norm and pooling, by name."""

    @abstractmethod
    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one input; towers with inputs of fixed length ignore `num_tokens`."""

    @abstractmethod
    def workspace_values(self, num_tokens: int) -> int:
        """Count the values held at once while one input is computed."""

    @abstractmethod
    def input_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one input before the first layer."""

    @abstractmethod
    def tokens_in(self, num_tokens: int) -> int:
        """Return the tokens of one input inside the layers, `L`, for the planned number."""

    @property
    def inputs_per_row(self) -> int:
        """Inputs of a typical row that is computed whole: the frames of a clip, for a tower of clips; else 1."""
        return 1

    @property
    def merge_size(self) -> int:
        """Return the side of the squares of patches that become one token."""
        return 1

    def layer_flops(self, num_tokens: int) -> list[float]:
        """Count the operations of each layer for one input; empty if all layers are equal."""
        del num_tokens
        return []

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """Operations of each layer relative to their mean, as its seconds are estimated; empty if all are equal."""
        flops = self.layer_flops(SHARE_TOKENS)
        return tuple(each * len(flops) / sum(flops) for each in flops)

    @property
    def usual_layers(self) -> tuple[int, int] | None:
        """Number of usual layers that one of its layers is as much work as, and their values; None: it is one."""
        return None

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """A layer of each kind, by whose seconds a tower is measured, and how many there are; one kind in most."""
        return ((0, self.num_layers),)

    def values_at(self, layer: int, num_tokens: int) -> int:
        """Return the values of one input's activation between layers, in front of a layer."""
        del layer
        return self.tokens_in(num_tokens) * self.dim

    @property
    def pooled_dim(self) -> int:
        """Width of the vector that pooling gives the projection head."""
        return self.dim

    @property
    def has_head_pooler(self) -> bool:
        """Whether a dense layer and tanh follow pooling, as part of the projection head."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Describe the tower and its sizes in a few words."""

    def weights_of(self, layer: int) -> int:
        """Return the number of the set of weights that a layer applies; some families share weights between layers."""
        return layer

    def weight_numbers(self, layers: LayerRange) -> list[int]:
        """Return the numbers of all sets of weights that a range of layers applies."""
        return sorted({self.weights_of(layer) for layer in range(layers.start, layers.stop)})

    def at_depth(self, num_layers: int) -> Self:
        """Copy the tower with another number of layers (at least one)."""
        return self.model_copy(update={self.depth_field: num_layers})

    def keep_layers(self, layers: Sequence[int]) -> Self:
        """Copy the tower with some of its layers, by their numbers in order."""
        return self.at_depth(len(layers))

    def shapes(self, layers: LayerRange) -> Shapes:
        """Return all tensor shapes of a range of layers, including front and head where the range holds them."""
        shapes: Shapes = self.front_shapes() if layers.holds_front() else {}
        for number in self.weight_numbers(layers):
            prefix = self.prefix_of(number)
            shapes |= {prefix + name: shape for name, shape in self.shapes_of(number).items()}
        return shapes | (self.head_shapes() if layers.holds_head(self.num_layers) else {})

    def prefix_of(self, number: int) -> str:
        """Return the prefix of the tensor names of one set of weights."""
        return f"{self.layer_prefix}{number}."

    def part_of(self, name: str) -> Part:
        """Return the part of the tower that a tensor belongs to."""
        if name.startswith(self.layer_prefix):
            return "layers"
        return "head" if name.startswith(self.head_prefixes) else "front"

    def held_dtype(self, name: str, shape: Shape, dtype: str) -> str:
        """Choose the dtype that a tensor is held in, given the compute dtype.

        The head, and whatever is computed in float32, stay in float32. With int8, linear weights are int8 (all matrices
        except embedding tables), and everything else is float32.
        """
        if self.part_of(name) == "head" or name.startswith(self.float32_prefixes):
            return "float32"
        if dtype == "int8" and (len(shape) != 2 or name.startswith(self.lookup_prefixes)):
            return "float32"
        return dtype

    def fresh_value(self, name: str) -> float | None:
        """Return the initial value of a tensor in a fresh tower, where the family has its own rule; else None."""
        del name
        return None

    # Work on a module.

    @abstractmethod
    def build(self) -> Any:
        """Build the whole tower on torch's current default device; weights are loaded later."""

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the buffers that no weight file holds, once the weights are loaded."""

    @abstractmethod
    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> Layout:
        """Lay out inputs for the layers, on the host.

        `lengths` is int64 (R,), on the CPU, all at least 1. `grids` is int32 (R, 3), on the CPU: frames, patch rows and
        patch columns of each row, for a tower whose images keep their proportions.
        """

    def arrange(self, rows: Rows, layers: LayerRange) -> Layout:
        """Lay out rows for a range of layers, on the host; all must have this side."""
        del layers
        return self.layout(rows.lengths, rows.grids)

    def input_lengths(self, lengths: torch.Tensor, layers: LayerRange) -> torch.Tensor:
        """Return the lengths of rows' inputs, given those in front of a range of layers; equal in most families.

        Rows are grouped by them, in all stages alike.
        """
        del layers
        return lengths

    @abstractmethod
    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor | None:
        """Count the tokens of each row, by which rows are grouped to limit padding; all must have this side.

        Returns int64 (R,), on the CPU; None where all inputs have the same number.
        """

    @abstractmethod
    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return the lengths of a typical batch, int64 (R,); the first and the mean are `num_tokens`."""

    def sample_grids(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """Return the grids of inputs of these lengths, int32 (R, 3); None for towers without grids."""
        del lengths
        return None

    @abstractmethod
    def sample_input(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return random inputs of these lengths."""

    @abstractmethod
    def input_layout(self) -> tuple[torch.dtype, Shape]:
        """Return dtype and shape of one element of the tower's input: a frame, or a token id."""

    @abstractmethod
    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of one element of an activation in transit: (L, D), or (D,).

        `layer` is the number of layers before it, in towers whose activations differ by that.
        """

    @abstractmethod
    def check_input(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Check the input of the front; raises a ModelError. On a GPU a wrong id would end the whole process."""

    @abstractmethod
    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed normalised pixels (F, 3, H, W) or token ids (N,) to (F, L, D). `module` may be pruned."""

    @abstractmethod
    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run a range of layers that the module has; (F, L, D) to (F, L, D), in the compute dtype."""

    @abstractmethod
    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run norm and pooling in float32 after the last layer; (F, L, D) to (F, D)."""

    @abstractmethod
    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features (F, D) by the library's forward function; images are normalised, as for `front`."""

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""


def linear_shapes(name: str, num_in: int, num_out: int, *, bias: bool = True) -> Shapes:
    """Return the shapes of a linear layer, (out, in) as in torch."""
    weight: Shapes = {f"{name}.weight": (num_out, num_in)}
    return weight | ({f"{name}.bias": (num_out,)} if bias else {})


def norm_shapes(name: str, width: int) -> Shapes:
    """Return the shapes of a norm with bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def attention_flops(num_tokens: int, width: int, mlp_width: int) -> float:
    """Count the operations of a transformer block.

    For L tokens of width D and an MLP of M: q, k, v take 2*L*D*3D, scores and their sum 2*L*L*D each, the output
    projection 2*L*D*D, the MLP 2*L*D*M twice.
    """
    return 8 * num_tokens * width**2 + 4 * num_tokens**2 * width + 4 * num_tokens * width * mlp_width
