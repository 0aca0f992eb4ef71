"""A program: runs on a Ray of its own with logical GPUs or nodes, which notes what each step is handed, and where.

python logical_gpu_run.py REQUEST.json    prints one line of JSON
"""

import json
import os
import sys
from pathlib import Path
from uuid import uuid4

import ray
from command_runs import run_here
from ray.cluster_utils import Cluster

import embedder
from embedder import pipeline
from embedder.engine.ray_session import start_ray
from embedder.steps.decode import decode_at_low_priority
from embedder.steps.stage_actor import StageActor

FOLDER = "EMBEDDER_TEST_NOTES"


def note(**values):
    """Write a file; processes of all kinds do."""
    Path(os.environ[FOLDER], f"{uuid4().hex}.json").write_text(json.dumps(values))


def rows_of(table):
    """What tells rows apart."""
    if "item_id" not in table.schema.names:
        return None
    return [f"{row['item_id']}:{row['segment']}" for row in table.select(["item_id", "segment"]).to_pylist()]


def noted_decode(listing, **arguments):
    """Decoding, with a note of each table that it makes."""
    for table in decode_at_low_priority(listing, **arguments):
        note(step="decode", rows=rows_of(table))
        yield table


class NotedStage(StageActor):
    """A stage, with a note of its place and of each table that it is handed."""

    def __init__(self, spec, run=None):
        super().__init__(spec, run)
        self._index = spec.index
        node = ray.get_runtime_context().get_node_id()
        note(step=spec.index, gpus=ray.get_gpu_ids(), pid=os.getpid(), node=node, threads=self._spec.num_threads)

    def __call__(self, table):
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
    results = [does[kind](options) for kind, options in request["runs"]]
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()  # else Ray's note of its address stays, for any program that starts Ray here
    print(json.dumps(results))


if __name__ == "__main__":
    main()
