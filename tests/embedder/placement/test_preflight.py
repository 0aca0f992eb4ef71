import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import samples

from embedder.placement import node_probe
from embedder.placement.preflight import (
    Access,
    access_problems,
    check_cluster,
    code_problems,
    model_files,
    read_token,
    refusal,
    space_problems,
    spill_warning,
    visit,
    wanted_versions,
)
from embedder.store.files import StoreFiles

GIB = 1 << 30
FOLDER = "runs/20260101T000000Z-0000/preflight"
# A node without this package: an import of it fails there, and what is sent by value runs all the same.
ON_A_BARE_NODE = """
import sys
for name in ("embedder", "shards", "index", "torch"):
    sys.modules[name] = None
from ray import cloudpickle
print(cloudpickle.loads(sys.stdin.buffer.read())("/tmp"))
"""


def facts(**changed):
    libraries = {"torch": "2.15.0", "numpy": "2.4.0"}
    space = {"disk_free": GIB, "disk_total": 2 * GIB, "shared_free": GIB, "shared_total": GIB, "object_store": GIB // 2}
    return {"python": "3.11", "code": "aa", "libraries": libraries, **space, **changed}


@pytest.fixture
def store(tmp_path):
    return StoreFiles(tmp_path / "store")


def access(store, tmp_path, **changed):
    image = tmp_path / "image.png"
    image.write_bytes(samples.image_bytes(0))
    return Access(store, FOLDER, changed.get("model", "embedder/demo_model"), (str(image),))


def test_another_python_and_other_libraries_are_told_with_what_to_install():
    here = facts(libraries={"torch": "2.15.0", "numpy": "2.4.0", "av": None})
    other = facts(python="3.12", libraries={"torch": "2.14.0", "numpy": None, "av": "18.1"})
    found = code_problems("n1", other, wanted_versions(here, [other]))
    assert [(each.what, each.found) for each in found] == [
        ("Python", "3.12"),
        ("torch", "2.14.0"),
        ("numpy", "missing"),
    ], "av isn't here, so any version of it will do"
    assert found[1].cure.startswith("pip install torch==2.15.0 there")
    assert code_problems("n1", facts(code=None), wanted_versions(facts(), [])) == [], "the package itself can be sent"


def test_libraries_that_the_head_lacks_must_be_the_same_on_all_nodes():
    """A head without CPUs for others starts runs without torch."""
    here, old, new, none = (facts(libraries={"torch": torch}) for torch in (None, "2.14.0", "2.15.0", None))
    wanted = wanted_versions(here, [old, new, none])
    assert [len(code_problems("n", node, wanted)) for node in (old, new, none)] == [0, 1, 1]


def test_a_disk_that_ray_does_not_spill_to_and_full_shared_memory_are_told():
    assert space_problems("n1", facts()) == []
    (disk,) = space_problems("n1", facts(disk_free=GIB // 20))
    assert disk.what == "disk for spilling" and disk.found == "51 of 2,048 MiB free"
    (shared,) = space_problems("n1", facts(shared_free=70 << 20))
    assert shared.what == "shared memory" and "--shm-size" in shared.cure
    assert space_problems("n1", facts(shared_free=0, shared_total=64 << 20)) == [], "Ray's store lies on a disk then"


def test_a_full_disk_with_room_for_the_object_store_is_a_warning():
    large = facts(disk_free=4 * GIB, disk_total=100 * GIB, object_store=3 * GIB)
    assert space_problems("n1", large) == []
    warning = spill_warning("n1", large)
    assert warning.startswith("node n1, disk for spilling: 4,096 of 102,400 MiB free; ") and "95% full" in warning
    assert "--temp-dir" in warning and len(warning.splitlines()) == 1
    for changed in ({"object_store": 5 * GIB}, {"disk_free": 2 * GIB - 1, "object_store": GIB}):
        small = {**large, **changed}
        assert [each.what for each in space_problems("n1", small)] == ["disk for spilling"]
        assert spill_warning("n1", small) is None, "it is refused"
    assert spill_warning("n1", facts()) is None and spill_warning("n1", facts(disk_free=GIB // 20)) is None


@pytest.mark.medium
def test_what_a_node_is_asked_first_needs_nothing_of_this_package_there():
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(node_probe)
    try:
        sent = cloudpickle.dumps(node_probe.node_facts)
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    done = subprocess.run([sys.executable, "-c", ON_A_BARE_NODE], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"'code': None" in done.stdout
    assert node_probe.node_facts("/tmp")["code"] is not None


def test_the_packages_digest_follows_their_code_alone(tmp_path, monkeypatch):
    for package in node_probe.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.setattr(node_probe, "package_folder", lambda package: tmp_path / package)
    before = node_probe.code_digest()
    (tmp_path / "embedder" / "data.bin").write_bytes(b"x")
    assert node_probe.code_digest() == before
    (tmp_path / "embedder" / "new.py").write_text("")
    assert node_probe.code_digest() != before


def test_a_node_with_another_disk_writes_nothing_to_it(store, tmp_path, monkeypatch):
    monkeypatch.setattr("embedder.placement.preflight.VISIBLE_S", 0)
    store.write(f"{FOLDER}/driver", b"")
    assert visit(access(store, tmp_path), f"{FOLDER}/driver", f"{FOLDER}/n1", model_files("embedder/demo_model")) == []
    assert read_token(store, f"{FOLDER}/n1") == []

    elsewhere = StoreFiles(tmp_path / "elsewhere")
    ((what, found, cure),) = visit(
        access(elsewhere, tmp_path), f"{FOLDER}/driver", f"{FOLDER}/n1", model_files("embedder/demo_model")
    )
    assert what == "store" and "nodes don't share it" in found and "a bucket" in cure
    assert not (tmp_path / "elsewhere").exists()


def test_a_node_tells_a_source_and_a_model_that_it_lacks(store, tmp_path):
    store.write(f"{FOLDER}/driver", b"")
    copy = shutil.copytree("embedder/demo_model", tmp_path / "model")
    asked = access(store, tmp_path, model=str(copy))
    model = model_files(str(copy))
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    (tmp_path / "image.png").unlink()
    found = visit(asked, f"{FOLDER}/driver", f"{FOLDER}/n1", model)
    assert [what for what, _, _ in found] == ["source", "model"]
    assert "No such file" in found[0][1] and "config.json" in found[1][1]
    shutil.rmtree(copy)
    assert "there is no such folder" in visit(asked, f"{FOLDER}/driver", f"{FOLDER}/n1", model)[1][1]


def test_the_refusal_is_one_line_and_the_table_has_a_line_for_each_problem(said):
    problems = code_problems(
        "n1", facts(libraries={"torch": None, "numpy": None}), {"torch": "2.15.0", "numpy": "2.4.0"}
    )
    error = refusal("10.0.0.1:6379", problems, num_nodes=3)
    assert str(error).startswith("cluster 10.0.0.1:6379: 1 of 3 nodes can't take part in this run")
    assert "\n" not in str(error) and "torch: missing" in str(error)
    assert len(said) == 3 and said[0].split() == ["node", "what", "found", "cure"]
    assert len({line.index("missing") for line in said[1:]} | {said[0].index("found")}) == 1, "in columns"


def test_nodes_are_asked_by_tasks_and_nothing_is_left_in_the_store(ray_cluster, store, tmp_path):
    from embedder.executors.ray_session import ray_nodes

    nodes = ray_nodes()
    asked = access(store, tmp_path)

    check_cluster("here", nodes, asked, ship=True, attach_again=lambda: None)
    assert list(store.list("")) == [] and not (tmp_path / "store" / FOLDER).exists()

    gone = replace(nodes[0], node_id="ab" * 28)
    assert access_problems(asked, [*nodes, gone]) == [], "a node that has left meanwhile is no problem"
    (tmp_path / "image.png").unlink()
    assert access_problems(asked, nodes) == [], "an item that has gone since it was listed is a reject"
    assert list(store.list("")) == []
