"""The documentation says what the code does: generated pages are current, commands parse, recipes are valid.

The tutorial itself is carried out by ``scripts/tutorial.py``.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import reference
from tutorial import blocks_of, first_missing
from typer.main import get_command

from compressor.cli.main import app
from compressor.recipes import build_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", reference.FILES)
def test_reference_pages_are_what_the_code_says(name: str) -> None:
    page = reference.FILES[name]()
    assert (reference.PAGES / name).read_text("utf-8") == page, "python scripts/reference.py"


def test_every_command_on_a_page_parses() -> None:
    group: Any = get_command(app)
    seen = set()
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.partition("#")[0].partition(";")[0])
                if words[:1] == ["compressor"]:
                    name, *arguments = words[1:]
                    group.commands[name].make_context(name, arguments)
                    seen.add(name)
    assert seen == set(group.commands), "each is shown somewhere"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_recipes_on_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        (tmp_path / "recipe.yaml").write_text(block)
        build_recipe(tmp_path / "recipe.yaml", {"model": "builtin"})


def test_links_between_pages_and_files_hold() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tutorial_is_held_to_what_it_shows() -> None:
    blocks = blocks_of((ROOT / "docs" / "tutorial.md").read_text("utf-8"))
    assert blocks[0][0] == "scripts/quickstart.sh"
    assert sum(bool(expected) for _, expected in blocks) >= 4
    printed = "one\nKL 0.123 in   2 s\nthree\nfour\n"
    assert first_missing("…\nKL 9.9e-05 in 17 s\nthree\n", printed) is None
    assert first_missing("one\n…\nfour\n", printed) is None
    assert first_missing("one\nthree\n", printed) == "three", "what lies between must be said to"
    assert first_missing("three\n…\none\n", printed) == "one", "in their order"
    assert first_missing("five\n", printed) == "five"
