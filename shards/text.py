"""Text tower: transformers' AlbertModel, whole or pruned to a range of applications of its layer groups.

Legend: `R` captions, `T` tokens of the longest one, `N` tokens of all captions, `D` width, `E` embedding size.
Source: transformers 5.23, `AlbertModel.forward` and `AlbertTransformer.forward`, whose steps these functions follow.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shards.compat import deferred_compiler
from shards.config import TextConfig
from shards.errors import ModelError
from shards.ranges import LayerRange


def build_albert(config: TextConfig) -> Any:
    """Build the whole ALBERT on torch's current default device, with attention by torch's fused kernel."""
    with deferred_compiler():
        from transformers import AlbertConfig, AlbertModel
        from transformers.initialization import no_init_weights

    # Our settings have AlbertConfig's names, but for the pooling.
    albert_config = AlbertConfig(**config.model_dump(exclude={"pool"}), attn_implementation="sdpa")
    with no_init_weights():  # all weights are loaded; and on the meta device, torch's compiler would make them
        return AlbertModel(albert_config, add_pooling_layer=config.pool == "pooler")


def prune_albert(albert: Any, config: TextConfig, layers: LayerRange) -> None:
    """Remove all modules that a shard with these applications doesn't own; the others keep their names.

    Args:
        albert: the whole tower.
        config: its configuration.
        layers: applications of layer groups that the shard holds.
    """
    groups = sorted({config.group_of(layer) for layer in range(layers.start, layers.stop)})
    all_groups = albert.encoder.albert_layer_groups
    albert.encoder.albert_layer_groups = nn.ModuleDict({str(group): all_groups[group] for group in groups})
    if not layers.holds_front():
        albert.embeddings = albert.encoder.embedding_hidden_mapping_in = None
    if not layers.holds_head(config.num_hidden_layers):
        albert.pooler = None


def fill_albert_buffers(albert: Any, device: torch.device) -> None:
    """Fill the buffers that are in no weight file; on the meta device they have no values."""
    if albert.embeddings is not None:
        shape = albert.embeddings.position_ids.shape
        albert.embeddings.position_ids = torch.arange(shape[-1], device=device).expand(shape)
        albert.embeddings.token_type_ids = torch.zeros(shape, dtype=torch.long, device=device)


def check_tokens(ids_N: torch.Tensor, lengths: torch.Tensor, config: TextConfig) -> None:
    """Check the input of the embeddings; on a GPU a wrong id would end the whole process.

    Args:
        ids_N: int32 (N,), token ids of all captions.
        lengths: int64 (R,), tokens of each caption.
        config: configuration of the tower.

    Raises:
        ModelError: an id is outside the vocabulary, or a caption is longer than the position table.
    """
    longest, vocab_size = int(lengths.max()), config.vocab_size
    if longest > config.max_position_embeddings:
        raise ModelError(
            f"token ids: a caption of {longest} tokens, the model takes {config.max_position_embeddings}; "
            "cut captions to the model folder's preprocess.max_caption_tokens"
        )
    if not 0 <= int(ids_N.min()) <= int(ids_N.max()) < vocab_size:
        raise ModelError(
            f"token ids: found {int(ids_N.min())} to {int(ids_N.max())}, the vocabulary is [0, {vocab_size}); "
            "use the model folder's own tokenizer.json"
        )


@dataclass(frozen=True)
class Padding:
    """Layout of one batch's captions in a rectangle of the longest one's width.

    Attributes:
        shape: number of captions, tokens of the longest: (R, T).
        places: int64 (N,), position of each token in the flattened rectangle; None without any padding.
        mask: bool (R, 1, T, T), whether a token may be attended to; None where all may.
    """

    shape: tuple[int, int]
    places: torch.Tensor | None
    mask: torch.Tensor | None

    @staticmethod
    def of(lengths: torch.Tensor, device: torch.device) -> "Padding":
        """Lay out captions of these lengths, all 1 or more.

        Args:
            lengths: int64 (R,), on the CPU.
            device: device of the captions.
        """
        num_rows, longest = len(lengths), int(lengths.max())
        if int(lengths.min()) == longest:
            return Padding((num_rows, longest), None, None)
        is_token = torch.arange(longest) < lengths[:, None]
        places = is_token.flatten().nonzero().squeeze(1)
        mask = is_token.to(device)[:, None, None, :].expand(-1, 1, longest, -1)
        return Padding((num_rows, longest), places.to(device), mask)

    def pad(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Convert packed (N, ...) to padded (R, T, ...)."""
        if self.places is None:
            return values.view(*self.shape, *values.shape[1:])
        padded = values.new_full((self.shape[0] * self.shape[1], *values.shape[1:]), fill)
        padded[self.places] = values
        return padded.view(*self.shape, *values.shape[1:])

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Convert padded (R, T, ...) to packed (N, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.places is None else flat[self.places]


def embed_tokens(albert: Any, ids_RT: torch.Tensor) -> torch.Tensor:
    """Run token, position and type embeddings, then the mapping to the layers' width; (R, T) to (R, T, D)."""
    tokens: torch.Tensor = albert.encoder.embedding_hidden_mapping_in(albert.embeddings(ids_RT))
    return tokens


def run_albert_layers(
    albert: Any, config: TextConfig, layers: LayerRange, x_RTD: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Apply a range of layers, each with the weights of its group; (R, T, D) to (R, T, D).

    Args:
        albert: the tower, whole or pruned.
        config: its configuration.
        layers: applications of layer groups.
        x_RTD: padded tokens, in the compute dtype.
        mask: bool (R, 1, T, T), as `Padding.mask`; None where all tokens may be attended to.
    """
    for layer in range(layers.start, layers.stop):
        x_RTD = albert.encoder.albert_layer_groups[str(config.group_of(layer))](x_RTD, mask)
    return x_RTD


def pool_albert_tokens(albert: Any, config: TextConfig, x_RTD: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pool each caption's tokens into one vector, in float32; (R, D).

    Args:
        albert: the tower, whose pooler is used where it has one.
        config: its configuration.
        x_RTD: padded tokens after the last layer.
        lengths: int64 (R,), tokens of each caption.
    """
    if config.pool == "mean":
        lengths = lengths.to(x_RTD.device)
        is_token = torch.arange(x_RTD.shape[1], device=x_RTD.device) < lengths[:, None]
        return (x_RTD.float() * is_token[:, :, None]).sum(1) / lengths[:, None]
    first: torch.Tensor = x_RTD[:, 0].float()
    return torch.tanh(albert.pooler(first)) if config.pool == "pooler" else first
