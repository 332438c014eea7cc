"""Pickles that would change this process, read as inert records."""

from __future__ import annotations

import argparse
import pathlib
import pickle
from pathlib import PosixPath
from typing import Any

import pytest

from hybridtron.inert_pickle import Record, inert_load
from tests.pickles import Victim, state_of_a_class


def test_objects_become_records_with_their_arguments_and_state() -> None:
    names = [argparse.Namespace(heads=4), PosixPath("a/b"), argparse.Namespace]
    namespace, path, named = inert_load(pickle.dumps(names), {})
    assert isinstance(namespace, Record)
    assert (namespace.named, namespace.arguments, namespace.state) == ("argparse.Namespace", (), {"heads": 4})
    assert path.named.endswith(".PosixPath")
    assert path.arguments == ("a", "b")
    assert {repr(namespace), repr(named)} == {"an object of another program"}


@pytest.mark.parametrize("known", [{}, {"pathlib.PosixPath": len}])
def test_no_class_of_the_process_gets_an_attribute(known: dict[str, Any]) -> None:
    """The bytes give a class a state, which Python's own unpickler sets."""
    pickle.loads(state_of_a_class("tests.pickles.Victim", "name", "../x"))
    assert Victim.__dict__["name"] == "../x"
    for name in ("pathlib.PosixPath", "argparse.Namespace"):
        with pytest.raises((TypeError, AttributeError)):
            inert_load(state_of_a_class(name, "name", "../x"), known)
    assert pathlib.Path("../x").name == "x"
    assert not hasattr(argparse.Namespace, "name")
    assert not hasattr(Record, "name")


def test_names_can_be_refused() -> None:
    def check(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match=r"argparse\.Namespace"):
        inert_load(pickle.dumps(argparse.Namespace), {}, check)
