"""Hooks of mkdocs.yml: README.md is the first page, and links to files outside of docs/ become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
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
        target = (DOCS / page.file.src_uri).parent.joinpath(link[2]).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        if target.is_relative_to(DOCS):
            return link[0]
        return link[1] if "`" in link[1] else f"{link[1]} (`{target.relative_to(ROOT)}`)"

    return LINK.sub(as_text, markdown)
