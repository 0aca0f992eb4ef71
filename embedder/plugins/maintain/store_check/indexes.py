"""Checks indexes, word indexes and query towers of a publication: complete, of the published rows, of their model."""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial

from embedder.plugins.maintain.store_check.findings import Finding, Unreadable, attempt, format_names
from embedder.plugins.maintain.store_check.parts import Counts
from embedder.plugins.maintain.store_check.scope import CheckedModel
from embedder.quantities import agree, plural
from embedder.store.files import StoreFiles
from embedder.store.publish.history import latest_publications, same_rows
from embedder.store.publish.query_towers import MANIFEST_FILE, TowersManifest, towers_path
from embedder.store.tables.row_folders import rows_path
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import WORDS_FOLDER, has_keywords, searched_column, words_path
from embedder.store_index.index_versions import INDEX_FOLDER, fetched_manifest
from embedder.store_index.word_index import WordsManifest
from index.manifest import MANIFEST_NAME, QUERIES_NAME, Manifest
from shards.file_schema import parse_json

PIECE_BYTES = 8 << 20
_VERSION = re.compile(rf"(?P<folder>{INDEX_FOLDER}|{WORDS_FOLDER})/(?P<number>\d{{6,}})/(?P<name>.+)")


def check_index(model: CheckedModel, num_valid: Counts, *, deep: bool) -> list[Finding]:
    """Check the published index of a model.

    `num_valid` has the number of rows with a value by column; if empty, rows are not counted. `deep` reads all files
    and compares their hashes.
    """
    number = model.current.index
    if number is None:
        return []
    folder = f"{INDEX_FOLDER}/{number:06d}"
    cure = f"`embedder index build {model.files.option}` makes another"
    manifest = attempt(lambda: fetched_manifest(model.files, number))
    if isinstance(manifest, Unreadable):
        rule = "the published index has its manifest"
        return [Finding("error", model.place(f"{folder}/{MANIFEST_NAME}"), manifest.reason, rule, cure)]
    findings = check_hashes(model, folder, manifest.sha256, cure, deep=deep)
    sizes = model.sizes_below(folder)
    total = sum(sizes.get(name, 0) for name in manifest.sha256)
    # A manifest of the first format has the size of one file.
    if not findings and QUERIES_NAME in manifest.sha256 and total != manifest.size_bytes:
        found = f"its files have {total:,} bytes, and its manifest names {manifest.size_bytes:,}"
        findings.append(Finding("error", model.place(folder), found, "no file of an index changes", cure))
    return findings + _fitting(model, folder, manifest, num_valid, cure)


def _fitting(model: CheckedModel, folder: str, manifest: Manifest, num_valid: Counts, cure: str) -> list[Finding]:
    findings, place = [], model.place(folder)
    if model.info is not None and manifest.model_fingerprint != model.info.model_fingerprint:
        found = f"it is of the model {manifest.model_fingerprint}"
        rule = f"the published vectors are of {model.info.model_fingerprint}, and search refuses others"
        findings.append(Finding("error", place, found, rule, cure))
    searched = model.info.searched if model.info is not None else "image"
    num_rows = num_valid.get(f"{searched}_embedding")
    if num_rows is not None and num_rows != manifest.num_vectors:
        built = f"built of embeddings version {manifest.embeddings_version}"
        found = f"it finds {plural(manifest.num_vectors, 'vector')}, {built}"
        rule = f"version {model.current.embeddings} is published, with {num_rows:,}"
        update = f"`embedder index update {model.files.option}` brings it up to the rows"
        findings.append(Finding("error", place, found, rule, update))
    versions = attempt(lambda: same_rows(latest_publications(model.files)))
    if isinstance(versions, Unreadable) or manifest.embeddings_version in versions | {model.current.embeddings}:
        return findings
    if not findings and manifest.embeddings_version > model.current.embeddings:
        found = f"it is built of embeddings version {manifest.embeddings_version}"
        rule = f"version {model.current.embeddings} is published"
        findings.append(Finding("warning", place, found, rule, cure))
    return findings


def check_words(model: CheckedModel, num_valid: Counts, *, deep: bool) -> list[Finding]:
    """Check the word index of the published embeddings, if there is one; arguments are as for `check_index`."""
    version = model.current.embeddings
    path = words_path(max(version, 0), MANIFEST_NAME)
    if path not in model.listing:
        return []  # searches then build their own
    folder = words_path(version)
    cure = f"`embedder index build {model.files.option}` makes it again"
    manifest = attempt(lambda: WordsManifest.model_validate_json(model.files.read(path)))
    if isinstance(manifest, Unreadable):
        rule = "a word index has its manifest, in a format that this release reads"
        return [Finding("error", model.place(path), manifest.reason, rule, cure)]
    findings = check_hashes(model, folder, manifest.sha256, cure, sizes=manifest.sizes, deep=deep)
    if manifest.embeddings_version != version:
        found = f"it is of embeddings version {manifest.embeddings_version}"
        findings.append(Finding("error", model.place(folder), found, "its folder is named by its version", cure))
    num_captions = num_valid.get(searched_column(model.files))
    if num_captions is not None and not _may_have(model, num_captions, manifest.num_captions):
        found = f"it has {plural(manifest.num_captions, 'text' if model.name else 'caption')}"
        rule = f"the published embeddings have {num_captions:,}"
        findings.append(Finding("error", model.place(folder), found, rule, cure))
    return findings


def _may_have(model: CheckedModel, num_captions: int, num_found: int) -> bool:
    """Return whether a word index may have so many texts: those of captions, and of rows with only keywords."""
    if num_found <= num_captions or model.name:
        return num_found == num_captions
    schema = attempt(lambda: RecordTable(model.files, "embeddings", model.current.embeddings).schema)
    return not isinstance(schema, Unreadable) and has_keywords(schema)


