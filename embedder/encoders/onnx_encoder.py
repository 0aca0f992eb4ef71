"""Encodes queries with ONNX Runtime, from a store's query towers: without torch and the model folder."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.compat.locked_property import locked_cached_property
from embedder.encoders.encode_queries import BaseQueryEncoder, Columns, Floats, Ids
from embedder.errors import StoreError
from embedder.models.model_folder import Model
from embedder.placement.hardware import num_cpus
from embedder.store.publish.query_towers import QueryTowers
from shards.file_schema import parse_json
from shards.length_groups import group_by_length
from shards.model_config import CONFIG_FILE, SIGMOID_FILE, TOKENIZER_FILE, load_model_config

if TYPE_CHECKING:
    from embedder.encoders.query_encoder import QueryEncoder
    from shards.towers.naflex import NaFlexTower

LOG = logging.getLogger(__name__)

TELEMETRY_OFF = "ORT_DISABLE_TELEMETRY"
"""Environment variable; without it, ONNX Runtime keeps an id of this device and sends events to its maker."""
MAX_THREADS = 8  # a query's matrices are small: more threads would wait for each other
ERRORS_ONLY = 3  # log severity of ONNX Runtime
SHORTEST = 2  # tokens; graphs are traced with more than one


class OnnxQueryEncoder(BaseQueryEncoder):
    """Encoder of texts and images with the query towers of a store."""

    kind = "onnx"

    def __init__(self, towers: QueryTowers, uri: str, torch_encoder: "Callable[[], QueryEncoder]") -> None:
        """Read the model's description.

        `uri` of the model is for messages. `torch_encoder` makes the encoder for a tower that couldn't be exported.

        Raises:
            StoreError: a file is missing or damaged.
            ModelError: this version doesn't know the description's format.
        """
        config = load_model_config(towers.path(CONFIG_FILE).parent)
        text = towers.path(TOKENIZER_FILE).read_text(encoding="utf-8") if config.text is not None else None
        super().__init__(Model(uri, towers.folder, config, text, towers.info.model_fingerprint), towers.info.colour)
        self._towers, self._make_torch_encoder = towers, torch_encoder

    def _embed_ids(self, ids: list[Ids]) -> Floats:
        if self._text_tower is None:
            return self._torch_encoder._embed_ids(ids)
        tower = self.model.config.required_text
        lengths = np.array([len(each) for each in ids], np.int64)
        groups = [np.arange(len(ids))] if tower.has_fixed_length else group_by_length(lengths)
        found = np.empty((len(ids), self.model.config.vector_dim), np.float32)
        for group in groups:
            padded = np.full((len(group), max(SHORTEST, lengths[group].max())), tower.padding_id, np.int32)
            for row, number in enumerate(group):
                padded[row, : lengths[number]] = ids[number]
            found[group] = _run(self._text_tower, ids=padded, lengths=lengths[group])
        return found

    def _embed_pixels(self, columns: list[Columns]) -> Floats:
        session = self._vision_tower
        if session is None:
            return self._torch_encoder._embed_pixels(columns)
        if "image_grid" not in columns[0]:
            return _run(session, pixels=np.concatenate([each["pixels"] for each in columns]))
        tower: NaFlexTower = self.model.config.vision  # type: ignore[assignment]  # the one family with grids
        grids = [tuple(each["image_grid"][1:].tolist()) for each in columns]
        found = np.empty((len(columns), self.model.config.vector_dim), np.float32)
        for grid in sorted(set(grids)):
            group = [number for number, each in enumerate(grids) if each == grid]
            pixels = np.stack([columns[number]["pixels"] for number in group])
            found[group] = _run(session, pixels=pixels, places=tower.filter_places(*grid))
        return found

    def _read_sigmoid(self) -> tuple[float, float] | None:
        path = self._towers.path(SIGMOID_FILE)
        try:
            sigmoid = parse_json(path.read_bytes())
            return None if sigmoid is None else (float(sigmoid[0]), float(sigmoid[1]))
        except (ValueError, TypeError, LookupError):
            raise StoreError(
                f"{path}: it holds no scale and bias of a sigmoid; write the towers again with "
                f"`embedder export-query-towers --force {self._towers.files.option}`"
            ) from None

    @locked_cached_property
    def _text_tower(self) -> Any:
        return self._open("text")

    @locked_cached_property
    def _vision_tower(self) -> Any:
        return self._open("vision")

    @locked_cached_property
    def _torch_encoder(self) -> "QueryEncoder":
        return self._make_torch_encoder()

    def _open(self, side: str) -> Any:
        """Open a tower; None if there is none that can be used."""
        where = f"store {self._towers.files.address}"
        names = [name for name in (f"{side}.onnx.data", f"{side}.onnx") if name in self._towers.manifest.files]
        if not names:
            LOG.info(f"{where}: its {side} tower could not be exported; torch runs it")
            return None
        os.environ[TELEMETRY_OFF] = "1"  # read while the library is imported
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = min(num_cpus(), MAX_THREADS)
        options.inter_op_num_threads = 1
        options.log_severity_level = ERRORS_ONLY
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads take no CPU
        try:
            *_, path = [self._towers.path(name) for name in names]
            return InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except (StoreError, RuntimeError) as error:
            LOG.warning(f"{where}: its {side} tower can't be used, torch runs the model's: {error}")
            return None


def _run(session: Any, **inputs: Any) -> Floats:
    """Run a tower; inputs that its graph doesn't use are left out."""
    names = {each.name for each in session.get_inputs()}
    (found,) = session.run(None, {name: values for name, values in inputs.items() if name in names})
    return np.asarray(found, np.float32)
