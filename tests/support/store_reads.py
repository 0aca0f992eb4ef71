"""All that reads a store, as one process does it that may not write it: run as `python store_reads.py STORE CONFIG`."""

import json
import sys
import traceback
from pathlib import Path

from command_runs import run_here
from running_server import running
from served import Served

import embedder

TEXT = "a red car"
TEXT_QUERY = {"text": TEXT}


def command(*arguments, config=None):
    """A command of `embedder`: on the store, or on a configuration, as its first argument or by an option."""

    def run(store, configuration, out):
        where = {"first": [configuration], "option": ["--config", configuration], None: ["--store", store]}[config]
        name, *given = [str(each).format(store=store, out=out) for each in arguments]
        ended = run_here(name, *(where + given if config == "first" else given + where))
        assert ended.code == 0, ended.stderr or ended.stdout

    return run


def notebook(store, *_):
    opened = embedder.open_store(store)
    hits = opened.search(TEXT, k=3)
    assert len(hits) == 3
    assert all(pixels is not None for pixels in hits.thumbnails())
    assert hits[0].read()
    hits._repr_html_()
    assert opened.to_arrow().num_rows >= opened.items().num_rows - opened.rejects().num_rows > 0
    with embedder.follow_store(store) as followed:
        assert not followed.look()
        assert followed.search(TEXT, k=1, hybrid=True)


def serve(store, *_):
    with running(store) as url:
        served = Served(url, None, None)
        answers = [
            served.get("/readyz"),
            served.search(TEXT_QUERY, k=3),
            served.search(TEXT_QUERY, k=3, hybrid=True, where="modality = 'image'"),
            served.post("/embed", {"texts": [TEXT]}),
            served.item("pictures/0000.png", "/image"),
            served.item("clips/0.mp4"),
            served.item("clips/0.mp4", "/clip"),
            *(served.get(path) for path in ("/facets", "/status", "/versions", "/metrics", "/")),
        ]
    assert [answer.status for answer in answers] == [200] * len(answers), [answer.body[:300] for answer in answers]


READS = {
    "search": command("search", TEXT),
    "search --hybrid": command("search", TEXT, "--hybrid"),
    "search --image": command("search", "--image", "{out}/query.png"),
    "search --sheet --out --copy": command(
        "search", TEXT, "--sheet", "{out}/sheet.png", "--out", "{out}/hits.csv", "--copy", "{out}/copies"
    ),
    "serve": serve,
    "notebook": notebook,
    "evaluate": command("evaluate", "--out", "{out}/evaluated"),
    "compare": command("compare", "{store}", "{store}", "--out", "{out}/compared", config="option"),
    "history": command("history", "--metrics"),
    "rejects": command("rejects"),
    "report": command("report"),
    "index status": command("index", "status"),
    "store check": command("store", "check"),
    "vacuum --dry-run": command("vacuum", "--dry-run", "--keep-days", "0"),
    "purge --dry-run": command("purge", "pictures/0000.png", "--dry-run"),
    "refresh --dry-run": command("refresh", "--dry-run", config="first"),
    "plan": command("plan", "--devices", "2xA100:80GiB", "--num-items", "1000", "--estimate", config="option"),
    "verify": command("verify", "--items", "2", config="option"),
    "doctor": command("doctor", config="option"),
    "config": command("config", config="first"),
}


def main(store: Path, configuration: Path, out: Path) -> None:
    """Print, as one line of JSON, what each of them fails with; null where it works."""
    found = {}
    for name, read in READS.items():
        try:
            read(store, configuration, out)
        except BaseException:  # noqa: BLE001  # reported to the test
            found[name] = traceback.format_exc()
        else:
            found[name] = None
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
