"""Views of further models: their paths, what is published of them, and that they travel to other processes."""

import pickle

import pytest

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, Current, is_model_name, read_current, utc_now, write_record
from embedder.store.lock import Lease, LeaseLostError
from embedder.store.tables.models import model_files, model_names, views


def publication(**fields):
    return Current(run_id="20240101T000000Z-1000", embeddings=1, items=1, published_at=utc_now(), **fields)


def test_a_view_reads_its_part_of_the_publication_and_its_own_files(tmp_path):
    files = StoreFiles(tmp_path / "store")
    write_record(files, CURRENT_FILE, publication(models={"tags": publication().model_copy(update={"items": 7})}))
    view = model_files(files, "tags")
    assert read_current(view).items == 7
    assert read_current(model_files(files, "other")) is None
    assert read_current(model_files(view, "main")).items == 1
    view.write("items/part", b"rows")
    assert files.read("models/tags/items/part") == b"rows"
    assert model_names(read_current(files)) == ("tags",)
    assert list(views(files, read_current(files))) == ["", "tags"]


def test_a_store_of_an_earlier_release_has_one_model(tmp_path):
    files = StoreFiles(tmp_path / "store")
    write_record(files, CURRENT_FILE, publication())
    text = files.read(CURRENT_FILE).replace(b'"models": {}', b'"older": 1')
    files.write(CURRENT_FILE, text)
    assert model_names(read_current(files)) == ()


def test_a_view_goes_to_another_process_as_it_is(tmp_path):
    view = pickle.loads(pickle.dumps(model_files(StoreFiles(tmp_path / "store"), "tags")))
    assert (view.model, view.main.address) == ("tags", str(tmp_path / "store"))
    assert view.option == f"--store {tmp_path}/store --model tags"


def test_a_view_commits_under_the_lock_of_its_store(tmp_path):
    files = StoreFiles(tmp_path / "store")

    class Lost(Lease):
        def confirm(self):
            raise LeaseLostError("taken over")

    files.lease = Lost(files)
    with pytest.raises(LeaseLostError, match="taken over"):
        model_files(files, "tags").confirm_lease()


@pytest.mark.parametrize("name", ["Tags", "9", "a-b", "a" * 33, "../main", "a\n", "ä"])
def test_a_name_that_no_model_has_is_refused(tmp_path, name):
    assert not is_model_name(name)
    with pytest.raises(StoreError, match="no model has such a name"):
        model_files(StoreFiles(tmp_path / "store"), name)
