"""The imports between gradwire's modules as a graph.

Every import counts wherever it stands: at the top, inside a function, or under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python" / "gradwire"
SOURCES = sorted(PACKAGE.rglob("*.py"))

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    """Return the dotted name of a source file; a package's ``__init__`` has the package's name."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imported_modules(code: str, package: str) -> Iterator[str]:
    """Yield the dotted name of every module that ``code``, a module of ``package``, imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            )
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                # `from gradwire import _core` is an import of a module that has no source.
                yield name if name in MODULES or module == "gradwire" else module


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the dotted names of the modules that a source file imports."""
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    return frozenset(imported_modules(path.read_text(), package))


@cache
def whole_graph() -> Graph:
    """Return the imports between all modules of gradwire."""
    return {name: set(imports_of(path) & MODULES.keys() - {name}) for name, path in MODULES.items()}


def graph_of(package: str) -> Graph:
    """Return the imports between the modules inside a package, subpackages included."""
    inside = {name for name in MODULES if f"{name}.".startswith(f"{package}.")}
    return {name: imports & inside for name, imports in whole_graph().items() if name in inside}


def depth(graph: Graph) -> int:
    """Return the number of modules on the longest chain of imports.

    Raises:
        graphlib.CycleError: modules import each other in a circle.
    """
    depths: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        depths[name] = 1 + max((depths[imported] for imported in graph[name]), default=0)
    return max(depths.values())
