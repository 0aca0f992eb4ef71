"""Encodes queries into the shared space, all but the towers: checks, decoding, tokens, batches."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.compat.locked_property import locked_cached_property
from embedder.errors import ConfigError, check_argument
from embedder.media.formats import IMAGE_FORMATS
from embedder.media.given_inputs import image_list, text_list
from embedder.media.media_errors import DecodeError
from embedder.media.patches import pixel_columns
from embedder.media.resize import Colour
from embedder.media.sandbox import SandboxedDecoder
from embedder.models.model_folder import Model, resize_spec
from embedder.steps.caption_encoder import CaptionEncoder
from embedder.storage.printable import is_text, printable, readable
from shards.model_settings import default_instruction, instructed_prompt, split_address
from shards.tokenizer import QueryText

if TYPE_CHECKING:
    from embedder.media.given_inputs import GivenImage

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.int32]]
Columns = dict[str, NDArray[Any]]
"""`pixels` of one image, and for images that keep their own proportions `image_grid`."""

Q = TypeVar("Q")

BATCH_ROWS = 32
MAX_SHOWN = 200  # characters of a query in a message

CURE = "use words that the model was trained with"
OTHER_MODELS = "docs/models.md has the languages of others"
NO_TEXT_TOWER = "it has no text tower, so it can't encode texts; give an image"
NO_VISION_TOWER = "it has no vision tower, so it can't encode images; give a text"


class BaseQueryEncoder(ABC):
    """Encoder of texts and images with the towers of one model; each tower is loaded at its first use."""

    kind: ClassVar[str]
    """What the towers run on: "torch" or "onnx"."""

    def __init__(self, model: Model, colour: Colour = "srgb") -> None:
        """Load nothing yet; `colour` is how pixel values are read, for a store the way it was made."""
        self.model, self.colour = model, colour
        self._decoder_lock = threading.Lock()  # a sandbox serves one thread at a time

    def encode_text(self, texts: Sequence[str], instruction: str | None = None) -> Floats:
        """Embed captions or queries; float32 (Q, E), L2-normalised.

        `instruction` takes the place of the model's own, or of that of its `query_instruction`.

        Raises:
            ConfigError: the model has no text tower or takes no instruction, a text is empty or not UTF-8, or the
                instruction is too long.
            ArgumentTypeError: it is no list of texts, or the instruction is no text.
        """
        if self.model.config.text is None:
            raise ConfigError(f"model {self.model.uri}: {NO_TEXT_TOWER}")
        texts = stripped_texts(texts)
        captions = self._encoder_of(instruction)
        words = [captions.query(text).text for text in texts]
        return self._in_batches(partial(self._text_batch, captions=captions), words)

    def _encoder_of(self, instruction: str | None) -> CaptionEncoder:
        """Return the tokeniser with an instruction in its prompt; None: with the model's own."""
        if instruction is None:
            return self._captions
        if self.instruction is None:
            raise ConfigError(
                f"model {self.model.uri}: it takes no instruction of queries; leave it out, or import its "
                "checkpoint again if an earlier version made the folder"
            )
        check_argument("instruction", instruction, str, "a text, as 'Find invoices'")
        if not instruction.strip():
            raise ConfigError(f"instruction {instruction!r}: it is empty; write one, or leave it out")
        if not is_text(instruction):
            raise ConfigError("instruction: it is not valid UTF-8; type it where UTF-8 is the encoding")
        prompt = instructed_prompt(self.model.config.preprocess, instruction, f"model {self.model.uri}")
        return self._check_room(self._captions.with_prompt(prompt), "instruction")

    def _check_room(self, captions: CaptionEncoder, name: str) -> CaptionEncoder:
        """Refuse (ConfigError) an instruction that leaves no token to a query."""
        if captions.room < 1:
            raise ConfigError(
                f"{name}: with what stands around it, it fills the {captions.max_tokens:,} tokens that model "
                f"{self.model.uri} reads; shorten it"
            )
        return captions

    def warning(self, text: str, instruction: str | None = None) -> str | None:
        """Return a line on words that the tokeniser doesn't know, and on what is cut; None if it reads all."""
        script = self._captions.find_unread_script(text)
        query = self._captions.query(text)
        known: str | None
        cut: str | None
        if not self._captions.knows(text):
            shown = printable(text.strip(), MAX_SHOWN)
            known, cut = f"the model's tokeniser knows none of these words: {shown}; {CURE}", None
        else:
            known, cut = self._describe_unknown(query), self._encoder_of(instruction).describe_cut(query.text)
        if script is not None and known is None:
            known = f"the model hardly reads {script}: its tokeniser spells the text out by letters or bytes; {CURE}"
        lines = (known, cut, None if script is None else OTHER_MODELS)
        return "; ".join(line for line in lines if line is not None) or None

    def describe_cut(self, text: str) -> str | None:
        """Return a line on what is cut of a text; None if all of it is read."""
        return self._captions.describe_cut(self._captions.query(text).text)

    def _describe_unknown(self, query: QueryText) -> str | None:
        found = [
            *([f"doesn't know {_join_words(query.unknown)}, left out of the query"] if query.unknown else []),
            *([f"knows {_join_words(query.partly_known)} in part"] if query.partly_known else []),
        ]
        return f"the model's tokeniser {' and '.join(found)}; {CURE}" if found else None

    def encode_image(self, images: "Sequence[GivenImage]", decoder: SandboxedDecoder | None = None) -> Floats:
        """Embed images (paths, file contents, Pillow images, or arrays uint8 (H, W, 3)); float32 (Q, E), L2-normalised.

        `decoder` belongs to the caller's thread, with its limits; None means one that all threads share.

        Raises:
            ConfigError: the model has no vision tower, or an image can't be read.
            ArgumentTypeError: it is no list of images.
        """
        contents = image_list(images)
        if self.model.config.vision is None:
            raise ConfigError(f"model {self.model.uri}: {NO_VISION_TOWER}")
        return self._in_batches(partial(self._image_batch, decoder=decoder), contents)

    def probability(self, cosine: float) -> float | None:
        """Compute the probability that a text fits an image from the cosine of their vectors.

        Returns None for a model that defines none: all but SigLIP's kind.
        """
        if self._sigmoid is None:
            return None
        scale, bias = self._sigmoid
        logit = scale * cosine + bias
        small = math.exp(-abs(logit))
        return (1 if logit >= 0 else small) / (1 + small)

    @property
    def instruction(self) -> str | None:
        """Instruction of queries where none is given; None if the model takes none."""
        found = default_instruction(self.model.config.preprocess)
        return found if found is None else split_address(self.model.uri)[1].query_instruction or found

    def load_like(self, other: object) -> None:
        """Load the towers that another encoder has loaded, so that no query waits for them."""
        for name in ("_captions", "_text_tower", "_vision_tower", "_sigmoid"):
            if name in vars(other):
                getattr(self, name)

    def _in_batches(self, encode: Callable[[list[Q]], Floats], queries: list[Q]) -> Floats:
        width = self.model.config.vector_dim
        parts = [encode(queries[start : start + BATCH_ROWS]) for start in range(0, len(queries), BATCH_ROWS)]
        vectors = np.concatenate([np.empty((0, width), np.float32), *parts])
        if not np.isfinite(vectors).all():
            raise ConfigError(
                f"model {self.model.uri}: its vector of a query has values that are NaN or infinite, which is near to "
                "nothing; its weights are damaged: import or fetch the model again, and `embedder refresh` the store"
            )
        return vectors

    def _text_batch(self, texts: list[str], captions: CaptionEncoder) -> Floats:
        return self._embed_ids([captions.encode(text) for text in texts])

    def _image_batch(self, images: list[Path | bytes], decoder: SandboxedDecoder | None) -> Floats:
        resize = resize_spec(self.model, self.colour)
        return self._embed_pixels([pixel_columns(self._pixels(each, decoder)[None], resize) for each in images])

    def _pixels(self, image: Path | bytes, decoder: SandboxedDecoder | None) -> NDArray[np.uint8]:
        try:
            if decoder is not None:
                return decoder.image(image, resize_spec(self.model, self.colour))
            with self._decoder_lock:
                return self._decoder.image(image, resize_spec(self.model, self.colour))
        except DecodeError as error:
            name = "the image" if isinstance(image, bytes) else str(image)
            *first, last = (each.name for each in IMAGE_FORMATS)
            raise ConfigError(f"{name}: {error.message}; give a {', '.join(first)} or {last} file") from None

    @property
    @abstractmethod
    def _text_tower(self) -> Any:
        """Return the text tower, loaded at its first use."""

    @property
    @abstractmethod
    def _vision_tower(self) -> Any:
        """Return the vision tower, loaded at its first use."""

    @abstractmethod
    def _embed_ids(self, ids: list[Ids]) -> Floats:
        """Run the text tower on token ids, each int32 (T,); at most `BATCH_ROWS` of them."""

    @abstractmethod
    def _embed_pixels(self, columns: list[Columns]) -> Floats:
        """Run the vision tower on images; at most `BATCH_ROWS` of them."""

    @locked_cached_property
    def _captions(self) -> CaptionEncoder:
        model = self.model
        if model.tokenizer_json is None:
            raise ConfigError(f"model {model.uri}: {NO_TEXT_TOWER}")
        end_id = model.config.required_text.end_id
        preprocess, asked = model.config.preprocess, split_address(model.uri)[1].query_instruction
        own = preprocess.query_prompt if asked is None else instructed_prompt(preprocess, asked, f"model {model.uri}")
        found = CaptionEncoder(model.tokenizer_json, preprocess.max_caption_tokens, end_id, own)
        return found if asked is None else self._check_room(found, "query_instruction")

    @locked_cached_property
    def _sigmoid(self) -> tuple[float, float] | None:
        return self._read_sigmoid()

    @abstractmethod
    def _read_sigmoid(self) -> tuple[float, float] | None:
        """Read scale and bias of the logits; None if the model has none."""

    @locked_cached_property
    def _decoder(self) -> SandboxedDecoder:
        return SandboxedDecoder()


def stripped_texts(texts: Sequence[str]) -> list[str]:
    """Return queries without space around; a ConfigError for one that is empty or not UTF-8."""
    stripped = [text.strip() for text in text_list(texts)]
    if not all(stripped):
        raise ConfigError("the query is empty; write what the images should show")
    for text in stripped:
        if not is_text(text):
            raise ConfigError(f"the query {readable(text)}: it is not valid UTF-8; type it where UTF-8 is the encoding")
    return stripped


def _join_words(words: Sequence[str]) -> str:
    return printable(", ".join(words), MAX_SHOWN)
