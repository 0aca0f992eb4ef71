"""Folders of a user who has none."""

from pathlib import Path

from embedder.media import fonts
from embedder.storage.object_stores import profile_settings
from embedder.storage.user_cache import cache_folder, home_folder


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
