"""What ``pip install gradwire`` promises."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import gradwire as gw

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()

try:
    DISTRIBUTION = metadata.distribution("gradwire")
except metadata.PackageNotFoundError:
    pytest.skip("gradwire is not installed here, only on the path", allow_module_level=True)


def requirements(extra: str | None) -> set[str]:
    """Return the names required by an extra; None: always."""
    found = set()
    for line in DISTRIBUTION.requires or []:
        name, _, condition = line.partition(";")
        wanted = re.search(r"""extra == ['"]([\w-]+)['"]""", condition)
        if (wanted.group(1) if wanted else None) == extra:
            found.add(re.split(r"[^\w.-]", name.strip())[0])
    return found


def test_the_version_has_one_source() -> None:
    stated = re.search(r'^version = "(.+)"$', PYPROJECT, re.M)
    assert stated is not None
    assert gw.__version__ == DISTRIBUTION.version == stated.group(1)


def test_only_numpy_and_cryptography_are_always_required() -> None:
    assert requirements(None) == {"numpy", "cryptography"}


def test_every_promised_extra_exists_and_testing_does_not_need_torch() -> None:
    promised = {"bench", "bench-transport", "cuda12", "cuda13", "demo", "spark", "test", "torch"}
    assert promised <= set(DISTRIBUTION.metadata.get_all("Provides-Extra") or [])
    assert "torch" not in requirements("test")
    assert requirements("torch") == {"torch"}


def test_the_command_is_installed() -> None:
    (command,) = DISTRIBUTION.entry_points.select(group="console_scripts", name="gradwire")
    assert command.value == "gradwire.cli:main"


def test_types_and_the_compiled_core_are_shipped() -> None:
    package = Path(gw.__file__).parent
    for name in ("py.typed", "_core.pyi"):
        assert (package / name).is_file()
    from gradwire import _core

    assert Path(_core.__file__).suffix in (".so", ".pyd")


def test_the_licences_of_what_is_compiled_in_are_shipped() -> None:
    assert DISTRIBUTION.metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    notice = (Path(__file__).parents[1] / "NOTICE").read_text()
    assert "Wenzel Jakob" in notice  # whose licence asks for it


def test_every_extra_is_in_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "install.md").read_text()
    extras = DISTRIBUTION.metadata.get_all("Provides-Extra") or []
    assert [one for one in extras if f"`{one}`" not in page] == []


def test_the_citation_names_this_version() -> None:
    citation = (Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert f"\nversion: {gw.__version__}\n" in citation