def check_row_files(model: CheckedModel, *, deep: bool) -> list[Finding]:
    """Check the row files of the published index, if there are any; without them searches read the tables."""
    own = rows_path(model.current)
    folders = {
        path.rsplit("/", 1)[0] for path in model.listing if path.startswith(own) and path.endswith(MANIFEST_NAME)
    }
    findings: list[Finding] = []
    for folder in sorted(folders):
        cure = f"delete its folder, and `embedder index update {model.files.option}` makes it again"
        hashes = attempt(partial(_row_hashes, model.files, folder))
        if isinstance(hashes, Unreadable):
            rule = "row files have a manifest with their hashes"
            findings.append(Finding("error", model.place(f"{folder}/{MANIFEST_NAME}"), hashes.reason, rule, cure))
        else:
            findings += check_hashes(model, folder, hashes, cure, deep=deep)
    return findings


def _row_hashes(files: StoreFiles, folder: str) -> dict[str, str]:
    return {
        str(name): str(each) for name, each in parse_json(files.read(f"{folder}/{MANIFEST_NAME}"))["sha256"].items()
    }


def check_towers(model: CheckedModel, *, deep: bool) -> list[Finding]:
    """Check the query towers for the published vectors, if there are any."""
    if model.info is None:
        return []
    folder = towers_path(model.info)
    sizes = model.sizes_below(folder)
    if not sizes:
        return []
    cure = f"`embedder export-query-towers --force {model.files.option}` writes them again"
    manifest = attempt(lambda: TowersManifest.model_validate_json(model.files.read(f"{folder}/{MANIFEST_FILE}")))
    if isinstance(manifest, Unreadable):
        rule = "query towers have a manifest, without which a search needs torch and the model folder"
        return [Finding("warning", model.place(f"{folder}/{MANIFEST_FILE}"), manifest.reason, rule, cure)]
    hashes = {name: each.sha256 for name, each in manifest.files.items()}
    expected = {name: each.size_bytes for name, each in manifest.files.items()}
    return check_hashes(model, folder, hashes, cure, sizes=expected, deep=deep)


def check_hashes(
    model: CheckedModel,
    folder: str,
    hashes: Mapping[str, str],
    cure: str,
    *,
    sizes: Mapping[str, int] | None = None,
    deep: bool,
) -> list[Finding]:
    """Check that the files of a folder with a manifest exist unaltered.

    `folder` is relative to the model's view; `hashes` are SHA-256 in hex; `sizes` are in bytes, if the manifest has
    them; `cure` is the remedy for damage. `deep` reads all files and compares their hashes.
    """
    there, expected = model.sizes_below(folder), sizes or {}
    missing = [name for name in hashes if name not in there and not model.files.exists(f"{folder}/{name}")]
    cut = [name for name in hashes if name in there and expected.get(name, there[name]) != there[name]]
    whole = [name for name in hashes if name in there and name not in cut] if deep else []
    found = [(name, attempt(partial(hash_of, model.files, f"{folder}/{name}", there[name]))) for name in whole]
    altered = [name for name, digest in found if digest != hashes[name]]
    return [
        _of_files(model, folder, names, what, cure)
        for names, what in (
            (missing, "missing"),
            (cut, "not of the size that its manifest names"),
            (altered, "altered, by the sha256 of its manifest"),
        )
        if names
    ]


def _of_files(model: CheckedModel, folder: str, names: list[str], what: str, cure: str) -> Finding:
    found = f"{plural(len(names), 'file')} {agree(len(names), 'is', 'are')} {what}: {format_names(names)}"
    return Finding("error", model.place(folder), found, "the files that a manifest names stay as they are", cure)


def hash_of(files: StoreFiles, path: str, size_bytes: int) -> str:
    """Return a file's SHA-256 in hex, reading piece by piece; an empty file can't be mapped, hence `size_bytes`."""
    digest = hashlib.sha256()
    if size_bytes:
        with files.open(path) as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def unfinished_indexes(model: CheckedModel, *, is_writing: bool) -> list[Finding]:
    """Return findings on index folders without a readable manifest, which may be those of a writer at work."""
    held: dict[str, dict[str, int]] = {}
    for path, size in model.listing.items():
        if (found := _VERSION.fullmatch(path)) is not None:
            held.setdefault(f"{found['folder']}/{found['number']}", {})[found["name"]] = size
    published = {f"{INDEX_FOLDER}/{model.current.index:06d}" if model.current.index is not None else ""}
    findings = []
    cure = "wait for the writer at work" if is_writing else f"`embedder vacuum {model.files.main.option}` deletes it"
    for folder, sizes in sorted(held.items()):
        if folder in published:
            continue
        place = model.place(folder)
        if MANIFEST_NAME not in sizes:
            what = "only a claim of its number" if set(sizes) == {"claim"} else "an index without a manifest"
            found_text = f"{what}, {plural(len(sizes), 'file')} of {plural(sum(sizes.values()), 'byte')}"
            rule = "a manifest is written last, and makes an index of a folder"
            findings.append(Finding("note", place, found_text, rule, cure))
        elif folder.startswith(f"{INDEX_FOLDER}/"):
            read: Callable[[], Manifest] = partial(fetched_manifest, model.files, int(folder.rpartition("/")[2]))
            manifest = attempt(read)
            if isinstance(manifest, Unreadable):
                rule = "`embedder index status` and `embedder vacuum` read the manifests of all indexes"
                delete = "delete the folder: what is published does not need it"
                where = f"{place}/{MANIFEST_NAME}"
                findings.append(Finding("warning", where, manifest.reason, rule, delete))
    return findings
