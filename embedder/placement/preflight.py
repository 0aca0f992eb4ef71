"""Checks of every node of a cluster before a run, all at once: code, libraries, disk, memory, store, sources, model.

Each node is asked by a task that reserves nothing, so that full nodes answer too. The store is checked by tokens: each
node must see this machine's, writes its own, and reads that of another node. All tokens lie in the run's folder and are
deleted at the end. On a single machine nothing is checked.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from embedder.errors import USER_MISTAKES, ConfigError
from embedder.placement import node_probe
from embedder.placement.node_probe import PACKAGES, NodeFacts
from embedder.placement.placement import Node
from embedder.quantities import plural
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.source_errors import FetchError
from embedder.sources.uris import split_uri
from embedder.storage.model_download import resolve_checkpoint
from embedder.storage.web_address import is_web
from embedder.store.files import StoreFiles
from embedder.store.store_errors import StoreUnavailableError

LOG = logging.getLogger(__name__)

ANSWER_S = 60.0  # for a node, which first starts a process and fetches this package, and may be busy with other jobs
VISIBLE_S = 3.0  # in which a node must see another's file; network file systems cache listings
FULL = 0.95  # of a disk: Ray spills nothing beyond it (`local_fs_capacity_threshold`)
MIB = 1 << 20
LEAST_FREE = 2048 * MIB  # on a disk above that share: Ray's logs need space, too
SPILL_CURE = f"free space: Ray spills nothing to a disk that is {FULL:.0%} full; or start it with another --temp-dir"
LEAST_SHARED = 75 * MIB  # Ray's smallest object store

Answer = TypeVar("Answer")


class Problem(NamedTuple):
    """Something that is wrong on a node: the row of a table."""

    node: str
    what: str
    found: str
    cure: str


@dataclass(frozen=True)
class Access:
    """Places that a run's nodes must reach.

    The tokens lie in `folder` of the store; `model` is a folder or URI; `uris` has an item of each source.
    """

    files: StoreFiles
    folder: str
    model: str
    uris: tuple[str, ...] = ()


def check_cluster(
    address: str, nodes: Sequence[Node], access: Access | None, *, ship: bool, attach_again: Callable[[], None]
) -> None:
    """Check all nodes that may work; if one needs this package, reattach this process so that it is sent to them.

    `access` is what a run reads and writes; None checks only code and libraries. `ship` allows sending the package.
    Raises `ConfigError` if a node can't take part; a table of all problems has been logged.
    """
    here = node_probe.node_facts("/")
    facts, problems = _ask_facts(nodes)
    able, wanted = [], wanted_versions(here, facts.values())
    for node, of_node in facts.items():
        found = code_problems(node.name, of_node, wanted)
        problems += found + space_problems(node.name, of_node)
        if warning := spill_warning(node.name, of_node):
            LOG.warning(warning)
        able += [] if found else [node]
    other_code = [node for node in able if facts[node]["code"] != here["code"]]
    if other_code and ship:
        names = ", ".join(node.name for node in other_code)
        LOG.info(f"this package is sent to nodes that lack it or have other code: {names}")
        attach_again()
        facts |= _ask_facts(other_code)[0]
        other_code = [node for node in other_code if facts[node]["code"] != here["code"]]
    if other_code:  # Ray puts the command's working folder before what is sent
        cure = "bring it up to date there, also in the folder that this command runs in; or cluster.ship_package = true"
        problems += [Problem(node.name, "package", _code_of(facts[node]), cure) for node in other_code]
        able = [node for node in able if node not in other_code]
    if access is not None:
        problems += access_problems(access, able)
    if problems:
        raise refusal(address, problems, len(nodes))


def code_problems(name: str, facts: NodeFacts, wanted: Mapping[str, str | None]) -> list[Problem]:
    """Compare Python and the libraries of a node, which can't be sent, with those of `wanted_versions`. Pure."""
    found = {"Python": facts["python"], **facts["libraries"]}
    return [
        Problem(name, each, found[each] or "missing", _install(each, version))
        for each, version in wanted.items()
        if found[each] is None or found[each] != version
    ]


def wanted_versions(here: NodeFacts, nodes: Iterable[NodeFacts]) -> dict[str, str | None]:
    """Return the versions of this machine; for what it lacks, as a head may lack torch, those of the first node."""
    libraries = [each["libraries"] for each in (here, *nodes)]
    wanted = {name: next((each[name] for each in libraries if each[name]), None) for name in here["libraries"]}
    return {"Python": here["python"], **wanted}


