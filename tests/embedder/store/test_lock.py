"""Lock of a store: damaged or absurd content, removal by hand, a full disk, and release."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest
from store_samples import row
from store_states import new_store, publish_refresh

from embedder.errors import StoreError
from embedder.store.environment import LEASE_S, MAX_LEASE_S
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current, utc_now
from embedder.store.lock import LOCK_FILE, LeaseLostError, read_holder, write_lock
from embedder.store.publish.current import move_current

HOLDER = {"token": "x", "pid": 7, "host": "elsewhere", "since": "then", "beat": 1}
DAMAGED = [b"", b"no JSON", b"\xff\xfe", b"{", b"[1]", b"null", b"7", b"[" * 100_000, b'{"lease_s": 5}x']
ABSURD = [1e9, MAX_LEASE_S + 1, float("nan"), float("inf"), "nan", "soon", -5, 0, None, [], {}, 10**400]


def state(run_id: str) -> Current:
    return Current(run_id=run_id, embeddings=1, items=1, published_at=utc_now())


def watching(files: StoreFiles, step_s: float) -> tuple[list[float], list[float]]:
    """Advance the time by a step with each look at the clock; the times that were seen, and how long was slept."""
    ticks, times_s, slept_s = count(), [], []

    def clock_s() -> float:
        times_s.append(next(ticks) * step_s)
        return times_s[-1]

    files.environment = replace(files.environment, clock_s=clock_s, sleep=slept_s.append)
    return times_s, slept_s


@pytest.fixture
def in_bucket(bucket) -> StoreFiles:
    return StoreFiles(f"{bucket}/store")


@pytest.mark.parametrize(
    ("content", "lease_s"),
    [
        *((content, LEASE_S) for content in DAMAGED),
        *((json.dumps(HOLDER | {"lease_s": lease_s}).encode(), LEASE_S) for lease_s in ABSURD),
        (json.dumps(HOLDER).encode(), LEASE_S),
        (json.dumps(HOLDER | {"lease_s": "2.5"}).encode(), 2.5),
        (json.dumps(HOLDER | {"lease_s": MAX_LEASE_S}).encode(), MAX_LEASE_S),
    ],
    ids=lambda value: repr(value)[-24:],
)
def test_whatever_a_lock_holds_it_is_watched_for_one_lease_and_then_taken_over(in_bucket, content, lease_s):
    in_bucket.write(LOCK_FILE, content)
    times_s, slept_s = watching(in_bucket, lease_s / 4)
    with write_lock(in_bucket):
        assert times_s == [0, lease_s / 4, lease_s / 2, 3 * lease_s / 4, lease_s]
        assert len(slept_s) == 3 and max(slept_s) <= lease_s / 4
        assert read_holder(in_bucket)["pid"] == os.getpid()
        move_current(in_bucket, state("next"))
    assert read_current(in_bucket).run_id == "next"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"lease_s": -1}'])
def test_a_damaged_lock_that_somebody_still_writes_is_not_taken_over(in_bucket, content):
    in_bucket.write(LOCK_FILE, content)
    watching(in_bucket, 1.0)
    holder = StoreFiles(in_bucket.address)

    def written_meanwhile(seconds: float) -> None:
        holder.write(LOCK_FILE, content + b" ")

    in_bucket.environment = replace(in_bucket.environment, sleep=written_meanwhile)
    with pytest.raises(StoreError, match=r"another run is writing to it \(unknown\)"), write_lock(in_bucket):
        pytest.fail("two hold it")
    assert in_bucket.read(LOCK_FILE) == content + b" "


def test_who_takes_a_silent_lock_over_makes_what_the_other_has_read_out_of_date(in_bucket):
    move_current(in_bucket, state("before"))
    _, tag = in_bucket.read_tagged("CURRENT.json")
    in_bucket.write(LOCK_FILE, json.dumps(HOLDER).encode())
    watching(in_bucket, LEASE_S)
    with write_lock(in_bucket):
        assert in_bucket.read_tagged("CURRENT.json")[1] != tag, "its request may still be on the way"
    current = read_current(in_bucket)
    assert (current.run_id, len(current.fence)) == ("before", 16)


def test_a_lock_removed_by_hand_on_a_disk_says_never_to_do_that(tmp_path):
    files = new_store(tmp_path / "store")
    with (
        pytest.raises(LeaseLostError, match=r"its file \.lock was removed while this run held it.*never remove \.lock"),
        write_lock(files),
    ):
        (tmp_path / "store" / LOCK_FILE).unlink()
        move_current(files, state("ours"))
    assert read_current(files) is None


def test_who_locks_a_store_whose_lock_was_removed_is_not_disturbed_by_the_one_before(tmp_path):
    files, other = new_store(tmp_path / "store"), StoreFiles(tmp_path / "store")
    with pytest.raises(LeaseLostError), write_lock(files):
        (tmp_path / "store" / LOCK_FILE).unlink()
        with write_lock(other):
            holder = other.read(LOCK_FILE)
            with pytest.raises(LeaseLostError):
                publish_refresh(files, row("ours.jpg"))
            assert other.read(LOCK_FILE) == holder
            publish_refresh(other, row("theirs.jpg"))
            published = read_current(other)
            raise LeaseLostError("so that the first one ends within the second")
    assert read_current(files) == published


def test_a_lock_removed_by_hand_in_a_bucket_says_that_it_would_have_expired(in_bucket):
    with (
        pytest.raises(LeaseLostError, match=r"its \.lock was removed while .* \(a lock that nobody holds expires"),
        write_lock(in_bucket),
    ):
        in_bucket.delete(LOCK_FILE)
        move_current(in_bucket, state("ours"))
    assert read_current(in_bucket) is None
    assert not in_bucket.exists(LOCK_FILE), "what is another's is not made again"


@pytest.mark.medium
def test_a_disk_without_room_for_the_holder_is_locked_all_the_same(tmp_path):
    program = (
        "import resource, sys\n"
        "from embedder.store.files import StoreFiles\n"
        "from embedder.store.lock import write_lock\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with write_lock(StoreFiles(sys.argv[1])): print('held')\n"
        "with write_lock(StoreFiles(sys.argv[1])): print('held again')\n"
    )
    store = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", program, str(store)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("held\nheld again\n", "")
    assert (store / LOCK_FILE).read_bytes() == b""


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_lock_is_let_go_at_the_end_and_after_an_error(tmp_path, request, is_remote, said):
    files = StoreFiles(f"{request.getfixturevalue('bucket')}/store" if is_remote else tmp_path / "store")
    for error in (None, KeyError("k"), StoreError("a mistake")):
        try:
            with write_lock(files):
                assert read_holder(files)["pid"] == os.getpid()
                if error is not None:
                    raise error
        except (KeyError, StoreError) as caught:
            assert caught is error
        assert "pid" not in read_holder(files)
        assert ("released" in read_holder(files)) == is_remote
    assert said == [], "it is taken at once each time"
