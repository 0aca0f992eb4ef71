"""Whoever can only read a store can use all that reads it; and none of that changes a byte or a time of the store."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import store_reads
from command_runs import run_here
from samples import image_bytes
from served import make_store
from store_reads import READS

pytestmark = pytest.mark.medium

NOBODY = "65534"
TIMEOUT_S = 500
MAY_READ = "-all,+dac_read_search"  # the interpreter and the tests may lie in a folder of root's own
AS_NOBODY = (
    *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", f"--inh-caps={MAY_READ}"),
    *(f"--ambient-caps={MAY_READ}", f"--bounding-set={MAY_READ}"),
)
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def as_another_user(store: Path, out: Path) -> tuple[list[str], Path]:
    """Beginning of the command line, and the user's cache: here one that can't be made either."""
    return [*AS_NOBODY], Path("/dev/null/cache")


def on_a_read_only_mount(store: Path, out: Path) -> tuple[list[str], Path]:
    return ["unshare", "-m", "sh", "-c", MOUNTED, str(store)], out / "cache"


@pytest.fixture(scope="module")
def made(tiny_model):
    """A store and its configuration, where any user may read them."""
    folder = Path(tempfile.mkdtemp(prefix="embedder-read-only-"))
    folder.chmod(0o755)
    config, files = make_store(folder, tiny_model)
    toml = folder / "embedder.toml"
    toml.write_text(
        f'model = "{tiny_model}"\nstore = "{config.store}"\nengine = "local"\n[[source]]\npath = "{files}"\n'
    )
    assert run_here("index", "build", "--store", config.store).code == 0, "the store has an index, and words"
    yield Path(config.store), toml
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def failures_of(made, request):
    """Runs all that reads where the store can't be written; gives what fails, by name."""
    store, toml = made

    def run(restrict):
        out = Path(tempfile.mkdtemp(prefix="embedder-read-only-out-"))
        request.addfinalizer(lambda: shutil.rmtree(out))
        restricted, cache = restrict(store, out)
        if os.geteuid() != 0:
            pytest.skip("only root can be another user, or mount")
        probe = [*restricted, "touch", str(store / "probe")]
        written = subprocess.run(probe, capture_output=True, text=True, check=False)
        if written.returncode == 0 or not any(said in written.stderr for said in ("Permission denied", "Read-only")):
            (store / "probe").unlink(missing_ok=True)
            pytest.skip(f"this machine doesn't let root give up writing: {written.stderr.strip()}")
        (out / "query.png").write_bytes(image_bytes(0))
        out.chmod(0o777)
        before = state_of(store)
        ended = subprocess.run(
            [*restricted, sys.executable, store_reads.__file__, str(store), str(toml), str(out)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=out,
            env=os.environ | {"XDG_CACHE_HOME": str(cache), "HOME": str(out), "TMPDIR": str(out)},
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1]) | {"": changed(before, state_of(store))}

    return run


@pytest.fixture(scope="module")
def failures(failures_of):
    """What fails for another user; all of it is run in one process."""
    return failures_of(as_another_user)


@pytest.mark.parametrize("name", READS)
def test_what_only_reads_works_on_a_store_that_can_not_be_written(failures, name):
    assert failures[name] is None, failures[name]


def test_not_a_byte_or_a_time_of_a_store_that_can_not_be_written_changes(failures):
    assert failures[""] == []


@pytest.mark.slow
def test_all_that_only_reads_works_on_a_read_only_mount_too(failures_of):
    failures = failures_of(on_a_read_only_mount)
    assert failures == dict.fromkeys(READS) | {"": []}


@pytest.mark.medium
def test_not_a_byte_or_a_time_of_a_store_changes_where_it_could(made, tmp_path, monkeypatch):
    store, toml = made
    (tmp_path / "query.png").write_bytes(image_bytes(0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, read in READS.items():
        before = state_of(store)
        read(store, toml, tmp_path)
        assert changed(before, state_of(store)) == [], name


def state_of(store: Path) -> dict[str, tuple]:
    """Time and content of each file and folder."""
    return {
        str(path.relative_to(store)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [store, *store.rglob("*")]
    }


def changed(before: dict, after: dict) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
