"""Keys of a bucket that obstore can't name: each is a reject that names it, and its neighbours are embedded."""

from concurrent.futures import ThreadPoolExecutor

import boto3
import pyarrow as pa
import pytest
import samples
from bucket_server import KEY, SECRET
from embedding_runs import embedded
from pyarrow import parquet
from refresh_runs import refreshed

import embedder
from embedder.sources import object_listing
from embedder.sources.listing import list_sources
from embedder.storage import s3_listing
from embedder.storage.object_stores import ObjectStoreError, bucket_store, split_place
from embedder.storage.printable import printable

ODD = (
    "double//slash{n}.png", "a///b{n}.png", "/leading{n}.png", "dot/./a{n}.png", "./b{n}.png", "up/../b{n}.png",
    "tab{n}\t.png", "carriage{n}\r.png", "bell{n}\x07.png", "delete{n}\x7f.png", "first\x01/c{n}.png",
)  # fmt: skip
GOOD = (
    "plain{n}.png", "a b{n}.png", "a+b{n}.png", "a%20b{n}.png", "a%2F%2Fb{n}.png", "%2e%2e%2f{n}.png", "q?{n}&#=;.png",
    "back\\slash{n}.png", "co:lon{n}.png", "😀{n}.png", "café{n}.png", "trailing{n} .png", "twin{n}", "..a/b{n}..png",
    ".../c{n}.png", 'x{n}&amp;<y>".png', "next\u0085line{n}.png", "zero\u200bwidth{n}.png", " {n}",
)  # fmt: skip


@pytest.fixture
def put(s3_server, bucket):
    """Writes objects below `pics/`."""
    client = boto3.client(
        "s3",
        endpoint_url=s3_server,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )

    def write(objects):
        with ThreadPoolExecutor(8) as threads:
            name = bucket.removeprefix("s3://")
            list(threads.map(lambda each: client.put_object(Bucket=name, Key=each[0], Body=each[1]), objects.items()))

    return write


def hostile_names(num_good, num_odd):
    """Names of every kind, with the longest that S3 has and files next to folders of the same name."""
    longest = ["l" * (1024 - len("pics/.png")) + ".png", "é" * 507 + "_.png"]
    assert {len(f"pics/{name}".encode()) for name in longest} == {1024}
    inside = [f"twin{GOOD.index('twin{n}')}/in.png", "twin/in.png", "twin"]
    good = [GOOD[n % len(GOOD)].format(n=n) for n in range(num_good - 5)] + longest + inside
    odd = [ODD[n % len(ODD)].format(n=n) for n in range(num_odd)]
    assert (len(set(good)), len(set(odd))) == (num_good, num_odd)
    return good, odd


def listed(bucket, **settings):
    source = embedder.config.SourceConfig(path=f"{bucket}/pics", **settings)
    return [row for table in list_sources([source]) for row in table.to_pylist()]


def is_named(name, rejects):
    return any(item.partition("#key-")[0] == printable(name) for item in rejects)


@pytest.mark.medium
def test_among_300_hostile_keys_the_good_are_embedded_and_each_other_is_named(make_run, bucket, put):
    good, odd = hostile_names(260, 40)
    put({f"pics/{name}": samples.image_bytes(n) for n, name in enumerate([*good, *odd])})
    put({"pics/": b"", "pics/folder/": b"", "pics/folder/in.png": samples.image_bytes(999), "pics/odd//": b""})
    source = [{"path": f"{bucket}/pics"}]
    config = make_run(source, max_reject_fraction=1)
    report, rows = embedded(config)
    assert {item for item, _ in rows} == {*good, "folder/in.png"}
    assert (report.num_items, report.num_rejected) == (301, 40)
    rejects = embedder.open_store(str(config.store)).rejects().to_pylist()
    assert all(is_named(name, {row["item_id"] for row in rejects}) for name in odd)
    for row in rejects:
        assert row["error_type"] == "OddKey" and "rename the object" in row["error"] and not row["transient"]
        assert (row["item_id"] + row["error"]).isprintable()
        assert f"'{row['item_id'].partition('#key-')[0]}'" in row["error"]
    assert refreshed(config)[0].outcome == "nothing to do"
    put({"pics/late//odd.png": b"x", "pics/late.png": samples.image_bytes(1000)})
    report, _ = refreshed(config)
    assert (report.num_new, report.num_unchanged, report.num_retired) == (2, 301, 0)
    patterns = ["**//**", "**/./**", "./**", "**/../**", *(f"*{mark}*" for mark in "\t\r\x07\x7f\x01")]
    excluded = make_run([source[0] | {"exclude": patterns}], max_reject_fraction=1)
    assert {row["error_type"] for row in listed(bucket, exclude=patterns)} == {None}
    assert refreshed(excluded, forced=("retire",))[0].num_retired == 41


