"""A griffe extension of mkdocs.yml: the doctest at the end of a docstring is its examples section."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*", re.M | re.S)


class Examples(griffe.Extension):
    """Gives doctests a heading, without which griffe takes them for prose."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = DOCTEST.sub(_section, text)


def _section(doctest: re.Match[str]) -> str:
    return "Examples:\n" + re.sub(r"^(?=.)", "    ", doctest[0], flags=re.M)
