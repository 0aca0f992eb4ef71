"""From a model's path to its local folder."""

from pathlib import Path

from shards.errors import ModelError


def find_model_folder(path: str | Path) -> Path:
    """Find a local model folder; its content is not checked.

    Raises:
        ModelError: there is no such folder.
    """
    folder = Path(path).expanduser()
    if str(path) and folder.is_dir():
        return folder
    if str(path) and folder.exists():
        raise ModelError(f"{path}: this is a file; give the model folder that it lies in")
    raise ModelError(f"{str(path)!r}: there is no such folder; give a model folder")
