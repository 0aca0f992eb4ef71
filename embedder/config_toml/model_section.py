"""Section [[model]] of a run's configuration: the main model first, then further ones with the keys of their kinds."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, Tag

from embedder.config_toml.section import ConfigSection


class FurtherModelConfig(ConfigSection):
    """Model of a run, the first one the store's main model; further ones take the keys of their kind, too."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    has_free_keys: ClassVar[bool] = True
    """Whether keys without a field are another layer's: those of a kind, which `embedder.servables` checks."""

    name: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9_]{0,31}$",
        description="of a further model: its folder, and what stands before its columns; the first one is `main`",
        json_schema_extra={"rule": "lower-case letters, digits and _, at most 32, the first one a letter"},
    )
    uri: str = Field(min_length=1, description="model folder or file; of the kind python, FILE.py:Class")
    kind: str = Field("towers", description="towers, hf, onnx, torch_export, torchscript, vllm or python")
    stages: int | None = Field(None, ge=1, description="shards that towers are cut into; of the first: `num_stages`")
    plan: str | None = Field(None, description="plan that says how towers are cut, and on what; of the first: `plan`")

    def settings(self) -> dict[str, Any]:
        """Return the section as `embedder.servables.make_servable` takes it."""
        cut = {key: value for key in ("stages", "plan") if (value := getattr(self, key)) is not None}
        return {"name": self.name, "uri": self.uri, "kind": self.kind, **cut, **(self.model_extra or {})}


def check_models(models: tuple[FurtherModelConfig, ...], given: Collection[str]) -> None:
    """Raise ValueError where the entries of [[model]] don't fit together.

    Args:
        models: the entries.
        given: keys at the top that are set.
    """
    if not models:
        raise ValueError("[[model]] has no entry; write one, or leave the key out")
    first, *further = models
    if first.kind != "towers" or first.model_extra:
        found = f'kind = "{first.kind}"' if first.kind != "towers" else min(first.model_extra or {})
        raise ValueError(
            f"the first [[model]] has {found}; it is the store's main model, of the kind towers, and takes uri, name, "
            "stages and plan alone: write it first, and this one below"
        )
    if (first.plan and "plan" in given) or (first.stages and not {"num_stages", "stage"}.isdisjoint(given)):
        raise ValueError("the first [[model]] and the top both say how it is cut; write plan or stages once")
    seen = {"main"}
    for model in further:
        if model.name is None:
            raise ValueError(f"the [[model]] of {model.uri} has no name; write one: its folder and columns bear it")
        if model.name in seen | {first.name}:
            raise ValueError(f'two models have the name "{model.name}" (the first one is `main`); write another')
        for key in ("stages", "plan"):
            if getattr(model, key) is not None and model.kind != "towers":
                raise ValueError(
                    f'model "{model.name}": {key} = {getattr(model, key)}: of the kind towers alone; {model.kind} runs '
                    "whole"
                )
        seen.add(model.name)


ModelUri = Annotated[str, Tag("uri")]
ModelTables = Annotated[tuple[FurtherModelConfig, ...], Tag("tables")]


def stages_of(model: Any) -> int | None:
    """Number of stages that the first entry of [[model]] gives."""
    return model[0].stages if isinstance(model, tuple) and model else None


def plan_of(model: Any) -> str | None:
    """Plan that the first entry of [[model]] gives."""
    return model[0].plan if isinstance(model, tuple) and model else None


def form_of_model(value: Any) -> str:
    """Whether the key `model` is one address, or tables."""
    return "uri" if isinstance(value, str) else "tables"
