"""Folders of a user who has none."""

from pathlib import Path

from embedder.media import fonts
from embedder.storage.object_stores import profile_settings
from embedder.storage.user_cache import cache_folder, drop_folders, home_folder


def test_a_copy_that_another_process_deletes_at_the_same_time_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in "abc":
        (cache_folder("copies") / name).mkdir(parents=True)
    is_folder = Path.is_dir

    def deleted_after(path):
        found = is_folder(path)
        if path.name == "b":
            path.rmdir()
        return found

    monkeypatch.setattr(Path, "is_dir", deleted_after)
    drop_folders("copies", 1)
    assert len(list(cache_folder("copies").iterdir())) == 1


def test_python_calls_of_a_user_without_a_home_use_the_one_of_containers(monkeypatch):
    def no_entry(uid):
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "AWS_PROFILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert home_folder() == Path("/")
    assert cache_folder("models") == Path("/.cache/embedder/models")
    assert profile_settings() == ({}, None)
    assert Path("/.fonts") in fonts._font_folders()
