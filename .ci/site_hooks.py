"""Hooks of mkdocs.yml: README.md is the first page, and links to files outside of docs/ become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page as the site needs it."""
    if page.file.src_uri == "index.md":
        markdown = (ROOT / "README.md").read_text()
        markdown = re.sub(r"\]\((?!docs/|https?:|#)", "](../", markdown).replace("](docs/", "](")

    def as_text(link: re.Match[str]) -> str:
        if not (ROOT / "docs" / link[2]).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        return f"{link[1]} (`{link[2].removeprefix('../')}`)" if "`" not in link[1] else link[1]

    return LINK.sub(as_text, markdown)
