"""Delta: the layers of a model that were trained over a base, and the base's fingerprint; headers alone, no torch.

    delta.json           format version, name, the base's fingerprint
    model.safetensors    the trained tensors, under their names in the base

`embedder train` writes it with what = "layers"; `shards.training.export.apply_delta` merges it with its base.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shards.config import read_json
from shards.errors import ModelError
from shards.weights import read_entries

DELTA_FILE = "delta.json"
DELTA_FORMAT = 1

_LAYERS = (
    (re.compile(r"vision\.blocks\.(\d+)\."), "ViT layer"),
    (re.compile(r"text\.encoder\.albert_layer_groups\.(\d+)\."), "ALBERT layer group"),
)


@dataclass(frozen=True)
class DeltaSummary:
    """Summary of a delta, as `embedder model info` shows it.

    Attributes:
        folder: folder of the delta.
        name: name of this version; becomes the model's name.
        base_fingerprint: fingerprint of the base model.
        parameters: number of parameters by part, each layer a part.
        dtypes: dtypes on disk, as safetensors names them, sorted.
        size_bytes: bytes of the tensors.
    """

    folder: Path
    name: str
    base_fingerprint: str
    parameters: dict[str, int]
    dtypes: tuple[str, ...]
    size_bytes: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all parts."""
        return sum(self.parameters.values())


def is_delta(folder: str | Path) -> bool:
    """Whether a folder holds a delta."""
    return (Path(folder) / DELTA_FILE).is_file()


def describe_delta(folder: str | Path) -> DeltaSummary:
    """Summarise a delta.

    Raises:
        ModelError: it is no delta, of an unknown format, or broken.
    """
    folder = Path(folder)
    name, base_fingerprint = read_delta(folder)
    entries = read_entries(folder)
    parameters: defaultdict[str, int] = defaultdict(int)
    for tensor, entry in entries.items():
        parameters[_part_of(tensor)] += prod(entry.shape)
    return DeltaSummary(
        folder=folder,
        name=name,
        base_fingerprint=base_fingerprint,
        parameters=dict(parameters),
        dtypes=tuple(sorted({entry.dtype for entry in entries.values()})),
        size_bytes=sum(entry.stop - entry.start for entry in entries.values()),
    )


def read_delta(folder: Path) -> tuple[str, str]:
    """Read a delta's name and the fingerprint of its base.

    Raises:
        ModelError: it is no delta, or of an unknown format.
    """
    about = read_json(folder / DELTA_FILE, 'name a delta that `embedder train` wrote with what = "layers"')
    if about.get("format_version") != DELTA_FORMAT:
        raise ModelError(
            f"{folder / DELTA_FILE}: format_version is {about.get('format_version')!r}, and this version reads "
            f"{DELTA_FORMAT}; upgrade embedder"
        )
    return str(about.get("name")), str(about.get("base_fingerprint"))


def _part_of(tensor: str) -> str:
    for pattern, part in _LAYERS:
        if found := pattern.match(tensor):
            return f"{part} {found[1]}"
    return tensor
