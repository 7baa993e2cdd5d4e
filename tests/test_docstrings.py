"""Whoever asks `help` about a public name of the library gets an answer: its own docstring, or that of its contract.

ruff looks after functions, classes and the form of docstrings; it cannot see that a method without a docstring
overrides one that has one.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import ntk_iterncgp

ROOMS = sorted(m.name for m in pkgutil.iter_modules(ntk_iterncgp.__path__) if m.name not in ("__main__", "experiments"))


def modules_of(room: str) -> Iterator[ModuleType]:
    package = importlib.import_module(f"ntk_iterncgp.{room}")
    yield package
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}."):
        yield importlib.import_module(found.name)


def unexplained(kind: type) -> list[str]:
    """Public methods and properties that neither this class nor one that it inherits from explains."""
    found = []
    for name, member in vars(kind).items():
        is_ours = callable(member) or isinstance(member, property | classmethod | staticmethod)
        if name.startswith("_") or not is_ours or isinstance(member, type):
            continue
        if not any(inspect.getdoc(vars(base).get(name)) for base in kind.__mro__ if name in vars(base)):
            found.append(f"{kind.__module__}.{kind.__qualname__}.{name}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_method_is_explained_by_itself_or_by_its_contract(room: str) -> None:
    classes = [
        kind
        for module in modules_of(room)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert [name for kind in classes for name in unexplained(kind)] == []


def test_a_method_without_a_docstring_is_found_unless_its_contract_has_one() -> None:
    class Contract:
        def explained(self) -> None:
            """Do this."""

    class Final(Contract):
        def explained(self) -> None: ...

        def unexplained(self) -> None: ...

        @property
        def number(self) -> int:
            return 0

    assert [name.rpartition(".")[2] for name in unexplained(Final)] == ["unexplained", "number"]
