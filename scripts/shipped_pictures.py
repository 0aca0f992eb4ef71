"""The shipped emoji and their captions, for scripts that write files of them."""

import json
import tarfile
from pathlib import Path

TAR = Path(__file__).parents[1] / "embedder" / "demo_data" / "noto.tar"


def read_shipped() -> tuple[list[bytes], list[str]]:
    """The pictures (PNG files) and the caption of each."""
    with tarfile.open(TAR) as tar:
        files = {member.name: file.read() for member in tar if (file := tar.extractfile(member)) is not None}
    names = sorted(name for name in files if name.endswith(".png"))
    captions = [json.loads(files[name.removesuffix("png") + "json"])["caption"] for name in names]
    return [files[name] for name in names], captions
