"""The repository is tidy: nothing generated, nothing of one machine, nothing huge, tests where one looks for them."""

from __future__ import annotations

import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradwire as gw

from .import_graph import depth, graph_of, whole_graph

ROOT = Path(__file__).parents[1]
TEXT_BYTES_MAX = 100_000
BINARY_BYTES_MAX = 400_000
PYTHON_LINES_MAX = 1_000
GENERATED = (".a", ".dll", ".dylib", ".egg", ".log", ".o", ".pyc", ".pyd", ".so", ".whl")

# The size of gradwire. A ceiling is met by leaving out and by simplifying, not by splitting or moving.
MODULES_MAX = {"cli": 16, "exchange": 20, "spark": 16, "torch": 16, "transport": 16}
DEPTH_MAX = 8
LINES_MAX = {
    "python/gradwire/transport/": 4_000,
    "python/gradwire/cli/doctor": 600,
    "python/gradwire/reference.py": 450,
    "benchmarks/": 3_500,
}
DOCSTRING_LINES_MAX = 40

# Private vocabulary, for which the field has words of its own.
BANNED = re.compile(
    r"\b(houses?|rooms?|front doors?|doorways?|knock(?:s|ed|ing)?|strangers?|laggards?)\b", re.I
)
BANNED_IN = ("README.md", "benchmarks/", "csrc/", "docs/", "examples/", "python/", "tests/")

# Folders of tests that belong to no Python package.
OTHER_TEST_FOLDERS = {"cpp", "emulated_cuda", "golden"}

# Put together here, so that this file does not find itself.
MACHINE_SPECIFIC = re.compile("|".join(f"/{one}/" for one in ("home", "root", "Users", "work")))


def tracked_files() -> list[Path]:
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], capture_output=True, check=True, cwd=ROOT, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return tracked_files()


@pytest.fixture(scope="module")
def texts(files: list[Path]) -> dict[str, str]:
    """All files that are text, by name."""
    contents = {name(path): path.read_bytes() for path in files}
    return {one: data.decode() for one, data in contents.items() if b"\0" not in data[:8000]}


def test_nothing_generated_is_tracked(files: list[Path]) -> None:
    folders = {"__pycache__", "build", "dist", "demo-report", ".hypothesis", ".venv"}
    assert [
        name(path)
        for path in files
        if path.suffix in GENERATED or folders & set(path.relative_to(ROOT).parts[:-1])
    ] == []


def test_no_file_is_huge(files: list[Path], texts: dict[str, str]) -> None:
    limits = {
        name(path): TEXT_BYTES_MAX if name(path) in texts else BINARY_BYTES_MAX for path in files
    }
    assert [name(path) for path in files if path.stat().st_size > limits[name(path)]] == []


def test_no_python_file_is_a_thousand_lines_long(texts: dict[str, str]) -> None:
    lengths = {one: text.count("\n") for one, text in texts.items() if one.endswith(".py")}
    assert {one: lines for one, lines in lengths.items() if lines >= PYTHON_LINES_MAX} == {}


def test_no_path_of_one_machine_is_written_down(texts: dict[str, str]) -> None:
    assert [one for one, text in texts.items() if MACHINE_SPECIFIC.search(text)] == []


def test_every_text_ends_with_one_newline_and_has_no_stray_blanks(texts: dict[str, str]) -> None:
    checked = {one: text for one, text in texts.items() if text and one != "LICENSE"}
    assert [one for one, text in checked.items() if not re.search(r"[^\n]\n\Z", text)] == []
    assert [one for one, text in checked.items() if re.search(r"[ \t]$|\r", text, re.M)] == []


def test_nothing_is_left_to_do_later(texts: dict[str, str]) -> None:
    marks = re.compile("|".join(("TO" + "DO", "FIX" + "ME")))
    assert [one for one, text in texts.items() if marks.search(text)] == []


def test_every_folder_of_tests_mirrors_a_package(files: list[Path]) -> None:
    below = [path.relative_to(ROOT).parts for path in files]
    folders = {parts[1] for parts in below if parts[0] == "tests" and len(parts) > 2}
    assert "transport" in folders
    packages = {one for one in folders if (ROOT / "python" / "gradwire" / one).is_dir()}
    assert folders - packages <= OTHER_TEST_FOLDERS


def test_every_document_is_on_the_readme_s_map(texts: dict[str, str]) -> None:
    documents = [one for one in texts if re.fullmatch(r"docs/[^/]+\.md|[A-Z]+\.md", one)]
    assert len(documents) > 5
    links = texts["README.md"]
    assert [one for one in documents if f"({one})" not in links and one != "README.md"] == []


@pytest.mark.parametrize("package", MODULES_MAX)
def test_a_package_has_few_modules_and_short_chains_of_imports(package: str) -> None:
    graph = graph_of(f"gradwire.{package}")
    assert len(graph) <= MODULES_MAX[package]
    assert depth(graph) <= DEPTH_MAX


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(whole_graph()).prepare()


@pytest.mark.parametrize("place", LINES_MAX)
def test_the_project_stays_small(place: str, texts: dict[str, str]) -> None:
    lines = {
        one: text.count("\n")
        for one, text in texts.items()
        if one.startswith(place) and one.endswith(".py")
    }
    assert lines
    assert sum(lines.values()) <= LINES_MAX[place]


def test_the_class_that_everybody_uses_is_explained_in_forty_lines() -> None:
    assert len((gw.Exchange.__doc__ or "").splitlines()) <= DOCSTRING_LINES_MAX


def test_only_the_field_s_words_are_used(texts: dict[str, str]) -> None:
    checked = {
        one: text
        for one, text in texts.items()
        if one.startswith(BANNED_IN)
        and not one.startswith("tests/golden/")
        and one != "tests/test_tidy.py"
    }
    found = {one: BANNED.findall(text) for one, text in checked.items()}
    assert {one: banned for one, banned in found.items() if banned} == {}
