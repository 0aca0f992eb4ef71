"""Requests of our own listing are signed as botocore signs them, with the credentials that obstore would use."""

from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPException
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from embedder.storage import s3_listing
from embedder.storage.object_stores import ObjectStoreError, named_errors

QUERY = {"list-type": "2", "prefix": "pics/ä b+c&d=//~'(*)/", "start-after": "pics/\x01\t%41", "encoding-type": "url"}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """An environment without AWS but for a key."""
    for variable in [each for each in s3_listing.os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({}, "https://s3.us-east-1.amazonaws.com/team?"),
        ({"REGION": "eu-west-3", "SESSION_TOKEN": "a/token=="}, "https://s3.eu-west-3.amazonaws.com/team?"),
        ({"ENDPOINT_URL": "http://127.0.0.1:9000/"}, "http://127.0.0.1:9000/team?"),
        ({"ENDPOINT_URL": "https://[2001:db8::1]:9000"}, "https://[2001:db8::1]:9000/team?"),
        ({"VIRTUAL_HOSTED_STYLE_REQUEST": "true"}, "https://team.s3.us-east-1.amazonaws.com/?"),
        ({"REQUEST_PAYER": "true", "DEFAULT_REGION": "cn-north-1"}, "https://s3.cn-north-1.amazonaws.com/team?"),
    ],
)
def test_a_request_is_signed_as_botocore_signs_it(monkeypatch, settings, start):
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    url, headers = s3_listing._Signer("team").sign(QUERY)
    assert url.startswith(start)
    assert url.partition("?")[2] == "&".join(f"{name}={quote(QUERY[name], safe='')}" for name in sorted(QUERY))
    given = {name: value for name, value in headers.items() if name == "x-amz-request-payer"}
    request = AWSRequest("GET", url, headers=given)
    moment = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%SZ")
    key, secret = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    region = settings.get("REGION") or settings.get("DEFAULT_REGION") or "us-east-1"
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: moment)
    S3SigV4Auth(Credentials(key, secret, settings.get("SESSION_TOKEN")), "s3", region).add_auth(request)
    assert headers["authorization"] == request.headers["Authorization"]


def test_without_signatures_nothing_is_signed(monkeypatch):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert s3_listing._Signer("team").sign(QUERY)[1] == {}


def test_without_readable_credentials_the_cure_is_named(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(s3_listing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ObjectStoreError, match=r"s3://team: a key with //.*pip install 'embedder\[s3\]'.*rename"
    ) as caught:
        s3_listing._Signer("team").sign(QUERY)
    assert caught.value.kind == "NoCredentials"


PAGE = """<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>
<Contents><Key>p/a%2F+%2B%09</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>
</ListBucketResult>"""


@pytest.fixture
def answer(monkeypatch):
    """Makes a server give these answers, one after the other, each a status with a body or an error."""

    def prepare(*answers):
        left = list(answers)

        @contextmanager
        def ask(*_, **__):
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, Exception):
                raise found
            yield SimpleNamespace(status=found[0], read=found[1].encode)

        monkeypatch.setattr(s3_listing.Connections, "ask", ask)
        monkeypatch.setattr(s3_listing.time, "sleep", lambda _: None)

    return prepare


def test_a_busy_server_is_asked_again_and_keys_are_decoded(answer):
    answer((503, "<Code>SlowDown</Code>"), ConnectionResetError(), (429, ""), HTTPException(), (200, PAGE))
    (page,) = s3_listing._list_all("s3://team", "p/", "")
    assert page["path"].to_pylist() == ["p/a/ +\t"]
    assert page.schema == s3_listing.SCHEMA


@pytest.mark.parametrize(
    ("given", "kind", "transient", "words"),
    [
        ((403, "<Error><Code>AccessDenied</Code></Error>"), "PermissionDenied", False, "403 AccessDenied"),
        ((404, "<Error><Code>NoSuchBucket</Code></Error>"), "NoBucket", False, "no such bucket"),
        ((400, "<Error><Code>ExpiredToken</Code></Error>"), "RequestRefused", False, "400 ExpiredToken"),
        ((503, "<Error><Code>SlowDown</Code></Error>"), "NetworkError", True, "503"),
        (ConnectionRefusedError("refused"), "NetworkError", True, "refused"),
        ((200, "<ListBucketResult><Key>\x01</Key>"), "OddKey", False, "rename or delete"),
    ],
)
def test_a_failed_request_is_explained_as_any_of_the_clients(answer, given, kind, transient, words):
    answer(given)
    with pytest.raises(ObjectStoreError) as caught, named_errors("s3://team/pics"):
        list(s3_listing._list_all("s3://team", "pics/", ""))
    assert (caught.value.kind, caught.value.transient) == (kind, transient)
    assert words in caught.value.message
