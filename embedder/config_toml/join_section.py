"""Section `[[join]]`: captions and columns of another table, brought to the items by their ids."""

from typing import Literal, Self

from pydantic import Field, model_validator

from embedder.config_toml.section import ConfigSection


class JoinOn(ConfigSection):
    """Columns whose values are equal in an item and its row."""

    id: str | None = Field(None, description="column of the table with the ids of the items")
    left: str | None = Field(None, description="column of the items that a source carries over, in place of the id")
    right: str | None = Field(None, description="column of the table that `left` is compared with")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_pair = self.left is not None and self.right is not None
        if (self.id is None) != is_pair or (self.id is not None and (self.left or self.right)):
            raise ValueError('on takes id = "KEY COLUMN", or left = "CARRIED COLUMN" with right = "KEY COLUMN"')
        return self

    @property
    def key(self) -> str:
        """Column of the table with the keys."""
        return self.id or self.right or ""


class JoinConfig(ConfigSection):
    """Table whose rows belong to the items of the sources, one row at most to each item."""

    path: str = Field(description="table (Parquet, CSV, JSONL, Delta): file, folder, glob or URI (local, s3://, gs://)")
    on: JoinOn = Field(description="what an item and its row have in common")
    columns: tuple[str, ...] = Field((), description="columns copied into the embeddings table, as carryover is")
    caption: str | None = Field(
        None, description="column with captions, which take the place of the items' own; of a blank one the own stays"
    )
    missing: Literal["null", "error"] = Field(
        "null",
        description="of an item without a row: null leaves the columns null, error ends the run before it begins",
    )
    source: str | None = Field(
        None, description="name of the one source whose items are joined, by their ids without that name; else of all"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.columns and self.caption is None:
            raise ValueError(f"[[join]] of {self.path}: it brings nothing; name columns, a caption, or both")
        if twice := [name for name in self.columns if self.columns.count(name) > 1]:
            raise ValueError(f"[[join]] of {self.path}: columns names {twice[0]!r} twice; name it once")
        return self


def check_joins(joins: tuple[JoinConfig, ...], sources: set[str | None]) -> None:
    """Raise ValueError where a [[join]] names a source that isn't there, or two bring the same.

    Args:
        joins: of the configuration.
        sources: names of the sources.
    """
    brought: dict[str, str] = {}
    for join in joins:
        if sources and join.source is not None and join.source not in sources:
            known = ", ".join(sorted(name for name in sources if name is not None)) or "none has a name"
            raise ValueError(f'[[join]] of {join.path}: there is no source "{join.source}" ({known}); name one of them')
        for name in (*join.columns, *(["caption"] if join.caption is not None else [])):
            if name in brought:
                raise ValueError(
                    f"[[join]] of {brought[name]} and of {join.path} both bring {name!r}; leave it out of one of them"
                )
            brought[name] = join.path
