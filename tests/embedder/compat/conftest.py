"""Libraries that have renamed what patches reach into."""

import pytest

from shards import compat


@pytest.fixture
def renamed(monkeypatch):
    """Lets the installed libraries lack names, given by their beginnings."""
    look, missing = compat.has_name, []
    monkeypatch.setattr(compat, "has_name", lambda name: not name.startswith(tuple(missing)) and look(name))
    compat._log_once.cache_clear()
    yield lambda *names: missing.extend(names)
    compat._log_once.cache_clear()
