"""A program: runs on its own Ray with logical GPUs or nodes, which notes what each step is handed, and where.

python logical_gpu_run.py REQUEST.json    prints one line of JSON
"""

import json
import os
import sys
import time
from pathlib import Path
from uuid import uuid4

import ray
from command_runs import run_here
from ray.cluster_utils import Cluster

import embedder
from embedder import pipeline
from embedder.executors.ray_session import start_ray
from embedder.steps.decode import decode_at_low_priority
from embedder.steps.stage_actor import StageActor

FOLDER = "EMBEDDER_TEST_NOTES"


def note(**values):
    """Write a file; processes of all kinds do."""
    path = Path(os.environ[FOLDER], f"{uuid4().hex}.json")
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").rename(path)


def notes():
    """The notes so far."""
    return [json.loads(path.read_text()) for path in Path(os.environ[FOLDER]).glob("*.json")]


def rows_of(table):
    """What distinguishes rows."""
    if "item_id" not in table.schema.names:
        return None
    return [f"{row['item_id']}:{row['segment']}" for row in table.select(["item_id", "segment"]).to_pylist()]


def noted_decode(listing, **arguments):
    """Decoding, with a note of each table that it makes."""
    for table in decode_at_low_priority(listing, **arguments):
        note(step="decode", rows=rows_of(table))
        yield table


class NotedStage(StageActor):
    """A stage, with a note of its place and of each table that it is handed; it begins when all its replicas are up.

    Few pictures would be done before a slow machine has started them.
    """

    num_replicas = 0  # of each stage, in this run and those before it
    run = 0  # its number

    def __init__(self, spec, run=None):
        super().__init__(spec, run)
        self._index = spec.index
        node = ray.get_runtime_context().get_node_id()
        place = {"gpus": ray.get_gpu_ids(), "pid": os.getpid(), "node": node, "threads": self._spec.num_threads}
        note(run=self.run, step=spec.index, **place)

    def __call__(self, table):
        stop_s = time.monotonic() + 120
        while sum(each.get("step") == self._index and "gpus" in each for each in notes()) < self.num_replicas:
            assert time.monotonic() < stop_s, f"stage {self._index} has fewer than {self.num_replicas} replicas"
            time.sleep(0.1)
        note(step=self._index, rows=rows_of(table))
        return super().__call__(table)


def ended(arguments):
    """Run the command."""
    return run_here(*arguments)._asdict()


def predicted(options):
    """Embed the pictures and captions of a Ray dataset."""
    rows = [
        {"number": number, "image": Path(path).read_bytes(), "caption": caption}
        for number, (path, caption) in enumerate(options["rows"])
    ]
    dataset = ray.data.from_items(rows, override_num_blocks=4)
    predictor = embedder.BatchPredictor.from_model(options["model"], **options["options"])
    found = sorted(predictor.predict(dataset).take_all(), key=lambda row: row["number"])
    names = ("image_embedding", "text_embedding")
    return {name: [[float(value) for value in row[name]] for row in found] for name in names}


def start_nodes(nodes):
    """Start a cluster of nodes on loopback, and attach to it."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    first, *others = (node | {"object_store_memory": 200 << 20} for node in nodes)
    cluster = Cluster(initialize_head=True, head_node_args=first | {"include_dashboard": False})
    for node in others:
        cluster.add_node(**node)
    start_ray(cluster.address)
    return cluster


def main():
    """Do what the request says, one after the other, on one Ray."""
    request = json.loads(Path(sys.argv[1]).read_text())
    os.environ[FOLDER] = request["notes"]
    pipeline.decode_at_low_priority, pipeline.StageActor = noted_decode, NotedStage
    cluster = None
    if nodes := request["nodes"]:
        cluster = start_nodes(nodes)
    else:
        start_ray(num_cpus=4, num_gpus=request["num_gpus"])
    for node in ray.nodes():
        note(node=node["NodeID"], type=node["Labels"].get("type"))
    does = {"command": ended, "predict": predicted}
    results = []
    for NotedStage.run, (kind, options, num_replicas) in enumerate(request["runs"]):
        NotedStage.num_replicas += num_replicas
        results.append(does[kind](options))
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()  # else Ray's note of its address stays, for any program that starts Ray here
    print(json.dumps(results))


if __name__ == "__main__":
    main()
