"""What grows with the number of items, and what does not: time and memory of embedding, and of listing names.

    python scripts/measure_growth.py                        # 1,000, 10,000 and 100,000 items, then 1,000,000 names
    python scripts/measure_growth.py 2000 10000             # other numbers of items
    python scripts/measure_growth.py --only names --names 2000000
    python scripts/measure_growth.py --only comparison --compared 2000000 20000000
    python scripts/measure_growth.py --only log --versions 1000 10000
    python scripts/measure_growth.py --only driver --embedded 1000000 --engine local
    python scripts/measure_growth.py --only words --captions 1000000 10000000
    python scripts/measure_growth.py --only hybrid --captions 1000000 10000000

The default takes half an hour on two cores, nearly all of it for the 100,000 items.

Items are the shipped emoji with their captions, again and again under other names; the shipped model embeds them on
Ray in three stages, by the command in a process of its own. Costs are those of all processes: from start to end, and
steady, from a quarter of all items to three quarters. Memory is the proportional set size (PSS), each shared page
counted once; it is bounded by the processes themselves (three times torch, about 0.7 GiB each) and by what Ray lets
wait between the steps. A process that leaks holds more late in the run than early.

Names are links to tiny files, and then as many objects of a bucket on this machine (`growth.bucket`), each of whose
answers takes 20 ms. They are listed and compared with a store by `embedder refresh`: all new, unchanged, and with 1 %
changed. What bounds that is one look at each file, or a request for a thousand objects, and CPU a name.

The comparison is of captions in Parquet files with a store of as many items: an idle night, 1 % changed and 0.5 % gone,
scattered, the same 1 % again, and side by side. What bounds it is CPU a row; memory is that of one part
(`embedder.storage.hashed_rows`). The bytes written are told beside those of the changed rows.

The log is that of a store with many publications, each of which added ten part files to both tables; the driver is the
process of the command, while it embeds captions by a model of next to no work. The word index of hybrid search is built
of made-up captions, updated with 1 % of them, and asked (`growth.words`); a store of as many images with captions is
opened in a process that may hold 1 GiB, and searched by vectors and words (`growth.hybrid`). The last line is one JSON
document.
"""

import argparse
import json
import tempfile
from pathlib import Path

from growth.bucket import measure_bucket
from growth.comparison import measure_comparison, show_comparison
from growth.driver import measure_driver, show_driver
from growth.embedding import embed_items, show_costs, show_kinds
from growth.hybrid import measure_hybrid, show_hybrid
from growth.log import measure_log, show_log
from growth.names import measure_names, show_names
from growth.words import measure_words, show_words

NUM_ITEMS = (1000, 10_000, 100_000)
PARTS_PER_VERSION = 10
FIRST_SHARE = 10  # names are also measured by a tenth of their number, which shows what does not grow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", type=int, nargs="*", default=NUM_ITEMS, help="numbers of items to embed")
    parser.add_argument("--names", type=int, default=1_000_000, help="number of names to list")
    parser.add_argument(
        "--only",
        choices=("items", "names", "comparison", "log", "driver", "words", "hybrid"),
        help="leave the others out",
    )
    parser.add_argument("--compared", type=int, nargs="+", default=(200_000, 2_000_000), help="numbers of captions")
    parser.add_argument("--versions", type=int, nargs="+", default=(100, 1000), help="numbers of publications")
    parser.add_argument("--embedded", type=int, nargs="+", default=(20_000, 100_000), help="numbers to embed")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="that embeds those")
    parser.add_argument("--captions", type=int, nargs="+", default=(100_000, 1_000_000), help="numbers in a word index")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds of one run")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    found: dict = {}
    with tempfile.TemporaryDirectory(prefix="measure-growth-", dir=options.folder) as name:
        root = Path(name)
        if options.only in (None, "items"):
            found["items"] = measure_items(root, options.items, options.timeout)
        if options.only in (None, "names"):
            found["names"] = measure_listing(root, options.names)
        if options.only in (None, "comparison"):
            found["comparison"] = [
                each for number in options.compared for each in measure_comparison(root / f"{number}-rows", number)
            ]
            print()
            show_comparison(found["comparison"])
        if options.only in (None, "log"):
            found["log"] = [
                each
                for number in options.versions
                for each in measure_log(root / f"{number}-versions", number, PARTS_PER_VERSION)
            ]
            print()
            show_log(found["log"])
        if options.only in (None, "driver"):
            found["driver"] = [
                measure_driver(root / f"{number}-embedded", number, options.engine, options.timeout)
                for number in options.embedded
            ]
            print()
            show_driver(found["driver"])
        if options.only in (None, "words"):
            taken = [each for number in options.captions for each in measure_words(root / f"{number}-words", number)]
            found["words"] = taken
            print()
            show_words(taken)
        if options.only in (None, "hybrid"):
            taken = [each for number in options.captions for each in measure_hybrid(root / f"{number}-hybrid", number)]
            found["hybrid"] = taken
            print()
            show_hybrid(taken)
    print(json.dumps(found))


def measure_items(root: Path, numbers: list[int], timeout_s: float) -> dict:
    """Embed each number of items, and show what it took; gives all figures."""
    runs = []
    for num_items in numbers:
        runs.append(embed_items(root / str(num_items), num_items, timeout_s))
        show_kinds(runs[-1])
    print()
    show_costs(runs)
    return {"runs": runs}


def measure_listing(root: Path, num_names: int) -> list[dict]:
    """List and compare a tenth of the names, then all, and show what it took."""
    numbers = (max(num_names // FIRST_SHARE, 1), num_names)
    taken = [each for number in numbers for each in measure_names(root / f"{number}-names", number)]
    taken += [each for number in numbers for each in measure_bucket(root / f"{number}-objects", number)]
    print()
    show_names(taken)
    return taken


if __name__ == "__main__":
    main()
