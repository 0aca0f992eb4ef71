"""The check of a store's trace: real changes follow the protocol, and each doctored deviation from it is found."""

import hashlib
import json
import re
from itertools import pairwise

import pytest
from bucket_server import bucket_on, running_server
from check_store_trace import check
from script_runs import last_json, run_script
from store_samples import INFO, begin, row, table
from store_states import no_index, publish_refresh

from embedder.compat import STORE_TRACE_VARIABLE, worker_options
from embedder.errors import StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.backends import DiskBackend
from embedder.store.files import StoreFiles
from embedder.store.journal import part_writer
from embedder.store.journal.journal_segments import names_in_journal, seal
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.refusals import rollback_on_mistake, snapshot_files
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.publish.current import swap_index
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import finish_publication, publish
from embedder.store.store_info import bind_store
from embedder.store.tables.models import model_files


def begin_store(files):
    bind_store(files, INFO)
    publish_refresh(files, row("a.jpg"), row("b.jpg"), row("c.jpg"))


def seal_and_publish(files):
    run, metadata = begin(files)
    for task in range(3):
        write_part(files, metadata, task, table(row(f"{task}.jpg")))
    seal(files, run.run_id, names_in_journal(files, run.run_id))
    publish([ModelWork(run, metadata)])


def fail_to_write(files):
    _, metadata = begin(files)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(part_writer, "record_bytes", lambda entry: (_ for _ in ()).throw(OSError("no space")))
        write_part(files, metadata, 0, table(row("e.jpg")))


def be_refused(files):
    with pytest.raises(StoreError, match="a mistake"), rollback_on_mistake(files, snapshot_files(files)):
        begin(files)
        raise StoreError("a mistake")


def build_index(files):
    current = read_current(files)
    for name in ("vectors.faiss", "manifest.json"):
        manifest = {"embeddings_version": current.embeddings, "built_at": current.published_at.isoformat()}
        files.write(f"index/000001/{name}", json.dumps(manifest).encode())
    swap_index(files, 1)


LIFE = (
    begin_store,
    lambda files: publish_refresh(files, row("b.jpg", content_version="v1"), row("d.jpg"), retired=["c.jpg"]),
    lambda files: rollback(files, None, no_index),
    release,
    fail_to_write,
    lambda files: publish_refresh(files, row("f.jpg"), retired=["a.jpg"]),
    be_refused,
    seal_and_publish,
    build_index,
    lambda files: compact(files, choose_index=no_index),
    lambda files: vacuum(files, keep_days=0, keep_versions=2),
    lambda files: purge(files, ["b.jpg"], no_index),
)


