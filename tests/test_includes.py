"""Which C++ file may include which."""

from __future__ import annotations

import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
INCLUDE = re.compile(r'^\s*#\s*include\s+(<[^>]+>|"[^"]+")', re.MULTILINE)

# What each folder may include; the files of the core are those beside the folders. `common` is shared by the backends,
# so neither of them includes the other.
ALLOWED = {
    "common": {"common"},
    "cpu": {"common", "cpu"},
    "core": {"common", "core", "cpu"},
    "cuda": {"common", "cuda"},
    "bindings": {"bindings", "common", "core", "cpu", "cuda"},
}
# The bindings of the module _cuda. No other needs CUDA, so that the module _core is built and imported without.
WITH_CUDA = {"bindings/cuda.cpp", "bindings/device_arrays.cpp", "bindings/device_arrays.h"}


def name(path: Path) -> str:
    return path.relative_to(CSRC).as_posix()


def folder(path: Path) -> str:
    return path.parent.name if path.parent != CSRC else "core"


@cache
def included(path: Path) -> tuple[str, ...]:
    """Return the includes of a file as they are written."""
    return tuple(INCLUDE.findall(path.read_text(encoding="utf-8")))


def own_includes(path: Path) -> set[Path]:
    """Return the files of csrc that a file includes."""
    return {(path.parent / one.strip('"')).resolve() for one in included(path) if one[0] == '"'}


def reached_from(path: Path) -> set[Path]:
    """Return the files that a file includes, directly or through others."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        new = own_includes(todo.pop()) - found
        found |= new
        todo += new
    return found


def test_every_file_is_seen_and_every_include_is_found() -> None:
    assert {folder(path) for path in SOURCES} == ALLOWED.keys()
    missing = {name(path): own_includes(path) - set(SOURCES) for path in SOURCES}
    assert {one: paths for one, paths in missing.items() if paths} == {}
    assert own_includes(CSRC / "cpu" / "kernels.h") >= {CSRC / "common" / "format.h"}


def test_every_include_points_down() -> None:
    wrong = {
        name(path): {folder(one) for one in own_includes(path)} - ALLOWED[folder(path)]
        for path in SOURCES
    }
    assert {one: folders for one, folders in wrong.items() if folders} == {}


def test_no_files_include_each_other() -> None:
    order = TopologicalSorter({path: own_includes(path) for path in SOURCES}).static_order()
    assert set(order) == set(SOURCES)


def test_every_header_is_included() -> None:
    used = set().union(*(own_includes(path) for path in SOURCES))
    headers = {path for path in SOURCES if path.suffix in (".h", ".cuh")}
    assert {name(path) for path in headers - used} == set()


def test_only_the_module_for_cuda_includes_cuda() -> None:
    outside = [path for path in SOURCES if folder(path) != "cuda"]
    reaching = {
        name(path)
        for path in outside
        if any(
            folder(one) == "cuda" or "<cuda" in "".join(included(one))
            for one in {path, *reached_from(path)}
        )
    }
    assert reaching == WITH_CUDA


def test_only_the_bindings_include_pybind11() -> None:
    including = {folder(path) for path in SOURCES if "<pybind11/" in "".join(included(path))}
    assert including == {"bindings"}
