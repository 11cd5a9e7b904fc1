"""Tutorials and how-to pages do what they say: their blocks run in order, in a fresh folder.

A block of Python with a ``title`` becomes the file of that name; the others run as one script, and blocks of shell one
after the other. The line before a block may be ``<!-- in the background -->`` or ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gradwire.cli import compare, demo, doctor, estimate, info, run, secret, top
from gradwire.cli.run import free_port

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NEEDS = {"pytorch": "torch", "spark": "spark", "jax": "jax", "ray": "ray"}
MODULES = {
    "torch": ("torch",),
    "spark": ("torch", "pyspark"),
    "jax": ("jax", "optax"),
    "ray": ("torch", "ray"),
}
PAGES = [
    pytest.param(
        path,
        id=path.relative_to(DOCS).as_posix(),
        marks=getattr(pytest.mark, NEEDS[path.stem]) if path.stem in NEEDS else (),
    )
    for folder in ("tutorials", "howto")
    for path in sorted((DOCS / folder).glob("*.md"))
]

# Pages whose blocks are parts of a larger script, and what runs them whole.
FRAGMENTS = {
    "README.md": "tests/test_readme.py and tests/torch/test_share.py; .ci/run the commands",
    "docs/torch.md": "tests/torch",
    "docs/spark.md": "tests/spark and examples",
    "CONTRIBUTING.md": ".ci/run does the same",
}

BLOCK = re.compile(
    r"(?:^<!-- ([^\n]+) -->\n)?^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A block of a page."""

    comment: str
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``python``, ``python3`` and ``gradwire`` are this Python and this package."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("python", ""), ("python3", ""), ("gradwire", " -m gradwire")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable}{command} "$@"\n')
        program.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")},
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    for module in MODULES.get(NEEDS.get(page.stem, ""), ()):
        pytest.importorskip(module, reason=f"{module} is not installed")
    shell, script, background = ["set -e"], [], []
    port = str(free_port())
    for block in blocks_of(page):
        if block.comment.startswith("not run: "):
            continue
        text = block.text.replace("40123", port)
        if block.title:
            (tmp_path / block.title).write_text(text)
        elif block.language == "python":
            script.append(text)
        elif block.comment == "in the background":
            background.append("$!")
            shell.append(f"({text}) &\njob{len(background)}=$!")
        else:
            shell.append(text)
    shell += [f"wait $job{number + 1}" for number in range(len(background))]
    if script:
        (tmp_path / "blocks.py").write_text("\n".join(script))
        shell.append("python blocks.py")
    assert len(shell) > 1, "no block runs"
    done = subprocess.run(
        ["bash", "-c", "\n".join(shell)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,  # Spark starts a Java process for each worker
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_block_that_does_not_run_says_why() -> None:
    run = {param.values[0] for param in PAGES}
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    silent = [
        f"{page.relative_to(ROOT)}: {block.text.splitlines()[0]}"
        for page in pages
        if page not in run and page.relative_to(ROOT).as_posix() not in FRAGMENTS
        for block in blocks_of(page)
        if block.language in ("python", "sh") and not block.comment.startswith("not run: ")
    ]
    assert silent == []


# ---- the reference --------------------------------------------------------------------------------------------------

COMMANDS = (DOCS / "reference" / "commands.md").read_text()
_TASK = "GRADWIRE_COMPARE"  # set by `gradwire compare` for its own processes


def test_the_reference_has_every_command_and_option() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for command in (compare, demo, doctor, estimate, info, run, secret, top):
        command.add_parser(commands)
    for name, command in commands.choices.items():
        [line] = re.findall(rf"^\| `gradwire {name}` \|.*$", COMMANDS, re.M)
        options = {option for action in command._actions for option in action.option_strings}
        assert options - {"-h", "--help"} == set(re.findall(r"`(-[-a-z]+)`", line)), name


def test_the_reference_has_every_variable_of_the_environment() -> None:
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    used = {
        name for path in sources for name in re.findall(r"\"(GRADWIRE_[A-Z_]+)\"", path.read_text())
    }
    assert used - {_TASK} == set(re.findall(r"^\| `(GRADWIRE_\w+)` \|", COMMANDS, re.M))
