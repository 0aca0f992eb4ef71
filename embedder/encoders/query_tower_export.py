"""Exports a model's query towers into a store; a failure never fails the surrounding operation."""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from embedder.encoders.servable_encoder import TOWERS, checked_servable
from embedder.errors import ConfigError, EmbedderError, StoreError
from embedder.models.model_folder import Model, open_model
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from embedder.store.layout import StoreInfo
from embedder.store.publish.query_towers import (
    TOWERS_FOLDER,
    cached_folder,
    delete_towers,
    has_towers,
    keep_in_cache,
    towers_path,
    upload_towers,
    write_manifest,
)
from embedder.store.store_info import FINGERPRINTS
from shards.fingerprint import preprocess_fingerprint
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE
from shards.model_errors import ModelError
from shards.model_settings import address_as_recorded

LOG = logging.getLogger(__name__)
LIMIT_S = 1800
FAILURES = (ModelError, OSError, ImportError, subprocess.SubprocessError)
NOT_WRITTEN = "the store gets no query towers, so torch encodes queries"


def keep_query_towers(files: StoreFiles, info: StoreInfo, model: Model) -> None:
    """Write a model's query towers into the store unless they exist; a failure is only logged.

    `files` is the store, held by the write lock; `info` describes the vectors that are about to be published.
    """
    if has_towers(files, info):
        return
    try:
        upload_towers(files, info, cached_folder(info) or _export_towers(info, model))
    except (StoreError, *FAILURES) as error:
        LOG.warning(f"{NOT_WRITTEN}: {' '.join(str(error).split())}")


def add_query_towers(files: StoreFiles, info: StoreInfo) -> None:
    """Write the query towers of the published vectors unless they exist; a failure is only logged."""
    if not has_towers_to_export(info):
        return
    try:
        export_query_towers(files, info)
    except (EmbedderError, *FAILURES) as error:
        LOG.info(f"{NOT_WRITTEN}: {' '.join(str(error).split())}")


def export_query_towers(
    files: StoreFiles, info: StoreInfo, model: str | None = None, *, force: bool = False
) -> str | None:
    """Write the query towers of the published vectors unless they exist, and return their folder in the store.

    `files` is the store, held by the write lock. `model` is the model folder, if it has moved. `force` rewrites
    existing towers; without it the result is None if they exist.

    Raises:
        ConfigError: the folder holds another model, prepares queries differently, or the model has no towers.
        StoreError: the folder of a further model holds another one now.
        ModelError: there is no such folder, or none of its towers can be exported.
    """
    if has_towers(files, info) and not force:
        return None
    if not has_towers_to_export(info):
        raise ConfigError(
            f"store {files.main.address}: model {files.model} is of the kind {(info.servable or {}).get('kind')}: "
            "there are no towers to export, it encodes queries itself"
        )
    opened = _open_model(info, model)
    folder = None if force else cached_folder(info)
    folder = folder or _export_towers(info, opened)
    if force:
        delete_towers(files, info)
    upload_towers(files, info, folder)
    return towers_path(info)


def has_towers_to_export(info: StoreInfo) -> bool:
    """Return whether the model has towers: a store's main model, or a further one of that kind."""
    return info.servable is None or info.servable.get("kind", TOWERS) == TOWERS


def _open_model(info: StoreInfo, model: str | None) -> Model:
    """Open the model folder of some vectors; `model` is the folder, if it has moved.

    Raises:
        ConfigError: the folder holds another model, or prepares queries differently.
        StoreError: likewise, for a further model.
        ModelError: there is no such folder.
    """
    if info.servable is not None:
        return open_model(checked_servable(info).uri)
    opened = open_model(address_as_recorded(model, info.model))
    for name, found in zip(FINGERPRINTS, (opened.fingerprint, preprocessing_of(opened, info)), strict=True):
        if found != getattr(info, name):
            raise ConfigError(
                f"model {opened.folder}: its {name.replace('_', ' ')} is {found}, the store's vectors are of "
                f"{getattr(info, name)}; give the model that made them with --model"
            )
    return opened


def preprocessing_of(model: Model, info: StoreInfo) -> str:
    """Return a fingerprint of how a model folder prepares inputs, with the video segments of a store."""
    tokenizer = (model.tokenizer_json or "").encode()
    return preprocess_fingerprint(
        model.config.preprocess, tokenizer, info.segment_s, info.frames_per_segment, info.colour
    )


def _export_towers(info: StoreInfo, model: Model) -> Path:
    """Export a model's towers into a local folder, with all else that encoding needs, and a manifest.

    Raises a ModelError if none of its towers can be exported.
    """
    cache_folder(TOWERS_FOLDER).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".query-towers-", dir=cache_folder(TOWERS_FOLDER).parent) as name:
        folder = Path(name) / "towers"
        folder.mkdir()
        failures = _export(model.folder, folder)
        if len(failures) == len(model.config.towers):
            raise ModelError(" | ".join(failures))
        for failure in failures:
            LOG.warning(failure)
        (folder / CONFIG_FILE).write_text(model.config.to_json(), encoding="utf-8")
        if model.tokenizer_json is not None:
            shutil.copyfile(model.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        write_manifest(folder, info)
        return keep_in_cache(folder)


def _export(model: Path, out: Path) -> list[str]:
    """Export here if torch is loaded, else in a process whose end frees a gigabyte of libraries."""
    if "torch" in sys.modules:
        from shards.onnx_export import export_towers

        return export_towers(model, out)
    command = [sys.executable, "-m", "shards.onnx_export", str(model.absolute()), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"the process ended with {ended.returncode}"])[-1]
        raise ModelError(last)
    failures: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return failures
