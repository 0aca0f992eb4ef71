"""Kind `ocr`: the words in pictures, found and read by RapidOCR with the models of its wheel."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from embedder.installation import require
from embedder.plugins.runners import PROGRAMS
from embedder.servables.program import ServableProgram
from embedder.servables.servable import Servable
from embedder.servables.servable_columns import ADDRESS, ImageInput, InputColumn, OutputColumn
from embedder.servables.servable_errors import ServableError
from embedder.store.tables.words import WORDS_COLUMN

PACKAGE = "rapidocr"
FINDER, READER = "*_det_*.onnx", "*_rec_*.onnx"


class OcrServable(Servable):
    """Text recognition: the lines of each picture from top to bottom, where they stand, and how sure the model is.

    Boxes are left, top, right and bottom as parts of the picture's sides. A picture without text has no words. Those
    of the others are found by hybrid search.
    """

    kind: Literal["ocr"] = "ocr"
    uri: str = Field(
        min_length=1, description=f"{PACKAGE}: its package's graphs; or a folder with two, {FINDER} and {READER}"
    )
    of: str | None = Field(
        None, pattern=ADDRESS, description="column with the pictures; left out: the item's own picture"
    )
    max_side_px: int = Field(
        1600, ge=64, le=8192, description="pictures with a longer side are reduced to it: its time goes with its square"
    )
    threshold: float = Field(0.6, ge=0, le=1, description="least mean probability of a line's letters")
    batch_size: int = Field(8, ge=1, description="most rows of one call")

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return the whole picture."""
        return {"image": ImageInput(of=self.of, max_side_px=self.max_side_px)}

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return the text, and its lines one by one."""
        return {
            WORDS_COLUMN: OutputColumn(type="string", nullable=True),
            "lines": OutputColumn(type="string", shape=("any",)),
            "boxes": OutputColumn(shape=("any", 4)),
            "scores": OutputColumn(shape=("any",)),
        }

    def files(self) -> list[Path]:
        """Return the graph that finds lines and the one that reads them."""
        folder = self._folder()
        found = []
        for pattern in (FINDER, READER):
            graphs = sorted(folder.glob(pattern))
            if len(graphs) != 1:
                names = ", ".join(each.name for each in graphs) or "none"
                raise ServableError(f"{self.where()}: {folder} has {names}; it needs one graph called {pattern}")
            found += graphs
        return found

    def size_bytes(self) -> int:
        """Memory that it takes: activations of the largest picture outweigh the graphs."""
        return self.memory_bytes or super().size_bytes() + 300 * self.max_side_px**2

    def program(self) -> ServableProgram:
        """Return the program that reads pictures."""
        finder, reader = map(str, self.files())
        settings = {"finder": finder, "reader": reader, "threshold": self.threshold, "max_side_px": self.max_side_px}
        return ServableProgram(str(PROGRAMS / "ocr_reader.py"), "OcrReader", settings)

    def _folder(self) -> Path:
        if self.uri != PACKAGE:
            folder = Path(self.uri).expanduser().absolute()
            if not folder.is_dir():
                raise ServableError(
                    f'{self.where()}: there is no such folder; uri = "{PACKAGE}" takes those of the package'
                )
            return folder
        require("ocr", self.where())
        spec = find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ServableError(f"{self.where()}: {PACKAGE} has no files here; give the folder of its graphs")
        return Path(spec.origin).parent / "models"
