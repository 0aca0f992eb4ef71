"""An index larger than memory: built, served, filtered and updated, each in a process under a limit of memory.

    python scripts/bench_large_index.py                                # 200,000, both generators, limits to scale
    python scripts/bench_large_index.py 200000 1000000                 # growth at two sizes
    python scripts/bench_large_index.py 10000000 --build-memory 4GiB --serve-memory 1.5GiB --generator power-law
    python scripts/bench_large_index.py --cgroup none                  # nothing is limited
    python scripts/bench_large_index.py --rivals PYTHON                # an interpreter with pylance, autofaiss, usearch
    python scripts/bench_large_index.py --kill                         # also updates that are killed
    python scripts/bench_large_index.py --keep DIR --again serve       # goes on where it was, and serves once more

Limits are of a cgroup (version 1 or 2), so they count the page cache; without groups the index may be as large as it
wants. Rivals are built and served in the same groups, in turns with ours. Of one query, what bounds the time is the
scan of product codes in memory, and the reads of vectors that are not in the page cache, which are all asked for at
once. The first captions warm the page cache and do not count; none that is asked was used for building. A row is
printed for each size and generator; the last line is one JSON document. The folder needs 2.5 KiB for each vector.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from large_index_bench.cgroups import own_group, run_limited
from large_index_bench.killing import kill_updates
from large_index_bench.rivalry import compare, names, rows
from large_index_bench.vectors import KINDS, exact_rows, write_vectors

NUM_ASKED, NUM_HELD_OUT = 4000, 1500
# Where no limit is given: bytes of Python and its libraries, and bytes of a vector; 10 million get 4 and 1.5 GiB.
BUILD_BYTES, BUILD_ROW_BYTES = 512 << 20, 376
SERVE_BYTES, SERVE_ROW_BYTES = 240 << 20, 134
INDEX_SHARE = 0.65  # of what serving may take beyond Python; the rest is for vectors in the page cache
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def main() -> None:
    """Run all steps for each size and generator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_images", nargs="*", type=int, default=[200_000])
    parser.add_argument("--generator", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--kind", default="auto", help="a design instead of the chooser's")
    parser.add_argument("--build-memory", type=size_bytes, help="limit of build and update, as 4GiB")
    parser.add_argument("--serve-memory", type=size_bytes, help="limit of searches, as 1.5GiB")
    parser.add_argument("--cgroup", help="folder of the group to make groups in; none for no limit")
    parser.add_argument("--folder", type=Path, help="to work in; a temporary one by default")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keeps all that is made; what is there is not made again"
    )
    parser.add_argument("--again", default="", metavar="STEPS", help="steps to repeat of those that --keep has")
    parser.add_argument("--index-memory", type=size_bytes, help="limit of the index alone")
    parser.add_argument("--latency-ms", type=float, help="of a query; then the smallest index is chosen")
    parser.add_argument(
        "--rivals", metavar="PYTHON", help="interpreter that has lancedb, autofaiss, usearch; - for FAISS"
    )
    parser.add_argument("--against", default="ivfpq,lancedb,autofaiss,hnsw,usearch", help="rivals that take part")
    parser.add_argument("--kill", action="store_true", help="also kill updates at several moments")
    arguments = parser.parse_args()
    kinds = KINDS if arguments.generator == "both" else (arguments.generator,)
    found = [measure(kind, size, arguments) for size in arguments.num_images for kind in kinds]
    print(json.dumps(found))


