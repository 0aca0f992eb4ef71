"""Records of a store that others wrote: numbers and names that lead elsewhere are refused in one line."""

import json

import pytest
from store_samples import row
from store_states import new_store, publish_refresh

from embedder.errors import StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.journal.journal import PartFile
from embedder.store.journal.runs import RUN_FILE
from embedder.store.layout import CURRENT_FILE, PUBLISHED_FILE, RunInfo, read_current, read_record, run_file
from embedder.store.publish.history import past_runs

RUN_IDS = ("../../../etc", "/etc", "..", ".", "", ".hidden", "a/b", "a\\b", "a\nb", "a b", "r\u00e9", "a" * 129)
NOTHING_LIKE_IT = "a run id has letters, digits, _, - and ., at most 128, the first one no point"


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    return files


def changed(files, path, **keys):
    """Change keys of a record of a store; those of an object inside it next to its others."""
    record = json.loads(files.read(path))
    for name, value in keys.items():
        record[name] = record[name] | value if isinstance(record.get(name), dict) and isinstance(value, dict) else value
    files.write(path, json.dumps(record).encode())


def refusal(read) -> str:
    with pytest.raises(StoreError) as refused:
        read()
    assert "\n" not in str(refused.value)
    return str(refused.value)


HOLD = {"since": "2026-01-01T00:00:00Z", "from_run": "r1", "to_run": "r2"}


@pytest.mark.parametrize("run_id", RUN_IDS)
@pytest.mark.parametrize("key", ["run_id", "previous", "restores", "interim_of", "hold.from_run", "hold.to_run"])
def test_a_run_id_is_the_name_of_one_folder(files, key, run_id):
    name, _, inner = key.partition(".")
    changed(files, CURRENT_FILE, **{name: HOLD | {inner: run_id} if inner else run_id})
    message = refusal(lambda: open_store(files.address))
    assert message.startswith(f"{files.uri(CURRENT_FILE)}: not a valid CURRENT.json: {key} = ")
    assert f": {NOTHING_LIKE_IT}; restore the file" in message


@pytest.mark.parametrize(
    "run_id", ["20260101T000000Z-1abc", "20260101T000000Z-0f00ff", "r1", "A_b.c-d", "-", "a..b", "a" * 128]
)
def test_run_ids_as_runs_make_them_are_read(files, run_id):
    keys = {"previous": run_id, "restores": run_id, "hold": HOLD | {"from_run": run_id, "to_run": run_id}}
    changed(files, CURRENT_FILE, **keys)
    assert read_current(files).previous == run_id


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"embeddings": -2}, "embeddings = -2: Input should be greater than or equal to -1"),
        ({"items": 10**30}, f"items = {10**30}: Input should be less than or equal to 999999999999"),
        ({"index": -1}, "index = -1: Input should be greater than or equal to 0"),
        ({"index": 10**12}, f"index = {10**12}: Input should be less than or equal to 999999999999"),
        ({"embeddings": None}, "embeddings = None: Input should be a valid integer"),
        ({"run_id": 5, "items": "x"}, "run_id = 5: Input should be a valid string (and 1 more mistake)"),
        ({"models": 5}, "models = 5: Input should be an object"),
    ],
)
def test_a_number_is_one_that_a_version_or_an_index_can_have(files, keys, said):
    changed(files, CURRENT_FILE, **keys)
    message = refusal(lambda: open_store(files.address))
    assert message == (
        f"{files.uri(CURRENT_FILE)}: not a valid CURRENT.json: {said}; restore the file from a backup, or start a new "
        "store"
    )


@pytest.mark.parametrize("name", ["..", "../../x", "a/b", "Clip", "main", "", "9a", "a" * 33, "a\nb"])
def test_a_models_name_is_one_that_a_model_may_have(files, name):
    own = json.loads(files.read(CURRENT_FILE))
    changed(files, CURRENT_FILE, models={name: own})
    message = refusal(lambda: open_store(files.address))
    assert message.startswith(f"{files.uri(CURRENT_FILE)}: not a valid CURRENT.json: models.")
    assert "a model's name has lower-case letters, digits and _, at most 32 characters" in message


def test_a_record_of_a_further_model_is_looked_at_likewise(files):
    own = json.loads(files.read(CURRENT_FILE))
    changed(files, CURRENT_FILE, models={"clip": own | {"items": -7}})
    assert "models.clip.items = -7: " in refusal(lambda: open_store(files.address))


@pytest.mark.parametrize(
    "keys",
    [
        *({key: "../../../etc"} for key in ("run_id", "previous", "restores", "interim_of")),
        *({key: -1} for key in ("num_items", "num_vectors", "num_rejected", "index")),
        *({"past_indexes": {number: "2026-01-01T00:00:00Z"}} for number in ("-1", "../1", str(10**20))),
        {"model_counts": {"../x": {"num_items": 1}}},
        {"model_counts": {"clip": {"num_items": -1}}},
        {"past_model_indexes": {"..": {}}},
        {"past_model_indexes": {"clip": {"-3": "2026-01-01T00:00:00Z"}}},
    ],
)
def test_the_records_of_earlier_publications_are_looked_at_likewise(files, keys):
    path = run_file(read_current(files).run_id, PUBLISHED_FILE)
    changed(files, path, **keys)
    message = refusal(lambda: past_runs(files))
    assert message.startswith(f"{files.uri(path)}: not a valid published.json: {next(iter(keys))}")


def test_the_record_of_a_run_is_looked_at_likewise(files):
    path = run_file(read_current(files).run_id, RUN_FILE)
    changed(files, path, run_id="../../../etc")
    message = refusal(lambda: read_record(files, path, RunInfo))
    assert f"{files.uri(path)}: not a valid run.json: run_id = '../../../etc': {NOTHING_LIKE_IT}; " in message


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"models":' * 5000, b"", b"{", b"\xff", b"null"])
def test_damaged_json_of_a_record_is_told_in_one_line(files, content):
    files.write(CURRENT_FILE, content)
    assert "not a valid CURRENT.json: " in refusal(lambda: read_current(files))


def test_what_is_found_is_shown_short_and_printable(files):
    changed(files, CURRENT_FILE, run_id="\x1b[31m" + "../" * 10_000)
    message = refusal(lambda: read_current(files))
    assert len(message) < 600
    assert message.isprintable()


def test_hostile_statistics_of_a_part_file_tell_nothing():
    part = PartFile(table="items", path="p", num_rows=1, size_bytes=1, stats="[" * 200_000, session="s")
    assert (part.id_range, part.state) == (None, None)
