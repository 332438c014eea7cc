"""Reading of pickles from other programs, without running code from them.

Unpickling can call any function, and can set attributes of every class and function that the pickle names. The reader
here imports nothing: an inert record takes the place of each object whose class the pickle names.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Self


class Record:
    """An inert object in place of one that a pickle names.

    named: what the pickle names: `module.name`
    arguments: positional arguments with which the pickle makes the object
    state: the object's state, or None

    Each name has a subclass of its own. The class can't be changed by a pickle: where its state is to be set, Python
    calls `__setstate__` of the class without an object, which fails.
    """

    __slots__ = ("arguments", "state")
    named = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        record = super().__new__(cls)
        record.arguments = arguments
        record.state = None
        return record

    def __call__(self, *_arguments: Any) -> Record:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "an object of another program"


def inert_load(data: bytes, known: Mapping[str, Any], check_name: Callable[[str], None] = lambda name: None) -> Any:
    """Return a pickle's content, with a Record for each object that it names.

    known: objects that may be used by their names `module.name`; they must be immutable, and calls of them harmless
    check_name: called with each other name; an error that it raises ends the reading

    A damaged pickle can raise any error.
    """
    return _Inert(data, known, check_name).load()


class _Inert(pickle.Unpickler):
    """An unpickler that makes records, also of objects outside the pickle such as tensors."""

    def __init__(self, data: bytes, known: Mapping[str, Any], check_name: Callable[[str], None]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known
        self._check_name = check_name
        self._classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        named = f"{module}.{name}"
        if named in self._known:
            return self._known[named]
        self._check_name(named)
        if named not in self._classes:
            self._classes[named] = _ClassOfRecords(named, (Record,), {"__slots__": (), "named": named})
        return self._classes[named]

    def persistent_load(self, pid: Any) -> Record:
        return Record()


class _ClassOfRecords(type):
    """A class that is printed as its objects are: a pickle can name a class without making an object."""

    def __repr__(cls) -> str:
        return "an object of another program"