def space_problems(name: str, facts: NodeFacts) -> list[Problem]:
    """Judge the disk for spilling and the shared memory of a node. Pure."""
    problems = []
    if _is_full(facts) and not _has_room(facts):
        problems.append(Problem(name, "disk for spilling", _disk_space(facts), SPILL_CURE))
    # If shared memory is smaller than the object store, Ray has put the latter on a disk.
    is_used = facts["shared_total"] >= facts["object_store"]
    if is_used and facts["shared_free"] < min(LEAST_SHARED, facts["object_store"]):
        found = f"{facts['shared_free'] // MIB:,} of {facts['shared_total'] // MIB:,} MiB free"
        cure = f"delete what others left in {node_probe.SHARED_MEMORY}, or enlarge it (Docker: --shm-size)"
        problems.append(Problem(name, "shared memory", found, cure))
    return problems


def spill_warning(name: str, facts: NodeFacts) -> str | None:
    """Describe the risk on a node whose disk is full by its share but has much space left; else None. Pure."""
    if not (_is_full(facts) and _has_room(facts)):
        return None
    found = f"node {name}, disk for spilling: {_disk_space(facts)}; a run that has to spill there ends"
    return f"{found}; {SPILL_CURE}"


def _is_full(facts: NodeFacts) -> bool:
    return facts["disk_free"] < (1 - FULL) * facts["disk_total"]


def _has_room(facts: NodeFacts) -> bool:
    """Whether all of the object store would fit on the disk, so that only Ray's threshold prevents spilling."""
    return facts["disk_free"] >= max(facts["object_store"], LEAST_FREE)


def _disk_space(facts: NodeFacts) -> str:
    return f"{facts['disk_free'] // MIB:,} of {facts['disk_total'] // MIB:,} MiB free"


def access_problems(access: Access, nodes: Sequence[Node]) -> list[Problem]:
    """Let nodes that have this package reach the store, the sources and the model; return what they can't reach."""
    tokens = {node: f"{access.folder}/{node.node_id}" for node in nodes}
    mine = f"{access.folder}/driver"
    access = replace(access, uris=tuple(uri for uri in access.uris if not _unreadable(uri)))  # others are rejected
    access.files.write(mine, b"driver")
    try:
        model = model_files(access.model)
        visits = {node: (access, mine, token, model) for node, token in tokens.items()}
        visited, problems = _ask(visit, visits)
        problems += [Problem(node.name, *each) for node, found in visited.items() for each in found]
        writers = [node for node, found in visited.items() if not any(what == "store" for what, _, _ in found)]
        if len(writers) > 1:
            pairs = zip(writers, [*writers[1:], writers[0]], strict=True)
            read, late = _ask(read_token, {reader: (access.files, tokens[writer]) for reader, writer in pairs})
            problems += late + [Problem(node.name, *each) for node, found in read.items() for each in found]
    finally:
        _delete(access)
    return problems


