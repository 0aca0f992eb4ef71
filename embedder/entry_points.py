"""Plug-ins of this installation, by entry points: commands, trackers, kinds of models, deploy targets, configurations.

A package adds one in its own metadata, without any change here:

    [project.entry-points."embedder.trackers"]
    notebook = "my_package.trackers:NotebookTracker"

Those of `embedder.plugins` are in its file `entry_points.txt`, from which this package's metadata are made. They are
read from the file, as code that was copied to a node has no metadata.
"""

import configparser
import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from embedder.errors import ConfigError, EmbedderError

LOG = logging.getLogger(__name__)
COMMANDS = "embedder.commands"
"""Functions, or Typer applications, by the name of the command."""
CONFIGURATIONS = "embedder.configurations"
"""Classes of TOML files other than a run's; `embedder config` shows them."""
RUNNERS = "embedder.runners"
"""Subclasses of `embedder.servables.servable.Servable`, by the `kind` of `[[model]]`."""
STEPS = "embedder.steps"
"""Classes and functions of `[[step]]`, by the name in `callable`; other processes import and run them."""
TARGETS = "embedder.targets"
"""Functions that write the files to start a cluster, by the subcommand of `embedder deploy`."""
TRACKERS = "embedder.trackers"
"""Classes of `embedder.observability.trackers.TrackerClient`, by the `kind` of `[tracker]`."""

GROUPS = (COMMANDS, CONFIGURATIONS, RUNNERS, STEPS, TARGETS, TRACKERS)
OWN_FILE = Path(__file__).parent / "plugins" / "entry_points.txt"
PACKAGE = "embedder"


@cache
def _read_entry_points() -> tuple[EntryPoint, ...]:
    """Return the entry points of all packages for this one; the search takes some 30 ms."""
    found = entry_points()
    return tuple(point for group in GROUPS for point in found.select(group=group))


@cache
def find_plugins(group: str) -> MappingProxyType[str, EntryPoint]:
    """Return the plug-ins of a group by name, those of this package first; imports none of them."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign] # names keep their capitals
    parser.read(OWN_FILE, encoding="utf-8")
    section = parser[group] if parser.has_section(group) else {}
    found = {name: EntryPoint(name, value, group) for name, value in section.items()}
    for point in sorted(_read_entry_points(), key=lambda each: (each.name, each.value)):  # not as they were installed
        if point.group != group or (point.dist is not None and point.dist.name == PACKAGE):
            continue
        if point.name in found:
            LOG.warning(
                "plug-in %s (%s): %s has the name already; this one is left out", point.name, point.value, group
            )
        else:
            found[point.name] = point
    return MappingProxyType(found)


def load_plugin(group: str, name: str, where: str) -> Any:
    """Import a plug-in for `where`; raises `ConfigError` if there is none, or its package can't be imported."""
    known = find_plugins(group)
    if name not in known:
        raise ConfigError(
            f"{where}: found {name!r}; there are {', '.join(known) or 'none'}. Packages add more: {group}"
        )
    return load_point(known[name], f"{where}: {name}", ConfigError)


def load_point(point: EntryPoint, what: str, refusal: type[EmbedderError]) -> Any:
    """Import what an entry point names, described by `what`; raises `refusal` if its package can't be imported."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # another package's code
        reason = " ".join(str(error).split())
        raise refusal(f"{what} ({point.value}) can't be loaded: {reason}; reinstall its package") from error
