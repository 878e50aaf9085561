"""Text that every Python carries: its manual's topics and its standard library's docstrings and comments.

It makes the whole tool work with no network and no files. The text is split for good: a document goes to
``train``, ``calibration`` or ``test`` by the hash of its title, and a passage that the manual prints
under two titles stays in one split only (test before calibration before train), so the built-in model,
which was trained on ``train``, has never seen what it is evaluated on.

The text belongs to the running Python: deterministic for one version of it, slightly different between
versions. Nothing is written to disk and no module is imported for its docstrings (source is parsed).
"""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "calibration", "test"]

# Shares of documents, by hash of the title. The manual's topics are the better prose, so the test split
# is made of them alone and takes most of them.
_TOPIC_SHARES: tuple[tuple[Split, float], ...] = (("test", 0.55), ("calibration", 0.62), ("train", 1.0))
_MODULE_SHARES: tuple[tuple[Split, float], ...] = (("calibration", 0.2), ("train", 1.0))

# Distributions package these apart, generate them or leave them out; without them two installations of
# one Python version give the same text.
_LEFT_OUT = frozenset(
    """config-3 dist-packages distutils encodings ensurepip idlelib lib-dynload lib2to3 pydoc_data
    site-packages sitecustomize.py test tests tkinter turtle.py turtledemo venv""".split()  # noqa: SIM905
)
# A shorter paragraph ("For example:") is a phrase of the language, not a passage: it may repeat.
_PASSAGE = 40


@dataclass(frozen=True)
class Document:
    """One topic of the manual (``manual:NAME``) or the prose of one module (``module:PATH``)."""

    title: str
    text: str


@lru_cache(maxsize=3)
def builtin_text(split: Split) -> tuple[Document, ...]:
    """The documents of one split, in order of the hash of their title (so that subjects are mixed)."""
    seen: set[str] = set()
    test = _without_repeats(_topics("test"), seen)
    if split == "test":
        return _ordered(test)
    calibration = _without_repeats([*_topics("calibration"), *_modules("calibration")], seen)
    if split == "calibration":
        return _ordered(calibration)
    return _ordered(_without_repeats([*_topics("train"), *_modules("train")], seen))


def _ordered(documents: Iterable[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda document: _fraction(document.title)))


def _fraction(title: str) -> float:
    """A number in [0, 1) that depends on the title alone."""
    return int.from_bytes(hashlib.sha256(title.encode()).digest()[:6], "big") / 2**48


def _split_of(title: str, shares: tuple[tuple[Split, float], ...]) -> Split:
    fraction = _fraction(title)
    return next(split for split, upper in shares if fraction < upper)


def _topics(split: Split) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        title = f"manual:{name}"
        if _split_of(title, _TOPIC_SHARES) == split:
            yield Document(title, text)


def _modules(split: Split) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if _LEFT_OUT.intersection(path.parts) or path.name.startswith("_sysconfigdata"):
            continue
        title = f"module:{path.as_posix()}"
        if _split_of(title, _MODULE_SHARES) != split:
            continue
        try:
            source = file.read_bytes().decode("utf-8")
            text = "\n\n".join([*_docstrings(source), *_comments(source)])
        except (OSError, ValueError, SyntaxError):  # a file that this Python itself could not import
            continue
        if text:
            yield Document(title, text)


def _docstrings(source: str) -> Iterator[str]:
    """Docstrings in the order of the file."""
    owners = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in sorted(owners, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text and len(text) >= _PASSAGE:
            yield text


def _comments(source: str) -> Iterator[str]:
    """Blocks of at least two comment lines, without their marks."""
    for block in re.findall(r"(?:^[ \t]*#.*\n){2,}", source, flags=re.MULTILINE):
        lines = [re.sub(r"^[ \t]*#+ ?", "", line).rstrip() for line in block.splitlines()]
        text = "\n".join(lines).strip("\n")
        if len(text) >= _PASSAGE:
            yield text


def _without_repeats(documents: Iterable[Document], seen: set[str]) -> list[Document]:
    """The documents less every passage already in ``seen``, to which theirs are added."""
    kept = []
    for document in documents:
        passages = []
        for passage in re.split(r"\n\s*\n", document.text.expandtabs()):
            passage = "\n".join(line.rstrip() for line in passage.splitlines())
            key = " ".join(passage.split())
            if not key or (len(key) >= _PASSAGE and key in seen):
                continue
            seen.add(key)
            passages.append(passage)
        if sum(map(len, passages)) >= _PASSAGE:
            kept.append(Document(document.title, "\n\n".join(passages)))
    return kept
