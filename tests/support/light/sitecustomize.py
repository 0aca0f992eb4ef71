"""Python imports this when it starts, where this folder is on its path: hides what a light installation lacks."""

import os
from importlib.machinery import PathFinder

HIDDEN = frozenset(os.environ["HIDDEN_PACKAGES"].split())
find_installed = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    """Find a module, unless it is of a hidden package."""
    return None if name.partition(".")[0] in HIDDEN else find_installed(name, path, target)


PathFinder.find_spec = find_spec
