"""Profiles of `~/.aws`, which boto3 reads: what they add to the environment, and what stands in their way."""

import os
import sys

import pytest
from bucket_server import KEY, SECRET

from embedder.errors import StoreError
from embedder.storage import object_stores
from embedder.storage.object_stores import ObjectStoreError, profile_settings, storage_options
from embedder.store.files import StoreFiles


@pytest.fixture
def profiles(monkeypatch, tmp_path):
    """Write the two files of profiles, and leave no other variable of AWS."""
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        monkeypatch.setenv(name, str(tmp_path / file))

    def written(config: str = "", credentials: str = "") -> None:
        (tmp_path / "config").write_text(config)
        (tmp_path / "credentials").write_text(credentials)

    object_stores.bucket_store.cache_clear()
    yield written
    object_stores.bucket_store.cache_clear()


@pytest.fixture
def without_boto3(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)


KEYS = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"


@pytest.mark.parametrize("name", [None, ""])
def test_the_default_profile_needs_no_variable(profiles, monkeypatch, name):
    profiles("[default]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:9\n", f"[default]\n{KEYS}")
    if name is not None:
        monkeypatch.setenv("AWS_PROFILE", name)
    settings, provider = profile_settings()
    assert settings == {"region": "eu-west-1", "endpoint": "http://127.0.0.1:9"}
    assert (provider()["access_key_id"], provider()["secret_access_key"]) == (KEY, SECRET)
    options = storage_options("s3://team/store")
    assert (options["aws_region"], options["aws_access_key_id"], options["allow_http"]) == ("eu-west-1", KEY, "true")
    assert storage_options("gs://team/store")["allow_http"] == "false"


def test_credentials_come_from_a_process_that_a_profile_names(profiles, monkeypatch, tmp_path):
    answer = f'{{"Version": 1, "AccessKeyId": "{KEY}", "SecretAccessKey": "{SECRET}", "SessionToken": "token"}}'
    (tmp_path / "answer.json").write_text(answer)
    profiles(f"[profile nightly]\ncredential_process = cat {tmp_path}/answer.json\n")
    monkeypatch.setenv("AWS_PROFILE", "nightly")
    options = storage_options("s3://team/store")
    assert (options["aws_access_key_id"], options["aws_session_token"]) == (KEY, "token")


def test_variables_win_over_a_profile(profiles, monkeypatch):
    profiles("[profile nightly]\nregion = eu-west-1\nendpoint_url = http://127.0.0.1:9\n", f"[nightly]\n{KEYS}")
    settings = {"PROFILE": "nightly", "REGION": "us-west-2", "ENDPOINT_URL": "https://s3", "ACCESS_KEY_ID": "a"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    assert profile_settings() == ({}, None)
    assert storage_options("s3://team/store")["allow_http"] == "false"


def test_a_profile_without_credentials_leaves_them_to_the_machine(profiles):
    profiles("[default]\nregion = eu-west-1\n")
    assert profile_settings() == ({"region": "eu-west-1"}, None)


@pytest.mark.parametrize(
    ("config", "credentials", "message"),
    [
        ("[profile other]\nregion = eu-west-1\n", "", "nightly.* could not be found"),
        ("[broken\n", "", "Unable to parse config file"),
        ("", f"[nightly]\naws_access_key_id = {KEY}\n", "Partial credentials"),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_line_unless_variables_give_credentials(
    profiles, monkeypatch, config, credentials, message
):
    profiles(config, credentials)
    monkeypatch.setenv("AWS_PROFILE", "nightly")
    files = StoreFiles("s3://team/store")
    for attempt in (lambda: files.read("a"), lambda: files.create("a", b""), lambda: list(files.list(""))):
        with pytest.raises(
            StoreError, match=f"store the AWS profile can't be used: .*{message}.*correct AWS_PROFILE"
        ) as caught:
            attempt()
        assert "\n" not in str(caught.value)
        assert KEY not in str(caught.value)
    with pytest.raises(ObjectStoreError, match=f"the AWS profile can't be used: .*{message}") as caught:
        storage_options("s3://team/table")
    assert KEY not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    assert profile_settings() == ({}, None)


def test_a_named_profile_without_boto3_says_what_to_install(profiles, monkeypatch, without_boto3):
    profiles("", f"[nightly]\n{KEYS}")
    assert profile_settings() == ({}, None), "a file by itself asks for nothing"
    monkeypatch.setenv("AWS_PROFILE", "nightly")
    with pytest.raises(ObjectStoreError, match=r"boto3.* is not installed; pip install 'embedder\[s3\]'"):
        profile_settings()
    with pytest.raises(StoreError, match=r"pip install 'embedder\[s3\]'"):
        StoreFiles("s3://team/store").read("a")
