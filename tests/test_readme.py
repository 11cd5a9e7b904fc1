"""README's example and every docstring's run as they stand."""

from __future__ import annotations

import doctest
import importlib
import inspect
import operator
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

README = (Path(__file__).parents[1] / "README.md").read_text()
# The one with torch runs in tests/torch/test_share.py.
EXAMPLES = [
    one
    for one in re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    if "gradwire.torch" not in one
]

# Modules that need what a plain installation does not have.
OPTIONAL = (
    "gradwire.feed.torch",
    "gradwire.hf",
    "gradwire.jax",
    "gradwire.lightning",
    "gradwire.ray",
    "gradwire.torch",
    "gradwire.spark",
    "gradwire._cuda",
    "gradwire._core",
)


def module_names() -> Iterator[str]:
    yield "gradwire"
    for module in pkgutil.walk_packages(gradwire.__path__, "gradwire."):
        if not module.name.startswith(OPTIONAL) and not module.name.endswith("__main__"):
            yield module.name


def test_the_readme_has_an_example_of_at_most_a_dozen_lines() -> None:
    assert len(EXAMPLES) == 1
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 12


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "README.md", "exec"), {})
    promised = re.findall(r"print\(.*#\s*(.+)$", EXAMPLES[0], re.M)
    assert promised
    assert capsys.readouterr().out.splitlines() == promised


@pytest.mark.parametrize("name", list(module_names()))
def test_the_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def public_classes() -> list[type]:
    values = [getattr(gradwire, name) for name in gradwire.__all__ if name != "__version__"]
    return [value for value in values if isinstance(value, type)]


RESULTS = (
    "EncoderStats",
    "ExchangeStats",
    "Joined",
    "Message",
    "Part",
    "Peer",
    "SharedArrays",
    "StepResult",
)


@pytest.mark.parametrize("public", public_classes(), ids=lambda public: public.__name__)
def test_every_public_class_that_does_something_shows_an_example(public: type) -> None:
    is_error = issubclass(public, Exception)
    is_result = public.__name__ in RESULTS
    assert is_error or is_result or ">>> " in (public.__doc__ or "")


def test_every_link_in_the_readme_leads_somewhere() -> None:
    root = Path(__file__).parents[1]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (root / link).exists()] == []


DOCS = "".join(path.read_text() for path in (Path(__file__).parents[1] / "docs").glob("*.md"))


@pytest.mark.parametrize("public", ["Exchange", "Node", "transport.Limits"])
def test_the_docs_name_every_option(public: str) -> None:
    found = operator.attrgetter(public)(gradwire)
    # `secret` is SECURITY.md's, `dense` the same as codec="dense".
    options = set(inspect.signature(found).parameters) - {
        "enc",
        "node",
        "dense",
        "secret",
        "limits",
    }
    assert {name for name in options if not re.search(rf"\b{name}\b", DOCS)} == set()
