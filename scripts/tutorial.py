"""Carry out the tutorial as it stands in docs/tutorial.md: ``python scripts/tutorial.py``. Needs Python and bash.

All ``bash`` blocks run one after another in one shell. Each must succeed, and print what the ``text`` block after it shows:
its lines in their order, numbers aside, with others between them where it says ``…``.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    blocks = blocks_of((ROOT / "docs" / "tutorial.md").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as name:
        script = ""
        for number, (commands, _) in enumerate(blocks):
            outcome = Path(name) / str(number)
            script += f"{{\n{commands}\n}} > {outcome}.out 2>&1\necho $? > {outcome}.code\n"
        # Tables of one width wherever this runs.
        subprocess.run(
            ["bash"], input=script, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, check=True
        )
        for number, (commands, expected) in enumerate(blocks):
            outcome = Path(name) / str(number)
            printed = outcome.with_suffix(".out").read_text("utf-8")
            print(f"$ {commands}\n{printed}", flush=True)
            if outcome.with_suffix(".code").read_text() != "0\n":
                sys.exit(f"tutorial: block {number + 1} failed")
            missing = first_missing(expected, printed)
            if missing is not None:
                sys.exit(f"tutorial: block {number + 1} does not print this line where it should: {missing}")


def blocks_of(page: str) -> list[tuple[str, str]]:
    """(commands, expected output) of each ``bash`` block."""
    found = re.findall(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, re.MULTILINE | re.DOTALL)
    return [(commands.strip(), expected) for commands, expected in found]


def first_missing(expected: str, printed: str) -> str | None:
    """The first line of ``expected`` that does not follow where the line before it was found; None when all do."""
    lines = [plain(line) for line in printed.splitlines()]
    at, skipping = 0, True
    for line in filter(str.strip, expected.splitlines()):
        if line.strip() == "…":
            skipping = True
            continue
        places = range(at, len(lines)) if skipping else range(at, min(at + 1, len(lines)))
        at = next((place + 1 for place in places if lines[place] == plain(line)), 0)
        if at == 0:
            return line
        skipping = False
    return None


def plain(line: str) -> str:
    """The line with every number as # and any run of spaces as one."""
    return " ".join(re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", line).split())


if __name__ == "__main__":
    main()
