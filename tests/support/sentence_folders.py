"""Tiny folders as sentence-transformers writes them, by hand, in the formats of its versions 3 and 6."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import library_checkpoints as checkpoints
import torch
from safetensors.torch import save_file
from tower_checks import randomise

OLD_POOLINGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
CAPTIONS = ["A red car", "two cats sleep on a sofa in the rain", "fruit", "Émile's café, 2 €", "red " * 40, "CATS"]
WIDTH = 32


def type_of(kind: str, version: int) -> str:
    """Full name of a module's class."""
    package = "sentence_transformer" if kind == "Pooling" else "base"
    name = "models" if version == 3 else f"{package}.modules.{kind.lower()}"
    return f"sentence_transformers.{name}.{kind}"


def write_json(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree), encoding="utf-8")


def save_sentence_model(
    folder: Path,
    *modes: str,
    save: Any = checkpoints.bert,
    version: int = 6,
    dense: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    modules: tuple[str, ...] = (),
    inner: str = "",
) -> None:
    """Save a text model: a checkpoint, Pooling by `modes`, a Dense where it has settings, and Normalize.

    Args:
        folder: of the model.
        modes: of Pooling, by the names of version 6; none for no Pooling.
        save: saves the checkpoint.
        version: 3 or 6, of the files' format.
        dense: settings of Dense.
        limits: content of sentence_bert_config.json.
        settings: content of config_sentence_transformers.json.
        modules: names of further modules, without files.
        inner: folder of the checkpoint below `folder`.
    """
    save(folder / inner)
    named = [("Transformer", inner)]
    if modes:
        pooling: dict[str, Any] = {"embedding_dimension": WIDTH, "pooling_mode": modes if len(modes) > 1 else modes[0]}
        if version == 3:
            pooling = {"word_embedding_dimension": WIDTH}
            pooling |= {f"pooling_mode_{old}": mode in modes for mode, old in OLD_POOLINGS.items()}
        named.append(("Pooling", "1_Pooling"))
        write_json(folder / "1_Pooling/config.json", pooling | {"include_prompt": True})
    if dense is not None:
        named.append(("Dense", "2_Dense"))
        write_json(folder / "2_Dense/config.json", dense)
        layer = randomise(torch.nn.Linear(dense["in_features"], dense["out_features"], bias=dense["bias"]), 3)
        state = {f"linear.{name}": value for name, value in layer.state_dict().items()}
        if version == 3:
            torch.save(state, folder / "2_Dense/pytorch_model.bin")
        else:
            save_file(state, folder / "2_Dense/model.safetensors")
    named += [("Normalize", "3_Normalize")] * bool(modes) + [(kind, f"9_{kind}") for kind in modules]
    rows = [
        {"idx": number, "name": str(number), "path": path, "type": type_of(kind, version)}
        for number, (kind, path) in enumerate(named)
    ]
    write_json(folder / "modules.json", rows)
    task = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    features = {"modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}}
    usual = task | features if version == 6 else {"max_seq_length": None, "do_lower_case": False}
    write_json(folder / inner / "sentence_bert_config.json", usual | dict(limits or {}))
    prompts = {"prompts": {"query": "", "document": ""}} if version == 6 else {}
    write_json(folder / "config_sentence_transformers.json", prompts | dict(settings or {}))


def pool(mode: str, x_RTD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Pool caption by caption, as the library's documentation says it."""
    rows = []
    for x_TD, used in zip(x_RTD, mask.bool(), strict=True):
        tokens = x_TD[used]
        weights = torch.arange(1.0, len(tokens) + 1)[:, None]
        rows.append(
            {
                "cls": tokens[0],
                "max": tokens.max(0).values,
                "mean": tokens.mean(0),
                "mean_sqrt_len_tokens": tokens.sum(0) / len(tokens) ** 0.5,
                "weightedmean": (tokens * weights).sum(0) / weights.sum(),
                "lasttoken": tokens[-1],
            }[mode]
        )
    return torch.stack(rows)


def expected_vectors(
    folder: Path,
    captions: list[str],
    *modes: str,
    activation: torch.nn.Module | None = None,
    limit: int = checkpoints.MAX_TOKENS,
    inner: str = "",
) -> torch.Tensor:
    """Vectors of length 1 by only transformers; `activation` follows a Dense, None without one."""
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    model, tokens = AutoModel.from_pretrained(folder / inner).eval(), AutoTokenizer.from_pretrained(folder / inner)
    inputs = tokens(captions, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
        found = torch.cat([pool(mode, hidden, inputs["attention_mask"]) for mode in modes], 1)
        if activation is not None:
            path = folder / "2_Dense/model.safetensors"
            state = load_file(path) if path.is_file() else torch.load(folder / "2_Dense/pytorch_model.bin")
            found = activation(torch.nn.functional.linear(found, state["linear.weight"], state.get("linear.bias")))
    return torch.nn.functional.normalize(found, dim=1)