def live(store):
    files = StoreFiles(store)
    for operation in LIFE:
        with write_lock(files):
            if files.exists("store.json"):
                finish_publication(files)
            operation(files)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A store on a disk with a life of its own, and its trace."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE_TRACE_VARIABLE, str(folder / "trace.jsonl"))
        live(folder / "store")
    return folder / "trace.jsonl", folder / "store"


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a server of its own."""
    with running_server() as (url, _):
        yield from bucket_on(url, monkeypatch)


@pytest.fixture
def doctored(recorded, tmp_path):
    """Function from a change of the trace's lines to the deviations that are found then."""

    def find(change, *, store=None):
        lines = [json.loads(line) for line in recorded[0].read_text().splitlines()]
        lines = change(lines) or lines
        (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return check(tmp_path / "trace.jsonl", store).deviations

    return find


def is_put(line, pattern, number=None):
    return line.get("what") == "put" and re.fullmatch(pattern, line["path"]) is not None


def puts(lines, pattern):
    return [line for line in lines if is_put(line, pattern)]


def without(lines, dropped):
    ids = {line["id"] for line in dropped}
    return [line for line in lines if line["id"] not in ids]


def added(lines, after=None, **change):
    """Lines with one more change, at the end or after the change of a line."""
    at_ns = 1 + max(line["at_ns"] for line in lines if after is None or line["id"] == after["id"])
    first = {"id": 10**6, "host": "other", "pid": 1, "at_ns": at_ns, "store": lines[0]["store"]} | change
    if first["what"] == "put":
        first = {"size": 1, "condition": None, "content": None} | first
    tag = {"sha256": hashlib.sha256((first.get("content") or "").encode()).hexdigest()}
    return [*lines, first, {"id": 10**6, "host": "other", "pid": 1, "at_ns": at_ns, "outcome": "done", "tag": tag}]


CURRENT, LIST = r"CURRENT\.json", r"deletions/.*"
ENTRY, PART = r"items/_delta_log/\d+\.json", r"items/part-.*\.parquet"
PUBLISHED, JOURNAL = r"runs/[^/]+/published\.json", r"runs/[^/]+/journal/.*\.json"


def test_real_changes_follow_the_protocol_and_leave_the_files_that_are_there(recorded):
    trace, store = recorded
    done = run_script("check_store_trace.py", trace, "--store", store, timeout_s=60)
    found = last_json(done)
    assert (found["deviations"], done.returncode) == (0, 0), done.stdout
    assert found["effects"] > 100
    kinds = {line["what"] for line in map(json.loads, trace.read_text().splitlines()) if "what" in line}
    assert kinds == {"put", "delete"}


@pytest.mark.medium
def test_a_store_in_a_bucket_follows_the_protocol(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv(STORE_TRACE_VARIABLE, str(tmp_path / "trace.jsonl"))
    live(f"{bucket}/store")
    found = check(tmp_path / "trace.jsonl", f"{bucket}/store")
    assert found.deviations == []
    assert found.num_effects > 100


def test_no_line_is_long_and_nothing_is_written_without_the_variable(recorded, tmp_path, monkeypatch):
    assert max(map(len, recorded[0].read_bytes().splitlines())) < 64 << 10
    assert isinstance(StoreFiles(tmp_path).backend, DiskBackend)
    monkeypatch.setenv(STORE_TRACE_VARIABLE, str(tmp_path / "t"))
    assert not isinstance(StoreFiles(tmp_path).backend, DiskBackend)
    assert worker_options() == {"runtime_env": {"env_vars": {STORE_TRACE_VARIABLE: str(tmp_path / "t")}}}
    view = model_files(StoreFiles(tmp_path), "other")
    view.write("runs/r/STOP", b"")
    view.delete("runs/r/STOP")
    lines = list(map(json.loads, (tmp_path / "t").read_text().splitlines()))
    assert [line.get("path") or line.get("paths") for line in lines if "what" in line] == [
        "models/other/runs/r/STOP",
        ["models/other/runs/r/STOP"],
    ]
    assert all(line["at_ns"] <= later["at_ns"] for line, later in pairwise(lines))


@pytest.mark.medium
def test_a_process_that_was_killed_before_it_could_record_the_end_of_a_change_is_no_deviation(recorded, doctored):
    ends = [json.loads(line) for line in recorded[0].read_text().splitlines() if '"outcome"' in line]
    found = {
        end["id"]: deviations
        for end in ends
        if (deviations := doctored(lambda lines, end=end: [line for line in lines if line != end], store=recorded[1]))
    }
    assert found == {}


@pytest.mark.medium
def test_effects_of_processes_that_overlap_are_in_no_order(recorded, doctored):
    lines = [json.loads(line) for line in recorded[0].read_text().splitlines()]
    last_ns = {line["id"]: line["at_ns"] for line in lines if "outcome" in line}
    for number in sorted(last_ns):
        later = min((at_ns for other, at_ns in last_ns.items() if other > number), default=None)
        if later is None:
            continue

        def delayed(lines, number=number, later=later):
            """As if another process had seen the change before its own process wrote that it was made."""
            return [
                line | {"at_ns": later + 1} if line["id"] == number and "outcome" in line else line for line in lines
            ]

        assert doctored(delayed) == [], number


def dropped(pattern, which=-1):
    return lambda lines: without(lines, puts(lines, re.escape(puts(lines, pattern)[which]["path"])))


def changed(pattern, which=-1, **fields):
    return lambda lines: puts(lines, pattern)[which].update(fields)


def with_content(pattern, change, which=-1):
    def doctor(lines):
        line = puts(lines, pattern)[which]
        content = json.loads(line["content"])
        line["content"] = json.dumps(change(content) or content)

    return doctor


def published_part(lines):
    newest = max(puts(lines, ENTRY), key=lambda line: line["path"])
    return "items/" + re.search(r'"add": {"path": "([^"]+)"', newest["content"])[1]


def tag_of(lines, path):
    """Version of a file that the trace leaves."""
    number = [line["id"] for line in lines if line.get("path") == path][-1]
    return next(line["tag"] for line in lines if line["id"] == number and "tag" in line)


def session_goes_back(lines):
    path = next(line["path"] for line in puts(lines, r"runs/[^/]+/run\.json") if '"session": "0001' in line["content"])
    return added(lines, what="put", path=path, condition=tag_of(lines, path), content='{"session": "0000-a"}')


def rewritten(lines, pattern, **fields):
    line = puts(lines, pattern)[0]
    tag = next(each["tag"] for each in lines if each["id"] == line["id"] and "tag" in each)
    given = {"what": "put", "path": line["path"], "condition": tag, "content": line["content"]}
    return added(lines, after=line, **given | fields)


def never_purged(lines):
    entry = puts(lines, r"items/_delta_log/.*1\.json")[0]
    return rewritten(without(lines, puts(lines, r"purged\.json")), re.escape(entry["path"]))


def to_other_files(lines):
    path, content = puts(lines, ENTRY)[1]["path"], json.dumps({"add": {"path": "part-other.parquet"}})
    return added(lines, what="put", path=path, condition=tag_of(lines, path), content=content)


def same_move_again(lines):
    """Two moves that replace one version: the server ignored the condition of the second."""
    last = puts(lines, CURRENT)[-1]
    return added(lines, **{name: last[name] for name in ("what", "path", "condition")}, content=last["content"] + " ")


def written_after_its_manifest(lines):
    return added(lines, puts(lines, r"index/.*/manifest\.json")[0], what="put", path="index/000001/more")


DEVIATIONS = {
    "published before its record": (dropped(PUBLISHED), "written before runs/.*/published.json"),
    "published before its entry": (dropped(ENTRY), r"the log of items lacks an entry|written before items/_delta_log"),
    "record of another publication": (
        with_content(PUBLISHED, lambda content: content | {"items": 0}, which=0),
        "the record of .* is of other versions",
    ),
    "published without a condition": (changed(CURRENT, condition=None), "CURRENT.json was written without a condition"),
    "published over another one": (
        changed(CURRENT, condition={"sha256": "0" * 64}),
        "CURRENT.json replaced another version than the last one",
    ),
    "server that ignores conditions": (same_move_again, "CURRENT.json replaced another version than the last one"),
    "published backwards": (
        with_content(CURRENT, lambda content: content | {"run_id": "2000"}),
        "CURRENT went back",
    ),
    "log entry without a condition": (changed(ENTRY, 1, condition=None), "items/_delta_log/.* without a condition"),
    "log entry as of a version": (changed(ENTRY, 1, condition={"sha256": "0"}), "_delta_log/.* was not there"),
    "log entry written again": (
        lambda lines: rewritten(lines, ENTRY, condition="absent", content="{} "),
        "_delta_log/.* was written as new, and was there",
    ),
    "log entry rewritten without a purge": (never_purged, "was rewritten, and nothing is purged"),
    "log entry rewritten to other files": (to_other_files, "was rewritten to other files"),
    "entry before its part file": (dropped(PART, 0), "_delta_log/.* was written before items/part-"),
    "journal before its part file": (dropped(PART, 0), "runs/.*/journal/.* was written before items/part-"),
    "published part deleted": (
        lambda lines: added(lines, what="delete", paths=[published_part(lines)]),
        "deleted what is published: items/part-",
    ),
    "published log entry deleted": (
        lambda lines: added(lines, what="delete", paths=[puts(lines, ENTRY)[0]["path"]]),
        "deleted what is published: items/_delta_log",
    ),
    "deleted without a list": (
        lambda lines: added(lines, puts(lines, LIST)[0], what="delete", paths=[puts(lines, PART)[0]["path"]]),
        "items/part-.* was deleted, and no published list named it",
    ),
    "journal deleted": (
        lambda lines: added(lines, puts(lines, JOURNAL)[0], what="delete", paths=[puts(lines, JOURNAL)[0]["path"]]),
        "runs/.*/journal/.* was deleted, and no published list named it",
    ),
    "index deleted": (
        lambda lines: added(lines, puts(lines, LIST)[0], what="delete", paths=["index/000009/vectors.faiss"]),
        "index/000009/vectors.faiss was deleted, and no published list named it",
    ),
    "list that is not there": (dropped(LIST), "CURRENT.json names deletions/.*, which was not there"),
    "list of what is published": (
        lambda lines: with_content(LIST, lambda content: [*content, published_part(lines)])(lines),
        "marked what is published to be deleted",
    ),
    "list rewritten": (lambda lines: rewritten(lines, LIST, content="[]"), "deletions/.* was rewritten"),
    "session that goes back": (session_goes_back, "run.json: session 0 after 1"),
    "index written after its manifest": (written_after_its_manifest, "written after the manifest next to it"),
    "published part rewritten": (
        lambda lines: added(lines, what="put", path=published_part(lines)),
        "is published, and was rewritten without a condition",
    ),
    "damaged line": (lambda lines: [{"id": 1}, *lines], "line 1 of the trace is damaged"),
}


@pytest.mark.parametrize("name", DEVIATIONS)
def test_each_kind_of_deviation_is_found(doctored, name):
    doctor, message = DEVIATIONS[name]
    found = doctored(doctor)
    assert any(re.search(message, each) for each in found), found


def test_files_that_are_there_are_compared(recorded, tmp_path, doctored):
    _, store = recorded

    def find(change):
        return doctored(change, store=store)

    def published(lines):
        return puts(lines, re.escape(published_part(lines)))

    gone = find(lambda lines: without(lines, published(lines)))
    assert any("is there, and nobody has written it" in each for each in gone), gone
    other = find(lambda lines: published(lines)[-1].update(size=1))
    assert any(re.search(r"has \d+ bytes, and was written with 1", each) for each in other), other
    more = find(lambda lines: added(lines, what="put", path="items/part-x.parquet"))
    assert more == ["items/part-x.parquet is gone, and nobody has deleted it"]


@pytest.mark.medium
def test_a_trace_of_another_store_is_told(recorded, tmp_path):
    done = run_script("check_store_trace.py", recorded[0], "--store", tmp_path, timeout_s=60)
    assert done.returncode == 1
    assert "the trace has no change of" in done.stdout
    assert run_script("check_store_trace.py", tmp_path / "none", timeout_s=60).returncode == 2
