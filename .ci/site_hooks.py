"""Hooks of mkdocs.yml: README.md is the first page, and links to files outside of docs/ become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add README.md, with its links as seen from docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that lead out of docs/, where they lead somewhere."""

    def as_text(link: re.Match[str]) -> str:
        if not (ROOT / "docs" / link[2]).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        return f"{link[1]} (`{link[2].removeprefix('../')}`)" if "`" not in link[1] else link[1]

    return LINK.sub(as_text, markdown)
