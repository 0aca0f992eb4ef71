"""Attributes that are computed on first use, only once even with several threads."""

import threading
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class locked_cached_property(Generic[Value]):
    """A `functools.cached_property` with a lock for each object, so that two threads never compute it twice.

    Since Python 3.12, `cached_property` lets two threads load the same model or index.
    """

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make, self._name = make, make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...
    def __get__(self, owner: object | None, kind: type) -> Self | Value:
        """Return the value; only called until it is computed, as the object's own attribute then takes precedence."""
        if owner is None:
            return self
        values = owner.__dict__
        with values.setdefault(f"_lock_of_{self._name}", threading.RLock()):
            if self._name not in values:
                values[self._name] = self._make(owner)
            value: Value = values[self._name]
            return value