IN_A_FOLDER = (
    "tab\t.png", "new\nline.png", "bell\x07.png", "per%20cent%2Fslash.png", "back\\slash.png", "co:lon.png",
    " leading.png", "..hidden.png", "...png", "a#b?c.png", "quote'\".png", "l" * 240 + ".png", "e\u0301.png",
    "$VAR.png", "\u202ertl.png", "*star.png", "-dash.png", "~tilde.png", "trailing .png", "sub dir/..x/ y/z.png",
)  # fmt: skip
IN_A_TAR = {
    "a//double.png": True, "./dot.png": True, "tab\t.png": True, "%2e%2e/enc.png": True, "l" * 300 + ".png": True,
    "plain.png": True, "new\nline.png": True, "b/../up.png": False, "/absolute.png": False, "../../escape.png": False,
}  # fmt: skip


@pytest.mark.medium
def test_hostile_names_in_a_folder_and_in_a_table_are_embedded(make_run, tmp_path):
    folder = tmp_path / "names"
    for number, name in enumerate(IN_A_FOLDER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(samples.image_bytes(number))
    config = make_run([{"path": str(folder)}])
    report, rows = embedded(config)
    assert {item for item, _ in rows} == set(IN_A_FOLDER)
    assert report.num_rejected == 0
    assert refreshed(config)[0].outcome == "nothing to do"
    table = tmp_path / "names.parquet"
    parquet.write_table(pa.table({"photo": [str(folder / name) for name in IN_A_FOLDER]}), table)
    columns = {"id": "photo", "image": "photo"}
    _, rows = embedded(make_run([{"path": str(table), "columns": columns}], store=str(tmp_path / "of_table")))
    assert {item for item, _ in rows} == {str(folder / name) for name in IN_A_FOLDER}


def test_hostile_names_in_a_tar_are_embedded_or_rejects_that_name_them(make_run, tmp_path):
    members = {name: samples.image_bytes(number) for number, name in enumerate(IN_A_TAR)}
    samples.write_tar(tmp_path / "names.tar", members)
    config = make_run([{"path": str(tmp_path / "names.tar")}], max_reject_fraction=1)
    report, rows = embedded(config)
    assert (len(rows), report.num_rejected) == (sum(IN_A_TAR.values()), len(IN_A_TAR) - sum(IN_A_TAR.values()))
    rejects = {row["item_id"] for row in embedder.open_store(str(config.store)).rejects().to_pylist()}
    assert rejects == {f"names/{name}" for name, is_good in IN_A_TAR.items() if not is_good}
    assert refreshed(config)[0].outcome == "nothing to do"


@pytest.mark.medium
def test_a_listing_is_the_same_before_and_after_an_odd_key_came(bucket, put):
    put({f"pics/{name}": name.encode() for name in hostile_names(60, 1)[0]})
    before = listed(bucket)
    put({"pics/m//odd.png": b"x"})
    after = listed(bucket)
    assert [row for row in after if row["error_type"] is None] == before
    assert [row["item_id"] for row in after if row["error_type"]] == ["m//odd.png"]


def test_keys_that_differ_by_an_outer_slash_are_two_items_of_which_one_is_a_reject(bucket, put):
    put({"pics/a.png": b"1", "pics/a.png/": b"22", "pics/b//c.png": b"3"})
    assert {row["item_id"]: row["error_type"] for row in listed(bucket)} == {
        "a.png": None, "a.png/": "OddKey", "b//c.png": "OddKey",
    }  # fmt: skip


def test_an_odd_folder_among_full_ones_does_not_stop_a_parallel_listing(bucket, put, monkeypatch):
    monkeypatch.setattr(object_listing, "PAGE_NAMES", 3)
    names = [f"{folder}/{n}.png" for folder in ("a", "b", "c") for n in range(5)]
    put({f"pics/{name}": b"x" for name in [*names, "//x.png", "b//x.png", "c/\t.png"]})
    rows = listed(bucket)
    assert sorted(row["item_id"] for row in rows if row["error_type"] is None) == names
    assert sum(row["error_type"] == "OddKey" for row in rows) == 3


@pytest.mark.parametrize("others", [0, 3])
def test_keys_that_begin_with_a_slash_end_no_listing(bucket, put, monkeypatch, others):
    monkeypatch.setattr(object_listing, "PAGE_NAMES", 20)
    names = [f"/x/{number:04d}.jpg" for number in range(40)] + [f"y/{number}.jpg" for number in range(others)]
    put(dict.fromkeys(names, b"x"))
    found = [row for table in list_sources([embedder.config.SourceConfig(path=bucket)]) for row in table.to_pylist()]
    assert len(found) == len(names)


def test_the_root_of_a_bucket_is_listed_past_an_odd_key(bucket, put):
    put({key: key.encode() for key in ("/x.png", "a.png", "m//odd.png", "z.png")})
    rows = [row for table in list_sources([embedder.config.SourceConfig(path=bucket)]) for row in table.to_pylist()]
    assert {"a.png", "z.png"} < {row["item_id"] for row in rows if row["error_type"] is None}
    assert [row["item_id"] for row in rows if row["error_type"]] == ["m//odd.png"]


@pytest.mark.medium
def test_what_obstore_refuses_is_what_is_called_odd(bucket, put):
    for n, name in enumerate([*GOOD, *ODD]):
        put({f"pics{n}/{name}": b"x"})
        store, root = bucket_store(bucket), split_place(bucket)[0]
        given = [
            path for page in s3_listing.list_tables(store, root, f"pics{n}", 10) for path in page["path"].to_pylist()
        ]
        assert given == [f"pics{n}/{name}"]
        try:
            list(store.list(f"pics{n}"))
        except Exception as error:  # noqa: BLE001
            assert type(error).__name__ == "InvalidPathError" and s3_listing.odd_key_problem(given[0])
        else:
            assert s3_listing.odd_key_problem(given[0]) is None


def test_a_cloud_that_is_not_listed_here_names_the_key_and_the_cure(bucket, put):
    shown = {"a//b.png": "'a//b.png'", "t\tx.png": r"'t\tx.png'", "./c.png": "'./c.png'", "../d": "'../d'"}
    for n, name in enumerate(shown):
        put({f"pics{n}/{name}": b"x"})
        with pytest.raises(ObjectStoreError) as caught:
            list(s3_listing.list_tables(bucket_store(bucket), "gs://team", f"pics{n}", 10))
        assert f"'pics{n}/{shown[name][1:]}" in caught.value.message
        assert "rename or delete" in caught.value.message


@pytest.mark.slow
def test_2_500_keys_of_which_100_are_odd_are_listed_and_a_dry_run_ends(bucket, put, run_embedder, tiny_model, tmp_path):
    good, odd = hostile_names(2_400, 100)  # three pages of a listing
    put({f"pics/{name}": name.encode() for name in [*good, *odd]})
    rows = listed(bucket)
    assert {row["item_id"] for row in rows if row["error_type"] is None} == set(good)
    rejects = {row["item_id"] for row in rows if row["error_type"] == "OddKey"}
    assert len(rejects) == 100 and all(is_named(name, rejects) for name in odd)
    dry = ("embed", f"{bucket}/pics", "--model", tiny_model, "--store", tmp_path / "s")
    code, report, said = run_embedder(*dry, "--dry-run", "--json")
    assert code == 0, said
    assert report["num_to_embed"] == 2_500