def size_bytes(text: str) -> int:
    """Read a size, as 1.5GiB."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def measure(kind: str, num_images: int, arguments: argparse.Namespace) -> dict:
    """Make vectors, and measure each step."""
    build_bytes = arguments.build_memory or BUILD_BYTES + num_images * BUILD_ROW_BYTES
    serve_bytes = arguments.serve_memory or SERVE_BYTES + num_images * SERVE_ROW_BYTES
    parent = None if arguments.cgroup == "none" else Path(arguments.cgroup or own_group())
    settings = {
        "num_images": num_images,
        "width": arguments.width,
        "num_held_out": NUM_HELD_OUT,
        "recall": arguments.recall,
        "kind": arguments.kind,
        "latency_ms": arguments.latency_ms,
        "index_bytes": arguments.index_memory or (parent and int(INDEX_SHARE * (serve_bytes - SERVE_BYTES))),
        "build_bytes": build_bytes - SERVE_BYTES,
    }
    limits = {"build": build_bytes, "serve": serve_bytes, "update": build_bytes}
    found: dict = {"generator": kind, "seed": arguments.seed, "limits": limits, "settings": settings}
    with work_folder(arguments, f"{kind}-{num_images}x{arguments.width}-{arguments.seed}") as folder:
        make_vectors(folder, kind, num_images, arguments)
        for step, limit in limits.items():
            path = folder / f"{step}.json"
            if step in arguments.again.split(",") or not path.exists():
                command = ["-m", "large_index_bench.steps", step, str(folder), json.dumps(settings)]
                line, group_bytes = run_limited(command, parent, limit)
                path.write_text(json.dumps(json.loads(line) | {"group_bytes": group_bytes, "load": os.getloadavg()[0]}))
            found[step] = json.loads(path.read_text())
        if arguments.kill:
            found["kills"] = kill_updates(folder, settings, parent, build_bytes)
        print(row(found), flush=True)
        if arguments.rivals:
            pythons = interpreters(arguments.rivals, parent, arguments.against.split(","))
            found["rivals"] = compare(folder, settings, limits, parent, pythons)
            print(*rows(found["rivals"]), sep="\n", flush=True)
    return found


def interpreters(python: str, parent: Path | None, asked: list[str]) -> dict[str, str]:
    """Interpreter of each rival that takes part; this one has FAISS, and no other."""
    own = {"ivfpq", "hnsw"}
    taking_part = [name for name in asked if name in names(parent) and (name in own or python != "-")]
    return {name: sys.executable if name in own else python for name in taking_part}


@contextmanager
def work_folder(arguments: argparse.Namespace, name: str) -> Iterator[Path]:
    """Folder of one size and generator: one that stays, or a temporary one."""
    if arguments.keep is None:
        with tempfile.TemporaryDirectory(prefix="large-index-", dir=arguments.folder) as folder:
            yield Path(folder)
    else:
        folder = arguments.keep / name
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def make_vectors(folder: Path, kind: str, num_images: int, arguments: argparse.Namespace) -> None:
    """Make vectors and exact answers, where the folder has none."""
    if not (folder / "captions.npy").exists():  # the last file that is written
        write_vectors(folder, kind, num_images, NUM_ASKED + NUM_HELD_OUT, arguments.seed, arguments.width)
    if not (folder / "exact.npy").exists():
        held_out = np.load(folder / "captions.npy")[:NUM_HELD_OUT]
        np.save(folder / "exact.npy", exact_rows(folder, held_out, num_images))


def row(found: dict) -> str:
    """Write what was found as one line for people."""
    build, serve, update = (found[step] for step in ("build", "serve", "update"))
    filtered = serve["filter"]
    return (
        f"{found['settings']['num_images']:,} {found['generator']}: {build['design']} {build['parameters']}; "
        f"built in {build['build_s']:.0f} s ({build['build_cpu_s']:.0f} of CPU) at {_mib(build['peak_rss_bytes'])}, "
        f"chosen in {build['steps_s'].get('choose', 0):.0f} s; recall {serve['recall_at_10']:.3f}, "
        f"p50 {serve['p50_ms']:.2f} ms, p99 {serve['p99_ms']:.2f} ms, {serve['queries_per_s']:.0f} queries/s "
        f"at {_mib(serve['own_bytes'])} of its own of {_mib(found['limits']['serve'])}; of "
        f"{filtered['num_passing']:,} that pass p99 {filtered['ours']['p99_ms']:.2f} ms, exactly "
        f"{filtered['exact']['p99_ms']:.2f} ms; updated in {update['build_s']:.1f} s, "
        f"{build['build_s'] / max(update['build_s'], 1e-3):.0f} times faster than built"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
