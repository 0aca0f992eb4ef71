"""Add a second model to a store, kill the run on its way, then change the main model: whose files change.

    python scripts/add_model.py [NUM_ITEMS]      # 10,000 shipped emoji under many names: a few minutes, two cores

The files of the main model's tables and indexes must stay to the byte while the second model is added, also by a run
that is killed with half of the rows and begun again; both models must then be searchable, with all rows. A new main
model must leave the second one's rows as they are; its small part files may be merged. The last line is one JSON
document; exit 1 where anything differs.
"""

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

import embedder
from corpus import make_model, shipped_pairs, write_pairs
from harness import EMBEDDER, CommandFailedError, show

NUM_ITEMS = 10_000
TIMEOUT_S = 3600.0
LOOK_S = 0.01
VISION = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 4, "num_heads": 2}
TEXT = {"embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SECOND = "second"


def main() -> None:
    num_items = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ITEMS
    with tempfile.TemporaryDirectory(prefix="add-model-") as folder:
        found = Addition(Path(folder), num_items).run()
    show(found["runs"], {"run": "{run}", "seconds": "{seconds:.1f}", "exit": "{code}"})
    print(json.dumps(found))
    sys.exit(0 if found["is_whole"] and found["second_rows_kept"] and not found["main_files_changed"] else 1)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Paths of the files that came, went or changed."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


class Addition:
    """Store, models and source in a folder."""

    def __init__(self, root: Path, num_items: int) -> None:
        self.root, self.store, self.num_items = root, root / "store", num_items
        self.source = write_pairs(root / "source", num_items, shipped_pairs())
        sizes = {"main": 0, SECOND: 8, "newer": 16}
        self.models = {
            name: make_model(root / name, VISION | {"image_size": 32 + more}, TEXT) for name, more in sizes.items()
        }
        self.runs: list[dict[str, object]] = []

    def run(self) -> dict[str, object]:
        """Do all of it, and tell what was found."""
        self._run("main alone", ["main"])
        before = self._hashes()
        num_killed = self._kill_halfway(["main", SECOND])
        self._run("the same command again", ["main", SECOND])
        main_changed = changed(before, self._hashes())
        second = self._rows(SECOND)
        self._run("another main model", ["newer", SECOND], "refresh")
        stores = [embedder.open_store(self.store, model=name) for name in (None, SECOND)]
        ids = [set(store.to_arrow(["item_id"])["item_id"].to_pylist()) for store in stores]
        hits = [len(store.search(store.encode_text(["a red car"])[0], k=10)) for store in stores]
        return {
            "items": self.num_items,
            "killed_after_items": num_killed,
            "main_files": len(before),
            "main_files_changed": main_changed,
            "second_rows_kept": self._rows(SECOND).equals(second),
            "is_whole": ids[0] == ids[1] and len(ids[0]) == self.num_items and hits == [10, 10],
            "runs": self.runs,
        }

    def _config(self, names: Sequence[str]) -> Path:
        """Write the configuration of a run over some models."""
        lines = [f"store = {json.dumps(str(self.store))}", "rows_per_part = 256", "min_vector_spread = 0"]
        lines += ["min_vector_directions = 0", "max_retrieval_drop = 1.0"]  # of towers that have learned nothing
        lines += ["[[source]]", f"path = {json.dumps(str(self.source))}"]
        for name in names:
            lines += ["[[model]]", f"uri = {json.dumps(str(self.models[name]))}"]
            lines += [f'name = "{SECOND}"'] if name == SECOND else []
        path = self.root / "run.toml"
        path.write_text("\n".join([*lines, ""]))
        return path

    def _command(self, names: Sequence[str], kind: str) -> list[str]:
        config = str(self._config(names))
        return [*EMBEDDER, kind, config] if kind == "refresh" else [*EMBEDDER, kind, "--config", config]

    def _run(self, what: str, names: Sequence[str], kind: str = "embed") -> None:
        began_s = time.monotonic()
        with (self.root / "log.txt").open("ab") as log:
            code = subprocess.run(
                self._command(names, kind), stdout=log, stderr=log, timeout=TIMEOUT_S, check=False
            ).returncode
        self._note(what, began_s, code)
        if code:
            raise CommandFailedError(f"{what}: exit {code}: {(self.root / 'log.txt').read_text()[-2000:]}")

    def _kill_halfway(self, names: Sequence[str]) -> int:
        """Kill a run when half of the second model's items are in its journal; gives how many there are."""
        began_s = time.monotonic()
        with (self.root / "log.txt").open("ab") as log:
            process = subprocess.Popen(self._command(names, "embed"), stdout=log, stderr=log)
            while process.poll() is None and self._num_done() < self.num_items // 2:
                time.sleep(LOOK_S)
            process.send_signal(signal.SIGKILL)
            self._note("adding the second, killed", began_s, process.wait())
        return self._num_done()

    def _num_done(self) -> int:
        """Items that the journals of the second model hold."""
        entries = (self.store / "models" / SECOND).glob("runs/*/journal/*.json")
        return sum(json.loads(path.read_text())["num_items"] for path in entries)

    def _note(self, what: str, began_s: float, code: int) -> None:
        self.runs.append({"run": what, "seconds": time.monotonic() - began_s, "code": code})

    def _hashes(self) -> Mapping[str, str]:
        """Hash of each file of the main model's tables and indexes."""
        files = [path for each in ("embeddings", "items", "index") for path in (self.store / each).rglob("*")]
        return {
            str(path.relative_to(self.store)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.is_file()
        }

    def _rows(self, name: str) -> pa.Table:
        """Published rows of a model, vectors included, without what is joined of the main one."""
        rows = embedder.open_store(self.store, model=name).to_arrow().sort_by("item_id")
        return rows.drop_columns([each for each in rows.column_names if each.startswith("main.")])


if __name__ == "__main__":
    main()
