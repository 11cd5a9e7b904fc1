"""The repository is tidy: nothing generated, nothing of one machine, nothing huge, tests where one looks for them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from fnmatch import fnmatch
from functools import cache
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

# The size of the transport and of the benchmarks. A ceiling is met by leaving out and by simplifying, not by splitting
# or moving. The package as a whole and its single files have none: such ceilings made code squeezed.
MODULES_MAX = {"cli": 16, "exchange": 20, "spark": 16, "torch": 16, "transport": 16}
DEPTH_MAX = 8
LINES_MAX = {
    "python/gradwire/transport/": 4_000,
    "benchmarks/": 4_500,  # nine recipes of others, each written faithfully, are 860 of them
}
DOCSTRING_LINES_MAX = 40

# What makes a class too large to hold in the head. Dataclasses of results and limits list figures, and may be longer.
ATTRIBUTES_MAX = 20
FIGURES = {"EpochFigures", "ExchangeStats", "HookStats", "Limits", "Stats", "StepResult"}
EXCHANGE_CLASS_LINES_MAX = 450
PUBLIC_OPTIONS_MAX = 12

# Assignments `a, b = x, y` are for values that belong together, and names say what a thing is.
PACKED_MAX = 60
EMPTY_NAMES = {"found", "one"}

# Of torch's tensors, though classes of gradwire have attributes of that name, too.
FOREIGN_ATTRIBUTES = {"data", "grad"}

# What others may not do to a membership, besides assignments: methods that change a container.
CHANGING_METHODS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
}
CHANGING_METHODS |= {"setdefault", "sort", "update"}

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


def test_the_core_writes_its_sentences_without_streams(texts: dict[str, str]) -> None:
    # Linked with a static libstdc++, as some machines' flags have it, a stream looks for its locale's parts in the
    # place of another library's, and a message's error ended the process.
    streams = re.compile(r"<(sstream|iostream|fstream|iomanip|locale|regex)>")
    core = {one: text for one, text in texts.items() if one.startswith("csrc/")}
    assert core
    assert [one for one, text in core.items() if streams.search(text)] == []


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
    documents = [one for one in texts if re.fullmatch(r"docs/[^/]+\.md|[A-Z_]+\.md", one)]
    assert len(documents) > 5
    links = texts["README.md"]
    assert [one for one in documents if f"({one})" not in links and one != "README.md"] == []


def test_every_page_has_a_name_of_its_own(texts: dict[str, str]) -> None:
    headings = [
        text.partition("\n")[0].removeprefix("# ").casefold()
        for one, text in texts.items()
        if one.startswith("docs/") and one.endswith(".md")
    ]
    menu = re.findall(r"^ +- (.+): \S+\.md$", texts["mkdocs.yml"], re.M)
    assert len(menu) > 20
    assert [name for name, count in Counter(headings).items() if count > 1] == []
    assert [name for name, count in Counter(menu).items() if count > 1] == []


def requirements(text: str) -> set[str]:
    """Return what a TOML or YAML text requires, such as "ruff==0.17.5"."""
    return set(re.findall(r"\"([\w.-]+(?:==|>=)[\w.]+)\"", text))


def test_pre_commit_runs_the_versions_of_the_gate(texts: dict[str, str]) -> None:
    config, project = texts[".pre-commit-config.yaml"], texts["pyproject.toml"]
    [lint] = re.findall(r"^lint = (.*)$", project, re.M)
    [always] = re.findall(r"^dependencies = (.*)$", project, re.M)
    assert requirements(lint)
    assert requirements(config) == requirements(lint) | requirements(always)


def test_pre_commit_formats_the_files_of_the_gate(texts: dict[str, str]) -> None:
    [pattern] = re.findall(r"^        files: (.*)$", texts[".pre-commit-config.yaml"], re.M)
    gate = re.search(r"^cpp_style\(\).*?^}", texts[".ci/run"], re.M | re.S)
    assert gate
    globs = re.findall(r"'([^']+)'", gate[0])
    formatted = {one for one in texts if any(fnmatch(one, glob) for glob in globs)}
    assert formatted
    assert {one for one in texts if re.search(pattern, one)} == formatted


def test_every_supported_python_is_tested(texts: dict[str, str]) -> None:
    supported = re.findall(r"Python :: (3\.\d+)\"", texts["pyproject.toml"])
    [matrix] = re.findall(r"^ +python: \[(.*)\]$", texts[".github/workflows/test.yml"], re.M)
    assert supported
    assert re.findall(r"[\d.]+", matrix) == supported


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


# ---- classes ---------------------------------------------------------------------------------------------------------


def modules() -> list[Path]:
    return sorted((ROOT / "python" / "gradwire").rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def attributes_of(kind: ast.ClassDef) -> set[str]:
    """Return the attributes that a class assigns to itself, and the fields that it declares."""
    fields = {
        target.id
        for node in kind.body
        if isinstance(node, ast.Assign)
        or (isinstance(node, ast.AnnAssign) and "InitVar" not in ast.unparse(node.annotation))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id != "_"
    }
    return fields | {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node)
    }


def test_no_class_has_more_than_twenty_attributes() -> None:
    sizes = {
        f"{name(path)}: {kind.name}": len(attributes_of(kind))
        for path in modules()
        for kind in classes(path)
        if kind.name not in FIGURES
    }
    assert len(sizes) > 100
    assert {kind: size for kind, size in sizes.items() if size > ATTRIBUTES_MAX} == {}


def test_the_classes_of_the_exchange_fit_on_a_few_pages() -> None:
    sizes = {
        kind.name: (kind.end_lineno or 0) - kind.lineno + 1
        for path in modules()
        if path.parent.name == "exchange"
        for kind in classes(path)
    }
    assert {kind: size for kind, size in sizes.items() if size > EXCHANGE_CLASS_LINES_MAX} == {}


def test_a_public_constructor_has_few_options_beside_the_declared_ones() -> None:
    counts = {
        f"{name(path)}: {kind.name}": len(init.args.args) + len(init.args.kwonlyargs) - 1
        for path in modules()
        for kind in classes(path)
        for init in kind.body
        if isinstance(init, ast.FunctionDef) and init.name == "__init__" and kind.name[0] != "_"
    }
    assert {kind: count for kind, count in counts.items() if count > PUBLIC_OPTIONS_MAX} == {}


def test_no_module_assigns_to_attributes_that_another_module_declares() -> None:
    """Objects change themselves. Counters are an exception: whoever sees an event counts it."""
    declared = {
        path: set[str]().union(*(attributes_of(kind) for kind in classes(path)))
        for path in modules()
    }
    ours = set[str]().union(*declared.values())
    foreign = []
    for path in modules():
        counted = {
            node.target
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Attribute)
            and ast.unparse(node.target.value).endswith("counters")
        }
        foreign += [
            f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and not is_own(node)
            and node not in counted
            and node.attr in ours - declared[path] - FOREIGN_ATTRIBUTES
        ]
    assert foreign == []


def test_nobody_but_the_membership_changes_what_it_holds() -> None:
    """Neither by assignment nor through a container; a method of the membership is the only way."""
    changes = []
    for path in modules():
        if path.parent.name != "exchange" or path.name == "membership.py":
            continue
        for node in ast.walk(parsed(path)):
            target: ast.expr | None = None
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
                node.ctx, ast.Load
            ):
                target = node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CHANGING_METHODS
                and isinstance(node.func.value, ast.Attribute)
            ):
                target = node.func.value
            if target is not None and re.search(
                r"\b_?(membership|introductions)\b", ast.unparse(target)
            ):
                changes.append(f"{name(path)}:{node.lineno}: {ast.unparse(node)}")
    assert changes == []


def test_assignments_pack_only_what_belongs_together() -> None:
    packed = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        and len(node.targets[0].elts) == len(node.value.elts)
    ]
    assert len(packed) <= PACKED_MAX, packed


def test_names_say_what_a_thing_is() -> None:
    empty = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            bound = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound = node.id
            elif isinstance(node, ast.arg):
                bound = node.arg
            if bound in EMPTY_NAMES:
                empty.append(f"{name(path)}:{node.lineno}: {bound}")
    assert empty == []


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
