"""Reader of sentence-transformers' folders: the modules around a checkpoint of transformers, and their settings.

Source: sentence-transformers 6.2 (`BaseModel`, `Transformer`, `Pooling`, `Dense`, `Router`), and the keys of versions 1
to 5. A module, or a setting, that alters vectors and has no place in a model folder is refused by its name.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import ValidationError

from shards.file_schema import parse_json, read_json
from shards.model_config import CONFIG_FILE, Projection
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.towers.base import Tower
from shards.towers.registry import ONE_TOWERS
from shards.towers.text_encoder import TextEncoderTower, TokenPooling
from shards.towers.tower_kinds import TextTower

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
LIMIT_FILES = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
"""Settings of the module Transformer; the first that exists counts."""

_POOLINGS: dict[str, TokenPooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# Keys until version 5, in the order in which several are joined.
_OLD_POOLINGS: dict[str, TokenPooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS: dict[str, Projection] = {"Identity": "linear", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}
_ROUTERS = ("Router", "Asym")
# Settings of Transformer that change how it is computed, not what.
_HARMLESS = {"attn_implementation", "dtype", "torch_dtype", "trust_remote_code", "use_safetensors", "unpad_inputs"}
_CAPTION_PROMPTS = ("document", "passage", "corpus", "Document")
_QUERY_PROMPTS = ("query", "SearchQuery")
_CHAT_SETTINGS = {"chat_template": {"add_generation_prompt": True}}
_FEATURES = {
    "forward": "last_hidden_state",
    "get_text_features": "pooler_output",
    "get_image_features": "pooler_output",
}

_NO_CURE = "no model folder can hold it; give a model of Transformer, Pooling, Dense and Normalize, in this order"


@dataclass(frozen=True)
class Dense:
    """A linear layer behind pooling: its folder, the size of its vectors, and what follows it."""

    folder: Path
    size: int
    has_bias: bool
    projection: Projection


@dataclass(frozen=True)
class SentenceModel:
    """What sentence-transformers does around the checkpoint in the folder `checkpoint`.

    Without `pools` (CLIP's kind) the checkpoint's own features are the vectors. `uses` says of each file what was read.
    """

    root: Path
    checkpoint: Path
    pools: tuple[TokenPooling, ...] = ()
    dense: Dense | None = None
    query_prompt: str = ""
    caption_prompt: str = ""
    limit: tuple[str, int] | None = None
    lowers_case: bool = False
    dimensions: int | None = None
    uses: tuple[tuple[str, str], ...] = ()

    def pool(self, tower: Tower) -> Tower:
        """Give a single tower the pooling; raises a ModelError if it has none to choose."""
        if not self.pools:
            return tower
        if not isinstance(tower, TextEncoderTower) or "pool" not in type(tower).model_fields:
            _refuse(self.root, f"Pooling over a {tower.label} tower", "give a model of which only texts are pooled")
        pool = self.pools if len(self.pools) > 1 else self.pools[0]
        try:
            return tower.model_validate(tower.model_dump() | {"pool": pool})
        except ValidationError:
            _refuse(self.root, f"the pooling {pool} over a {tower.label} tower", "give a model with its own pooling")

    def check_unpooled(self, *towers: Tower) -> None:
        """Raise a ModelError unless the vectors of a model of two towers are the checkpoint's own."""
        if self.pools:
            _refuse(self.root, f"Pooling over {' + '.join(each.label for each in towers)}", _NO_CURE)
        if any(isinstance(each, TextTower) and each.has_fixed_length for each in towers):
            cure = f"delete {MODULES_FILE} to import what transformers computes, with the padding of its training"
            _refuse(self.root, "a tower that attends to padding, and pads to the longest caption", cure)

    def prompt(self, preprocess: PreprocessConfig) -> PreprocessConfig:
        """Give a model's preprocessing the prompts."""
        return preprocess.model_copy(update={"query_prompt": self.query_prompt, "caption_prompt": self.caption_prompt})


def find_sentence_model(folder: Path) -> SentenceModel | None:
    """Read the modules around a checkpoint, given the whole folder or the checkpoint's inside it; None without any.

    Raises a ModelError that names a module or setting which can't be imported, and the cure.
    """
    if (folder / MODULES_FILE).is_file():
        return _read_model(folder)
    parent = folder.resolve().parent
    if not (parent / MODULES_FILE).is_file():
        return None
    name, inner = _modules(parent)[0]
    is_around = inner == folder.resolve().name or _kind(name) in _ROUTERS
    return _read_model(parent) if is_around else None


def module_folders(root: Path) -> list[str]:
    """Return the folders of a model's modules below `root`; none without modules.json."""
    return [path for _, path in _modules(root) if path] if (root / MODULES_FILE).is_file() else []


def _modules(root: Path) -> list[tuple[str, str]]:
    """Return type and folder of each module."""
    path = root / MODULES_FILE
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
        modules = [
            (str(each["type"]), str(each["path"]).replace("\\", "/").rstrip("/"), each.get("kwargs")) for each in tree
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: this is no list of modules ({error}); fetch it again") from None
    for name, folder, arguments in modules:
        if not re.fullmatch(r"([\w-][\w.-]*(/[\w-][\w.-]*)*)?", folder):
            raise ModelError(f"{path}: the module {name} lies in {folder!r}, not below this folder; fetch it again")
        if arguments:
            _refuse(root, f"the module {name} with kwargs = {arguments}", _NO_CURE)
    if not modules:
        raise ModelError(f"{path}: names no module; fetch it again")
    return [(name, folder) for name, folder, _ in modules]


def _read_model(root: Path) -> SentenceModel:
    try:
        return _read_modules(root)
    except (TypeError, KeyError, AttributeError) as error:  # untrusted JSON of another shape
        raise ModelError(
            f"{root}: a setting of its modules isn't as the library writes it ({error}); fetch it"
        ) from None


def _read_modules(root: Path) -> SentenceModel:
    (first, inner), *others = _modules(root)
    if _kind(first) not in ("Transformer", "CLIPModel"):
        _refuse(root, f"the module {first}", _cure(first, 0))
    kinds = " + ".join(_kind(name) for name in (first, *(name for name, _ in others)))
    if inner and (root / inner).resolve().parent != root.resolve():  # it is found again from there
        _refuse(root, f"its checkpoint in {inner}", f"copy that folder to {root / Path(inner).name}, and name it there")
    found = _read_settings(SentenceModel(root, root / inner, uses=((MODULES_FILE, kinds),)))
    found, method = _read_transformer(found, inner, is_clip=_kind(first) == "CLIPModel")
    done = ["Transformer"]
    for number, (name, path) in enumerate(others, 1):
        kind = _kind(name)
        if kind == "Pooling" and done == ["Transformer"] and method == "forward":
            found = _read_pooling(found, path)
        elif kind == "Dense" and done == ["Transformer", "Pooling"]:
            found = _read_dense(found, path)
        elif kind == "Normalize" and (found.pools or method != "forward"):
            _check_names(root, path)
        elif kind != "Dropout":
            _refuse(root, f"the module {name} after {', '.join(done)}", _cure(name, number))
        done.append(kind)
    if method == "forward" and not found.pools:
        _refuse(root, "a Transformer without Pooling", "add the Pooling that it was trained with, and save it again")
    return found


def _kind(name: str) -> str:
    """Return the name of one of the library's classes; code of others keeps its whole name."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _cure(name: str, number: int) -> str:
    if _kind(name) not in _ROUTERS:
        return _NO_CURE
    return (
        "a model folder holds one route; save one, such as 'document', with SentenceTransformer(modules="
        f"[*list(model)[:{number}], *model[{number}].sub_modules['document']]).save(DIR), and give DIR"
    )


def _refuse(root: Path, what: str, cure: str) -> NoReturn:
    raise ModelError(f"{root / MODULES_FILE}: sentence-transformers' model has {what}, which can't be imported; {cure}")


def _config(root: Path, path: str) -> dict[str, Any]:
    return read_json(root / path / CONFIG_FILE, f"{MODULES_FILE} names this module; fetch its folder, too")


def _check_names(root: Path, path: str) -> None:
    """Raise a ModelError if a module reads or writes anything but a text's vector; its file may be missing."""
    tree = _config(root, path) if (root / path / CONFIG_FILE).is_file() else {}
    for key in ("module_input_name", "module_output_name"):
        if tree.get(key) not in (None, "sentence_embedding"):
            _refuse(root, f"{path}/{CONFIG_FILE} with {key} = {tree[key]!r}", "'sentence_embedding' can")


def _read_pooling(found: SentenceModel, path: str) -> SentenceModel:
    tree = _config(found.root, path)
    modes = tree.get("pooling_mode") or [key for key in tree if key.startswith("pooling_mode_") and tree[key]]
    names = [modes] if isinstance(modes, str) else list(modes) or ["mean"]
    known = _POOLINGS | _OLD_POOLINGS
    unknown = [name for name in names if name not in known]
    if unknown:
        _refuse(found.root, f"{path}/{CONFIG_FILE} with the pooling {unknown[0]}", f"these can: {', '.join(_POOLINGS)}")
    if all(name in _OLD_POOLINGS for name in names):
        names = [name for name in _OLD_POOLINGS if name in names]
    if not tree.get("include_prompt", True) and (found.query_prompt or found.caption_prompt):
        _refuse(
            found.root,
            f"{path}/{CONFIG_FILE} with include_prompt = false and prompts in {SETTINGS_FILE}",
            f"without prompts it can: delete them from {SETTINGS_FILE} if you embed without",
        )
    pools = tuple(known[name] for name in names)
    said = f"pooling: {' + '.join(pools)} of the tokens"
    return replace(found, pools=pools, uses=(*found.uses, (f"{path}/{CONFIG_FILE}", said)))


def _read_dense(found: SentenceModel, path: str) -> SentenceModel:
    tree, root = _config(found.root, path), found.root
    _check_names(root, path)
    if tree.get("use_residual"):
        _refuse(root, f"{path}/{CONFIG_FILE} with use_residual = true", _NO_CURE)
    name = str(tree.get("activation_function", "torch.nn.modules.activation.Tanh"))
    # The library takes no code of others, and computes tanh in its place.
    kind = name.rpartition(".")[2] if name.startswith("torch.") else "Tanh"
    if kind not in _ACTIVATIONS:
        _refuse(root, f"{path}/{CONFIG_FILE} with activation_function = {name}", f"{', '.join(_ACTIVATIONS)} can")
    size = tree.get("out_features")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{root / path / CONFIG_FILE}: out_features = {size!r}: expected a size; fetch it again")
    dense = Dense(root / path, size, bool(tree.get("bias", True)), _ACTIVATIONS[kind])
    said = f"Dense: {size} values, {kind}"
    return replace(found, dense=dense, uses=(*found.uses, (f"{path}/{CONFIG_FILE}", said)))


def _read_transformer(found: SentenceModel, inner: str, *, is_clip: bool) -> tuple[SentenceModel, str]:
    """Read limits and letter case, and return also the method that makes the features of texts."""
    default = "get_text_features" if is_clip else "forward"
    name = next((each for each in LIMIT_FILES if (found.checkpoint / each).is_file()), None)
    if name is None:
        return found, default
    path = found.checkpoint / name
    tree: dict[str, Any] = read_json(path, "fetch it again")
    task = tree.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        _refuse(found.root, f"{name} with transformer_task = {task!r}", "'feature-extraction' can")
    features = tree.get("modality_config") or {"text": {"method": default, "method_output_name": _FEATURES[default]}}
    # A tower for both takes chats, whose instruction the prompts are, or more kinds of media than are imported.
    takes_chats = _model_type(found.checkpoint) in ONE_TOWERS
    known = ("text", "image", "video", "audio", "message") if takes_chats else ("text", "image")
    for modality, each in features.items():
        if modality not in known or _FEATURES.get(each["method"]) != each.get("method_output_name"):
            _refuse(found.root, f"{name} with the modality {modality!r} by {each}", "last_hidden_state of texts can")
    for key in ("model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs"):
        if set(tree.get(key) or {}) - _HARMLESS:
            _refuse(
                found.root, f"{name} with {key} = {tree[key]}", "save the model with them applied, and without them"
            )
    if takes_chats and tree.get("processing_kwargs") == _CHAT_SETTINGS:
        del tree["processing_kwargs"]
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion"):
        if tree.get(key):
            _refuse(found.root, f"{name} with {key} = {tree[key]}", f"delete {key} there if you embed without it")
    limit = tree.get("max_seq_length")
    if limit is not None and not (isinstance(limit, int) and limit >= 2):
        _refuse(found.root, f"{name} with max_seq_length = {limit!r}", "a number of tokens, from 2 up, or null can")
    given = (name, limit) if limit is not None else None
    lowers_case = bool(tree.get("do_lower_case"))
    said = ", ".join([f"up to {limit} tokens"] * bool(given) + ["lower case"] * lowers_case) or "features of texts"
    uses = (*found.uses, (f"{inner}/{name}".removeprefix("/"), said))
    return replace(found, limit=given, lowers_case=lowers_case, uses=uses), features.get("text", {}).get("method", "")


def _model_type(folder: Path) -> str:
    path = folder / CONFIG_FILE
    return str(read_json(path, "fetch it again").get("model_type")) if path.is_file() else ""


def _read_settings(found: SentenceModel) -> SentenceModel:
    """Read the prompts of queries and captions, by the names that authors give them, else the default one."""
    path = found.root / SETTINGS_FILE
    if not path.is_file():
        return found
    tree: dict[str, Any] = read_json(path, "fetch it again")
    if tree.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        _refuse(found.root, f"{SETTINGS_FILE} with model_type = {tree['model_type']}", "a SentenceTransformer can")
    cut = tree.get("truncate_dim")
    if cut is not None and (isinstance(cut, bool) or not isinstance(cut, int) or cut < 1):
        _refuse(found.root, f"{SETTINGS_FILE} with truncate_dim = {cut!r}", "a number of dimensions can")
    prompts = cast("dict[str, str | None]", tree.get("prompts") or {})
    default = tree.get("default_prompt_name")
    if default is not None and default not in prompts:
        _refuse(found.root, f"{SETTINGS_FILE} with default_prompt_name = {default!r}, no prompt", "correct that name")
    chosen = (
        next((name for name in names if name in prompts), default) for names in (_QUERY_PROMPTS, _CAPTION_PROMPTS)
    )
    query, caption = (prompts[name] or "" if name is not None else "" for name in chosen)
    said = [f"before {who}: {text!r}" for who, text in (("queries", query), ("captions", caption)) if text]
    if tree.get("similarity_fn_name") not in (None, "cosine"):
        said.append(f"similarity {tree['similarity_fn_name']}: here vectors have length 1 and are ranked by cosine")
    if cut is not None:
        said.append(f"vectors are cut to {cut} dimensions")
    uses = (*found.uses, (SETTINGS_FILE, "; ".join(said) or "no prompts"))
    return replace(found, query_prompt=query, caption_prompt=caption, dimensions=cut, uses=uses)