def visit(access: Access, token_here: str, token: str, model: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """As a task on a node, reach everything and write a token; returns what is wrong, how, and the cure.

    A node that doesn't see `token_here`, the driver's token, has another store, and writes nothing there. `token` is
    the path of its token. `model` has names and sizes of the model's files on the driver's machine.
    """
    problems = read_token(access.files, token_here)
    if not problems:
        try:
            access.files.write(token, b"node")
        except (*USER_MISTAKES, StoreUnavailableError) as error:
            problems.append(("store", str(error), "let this node write there"))
    cure = "let every node reach the source under one address"
    problems += [("source", found, cure) for uri in access.uris if (found := _unreadable(uri))][:1]
    try:
        if differing := model_files(access.model).items() ^ model.items():
            names = ", ".join(sorted({name for name, _ in differing}))
            problems.append(("model", f"{access.model}: other {names}", "copy the same model folder to every node"))
    except USER_MISTAKES as error:
        problems.append(("model", str(error), "put it on a folder that all nodes share, in a bucket or on the hub"))
    return problems


def _unreadable(uri: str) -> str | None:
    """Open the file of an item, and return why that fails; the web is not accessed."""
    path, _ = split_uri(uri)
    if is_web(path):
        return None
    try:
        open_ranges(path).close()
    except FetchError as error:
        return error.message
    return None


def read_token(files: StoreFiles, token: str) -> list[tuple[str, str, str]]:
    """As a task on a node, look for a token that another node wrote; returns the problem if it isn't seen in time."""
    deadline_s = time.monotonic() + VISIBLE_S
    try:
        while not files.exists(token):
            if time.monotonic() > deadline_s:
                found = f"{files.address} lacks what another node wrote there: nodes don't share it"
                return [("store", found, "give a bucket, or a folder that all nodes mount under the same path")]
            time.sleep(0.2)
    except (*USER_MISTAKES, StoreUnavailableError) as error:
        return [("store", str(error), "let this node read there")]
    return []


def model_files(uri: str) -> dict[str, int]:
    """Return names and sizes of the files of a local model folder; for a remote one, only of its configuration.

    Raises `ModelError` if there is no such model.
    """
    patterns = ("*.json", "*.safetensors") if Path(uri).exists() else ("*.json",)
    folder = resolve_checkpoint(uri, config_only=True)
    return {path.name: path.stat().st_size for pattern in patterns for path in folder.glob(pattern)}


def refusal(address: str, problems: Sequence[Problem], num_nodes: int) -> ConfigError:
    """Log the table of problems, and return the error in one line."""
    rows = [Problem("node", "what", "found", "cure"), *problems]
    *widths, _ = (max(len(cell) for cell in column) for column in zip(*rows, strict=True))
    for row in rows:
        LOG.info("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row.cure]))
    first, num_bad = problems[0], len({problem.node for problem in problems})
    return ConfigError(
        f"cluster {address}: {num_bad} of {plural(num_nodes, 'node')} can't take part in this run, and nothing was "
        f"begun; first: node {first.node}, {first.what}: {first.found}; {first.cure}"
    )


def shipped_modules() -> list[str]:
    """Return the folders of this project's packages, as `runtime_env` takes them."""
    return [str(node_probe.package_folder(package)) for package in PACKAGES]


def _install(name: str, version: str | None) -> str:
    if name == "Python":
        return f"install Python {version} there, as here"
    wanted = f"{name}=={version}" if version else name
    return f"pip install {wanted} there, or start that node with --num-cpus=0 and without GPUs"


def _code_of(facts: NodeFacts) -> str:
    return "missing" if facts["code"] is None else f"other code ({facts['code']})"


def _ask_facts(nodes: Sequence[Node]) -> tuple[dict[Node, NodeFacts], list[Problem]]:
    import ray
    from ray import cloudpickle

    entries = {entry["NodeID"]: entry for entry in ray.nodes() if entry["Alive"]}
    arguments = {node: _spilling(entries[node.node_id]) for node in nodes if node.node_id in entries}
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        return _ask(node_probe.node_facts, arguments)
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)


def _spilling(entry: Mapping[str, Any]) -> tuple[str, int]:
    """Return the folder of a node's session, where it spills, and the bytes of its object store."""
    return str(Path(entry["ObjectStoreSocketName"]).parents[1]), int(entry["Resources"].get("object_store_memory", 0))


def _ask(
    function: Callable[..., Answer], arguments: Mapping[Node, Iterable[Any]]
) -> tuple[dict[Node, Answer], list[Problem]]:
    """Call a function on nodes, all at once; return the answers, and a problem for each node that gave none.

    A node that has left meanwhile gives neither.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(function)
    on = partial(NodeAffinitySchedulingStrategy, soft=False)
    asked = {
        task.options(scheduling_strategy=on(node.node_id)).remote(*values): node for node, values in arguments.items()
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    answers, silent = {}, {asked[each]: f"no answer within {ANSWER_S:g} s" for each in late}
    for each in late:
        ray.cancel(each, force=True)
    for each in done:
        try:
            answers[asked[each]] = ray.get(each)
        except RayError as error:
            silent[asked[each]] = str(getattr(error, "cause", None) or error).strip().partition("\n")[0][:300]
    alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]} if silent else set()
    cure = "look at the node's log of Ray, or take it out of the cluster"
    problems = [Problem(node.name, "node", text, cure) for node, text in silent.items() if node.node_id in alive]
    return answers, problems


def _delete(access: Access) -> None:
    with suppress(*USER_MISTAKES, StoreUnavailableError, OSError):
        for info in list(access.files.list(access.folder)):
            access.files.delete(info.path)
        if access.files.folder is not None:
            (access.files.folder / access.folder).rmdir()
