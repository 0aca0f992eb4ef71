"""Stable codes of the reasons why items are rejected or left out: what each means, whether it may pass, the cure.

A code is found by the recorded error type, so that the rejects of older stores have one, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES = 5
STEPS = ("read", "decode", "tokenise", "embed")
OTHER = "other"


@dataclass(frozen=True)
class RejectKind:
    """Kind of rejects: its code, what it means, whether later runs may succeed without a change, and the cure.

    `error_types` are the recorded types that belong to it.
    """

    code: str
    meaning: str
    transient: bool
    cure: str
    error_types: tuple[str, ...] = ()


AGAIN = "the next runs try again, `max_attempts` times; `embedder rejects --retry` at once"
_BY_CODE = {
    each.code: each
    for each in (
        RejectKind("missing", "the file, object or address is not there", False,
                   "correct the path or address, or take the row out; of a deleted file, the next refresh retires it",
                   ("FileNotFound", "NotFound", "NoBucket", "BrokenLink", "NoContent")),
        RejectKind("denied", "it may not be read", False, "grant access, or give other credentials",
                   ("PermissionDenied", "AccessDenied", "NoCredentials", "WrongRegion", "RequestRefused",
                    "LinkOutsideRoot", "PermissionError", "BadCertificate")),
        RejectKind("private_address", "a server of your own network", False,
                   "`web.allow_private = true`, where it is meant", ("PrivateAddress",)),
        RejectKind("bad_address", "a name or address that can't be opened as it is", False,
                   "rename the file, or correct the row",
                   ("NameNotUtf8", "AmbiguousName", "UnsafeName", "BadUri", "BadAddress", "UnknownHost",
                    "UnsupportedUri", "TooManyRedirects", "OddKey")),
        RejectKind("bad_id", "an id that is empty, or that another item has", False,
                   "give each row its own id", ("NullId", "DuplicateId", "NotHashed")),
        RejectKind("not_a_file", "a folder, pipe or device", False, "put a regular file there, or exclude it",
                   ("NotAFile",)),
        RejectKind("network", "the network or server failed", True, AGAIN,
                   ("NetworkError", "ServerError", "ServerBusy", "HostFailing", "BadAnswer", "BadEncoding")),
        RejectKind("timeout", "it took too long", True,
                   f"{AGAIN}; or raise `decode.timeout_s`, `web.timeout_s` or the step's",
                   ("TimeoutError", "Timeout", "ModelTimeout", "StepTimeout")),
        RejectKind("disk", "the disk failed, or is full", True, f"mend the disk; {AGAIN}",
                   ("ReadError", "NoSpace", "OSError")),
        RejectKind("changed", "it changed while it was read", True, AGAIN, ("Changed", "TableChanged")),
        RejectKind("too_large", "more bytes or pixels than a limit allows", False,
                   "make it smaller, or raise the limit that the message names",
                   ("TooLarge", "FileTooLarge", "TooManyPixels", "DecompressionBombError", "MemoryError")),
        RejectKind("empty", "nothing is in it", False, "replace the file, or fill the row's cells",
                   ("Empty", "EmptyFile", "NoFrames", "NoVideoStream")),
        RejectKind("cut_off", "a part of the file is missing", False, "fetch or copy it again",
                   ("Truncated", "TruncatedImage", "TruncatedVideo")),
        RejectKind("damaged", "its bytes are not what its kind has", False,
                   "fetch it again, or save it again with another program",
                   ("BrokenImage", "DamagedVideo", "BadTimestamps", "UnidentifiedImageError", "TableBroken",
                    "BrokenTar", "NotATar")),
        RejectKind("decoder_crashed", "the decoder ended while it read the file", False,
                   "save it again with another program; it may be made to do harm",
                   ("DecoderCrashed", "ForeignReference")),
        RejectKind("no_media", "neither an image, a video nor a caption", False,
                   "exclude it, or correct the column or address",
                   ("UnknownKind", "OtherFile", "NotMedia", "NotAPicture", "NotAText", "ExtraMember")),
        RejectKind("unsupported", "a kind of file, codec or pixels that this version can't read", False,
                   "convert it to JPEG, PNG or MP4",
                   ("UnreadableKind", "UnsupportedPixels", "UnsupportedCamera", "DecoderNotFoundError")),
        RejectKind("missing_package", "reading it needs a package that is not installed", False,
                   "install the extra that the message names; the next run embeds it", ("MissingExtra",)),
        RejectKind("bad_caption", "a caption, or a value next to it, that can't be read", False,
                   "save it as UTF-8, or valid JSON with values of one type",
                   ("CaptionNotUtf8", "CaptionBroken", "CarryoverType")),
        RejectKind("no_tower", "the model has no tower for it", False,
                   "use a model with that tower, or exclude such items", ("NoTower",)),
        RejectKind("step_failed", "your own step, or a further model, failed on it", False,
                   "correct the step or model by the message, then `embedder rejects --retry`",
                   ("WrongOutput", "StepDied", "NoRows", "ModelFailed")),
        RejectKind("not_finite", "the model's vector of it has values that are NaN or infinite", False,
                   "try another dtype, or import the model again", ("NonFinite",)),
        RejectKind(OTHER, "a reason without a code", False, "read the message; `embedder rejects --retry` tries again"),
    )
}  # fmt: skip
KINDS = tuple(_BY_CODE.values())
_CODES = {error_type: kind.code for kind in KINDS for error_type in kind.error_types}


def reject_code(row: Mapping[str, Any]) -> str:
    """Return the code of a row of `items`, by its `error_type` and `step`.

    Exceptions of decoders' libraries, whose names are theirs, mean damage; those of the user's steps, a failed step.
    """
    error_type, step = row.get("error_type"), row.get("step")
    if error_type in _CODES and not (error_type == "OSError" and step == "decode"):
        return _CODES[error_type]
    if error_type is not None and step == "decode":
        return "damaged"
    return "step_failed" if error_type is not None and step is not None and step not in STEPS else OTHER


@dataclass
class RejectGroup:
    """Rejects of one kind: their number, their error types, and the first ids."""

    kind: RejectKind
    num_items: int = 0
    error_types: dict[str, int] = field(default_factory=dict)
    item_ids: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as `embedder rejects --json` gives it."""
        kind = {name: getattr(self.kind, name) for name in ("code", "meaning", "transient", "cure")}
        return kind | {"num_items": self.num_items, "error_types": self.error_types, "item_ids": self.item_ids}

    def describe(self) -> str:
        """Describe it in one line."""
        return f"{self.num_items:,} {self.kind.code}: {self.kind.meaning}; {self.kind.cure}"


def group_rejects(rows: Iterable[Mapping[str, Any]]) -> list[RejectGroup]:
    """Group rows of `items` by kind, the largest group first."""
    groups: dict[str, RejectGroup] = {}
    for row in rows:
        code = reject_code(row)
        group = groups.setdefault(code, RejectGroup(_BY_CODE[code]))
        group.num_items += 1
        name = row.get("error_type") or ""
        group.error_types[name] = group.error_types.get(name, 0) + 1
        if len(group.item_ids) < MAX_EXAMPLES:
            group.item_ids.append(row["item_id"])
    return sorted(groups.values(), key=lambda group: (-group.num_items, group.kind.code))
