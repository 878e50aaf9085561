"""The built-in text: enough of it, the same every time, and nothing of the test split anywhere else."""

import hashlib
import os
import re
import subprocess
import sys

import pytest

from compressor.sources.builtin_text import Document, _comments, _docstrings, _without_repeats, builtin_text
from compressor.sources.text import read_rows

DIGEST = """
import hashlib, sys
from compressor.sources.builtin_text import builtin_text
before = set(sys.modules)
documents = builtin_text("calibration")
digest = hashlib.sha256(repr(documents).encode()).hexdigest()
print(digest, sorted({"antigravity", "turtle", "smtplib", "curses"} & (set(sys.modules) - before)))
"""


def passages(documents: tuple[Document, ...]) -> set[str]:
    """Paragraphs of 40 characters or more, white space evened out; written apart from the code under test."""
    paragraphs = (
        " ".join(paragraph.split())
        for document in documents
        for paragraph in re.split(r"\n[ \t]*\n", document.text)
    )
    return {paragraph for paragraph in paragraphs if len(paragraph) >= 40}


def test_splits_share_no_title_and_no_passage() -> None:
    splits = [builtin_text("train"), builtin_text("calibration"), builtin_text("test")]
    titles = [{document.title for document in documents} for documents in splits]
    found = [passages(documents) for documents in splits]
    for one in range(3):
        assert len(titles[one]) == len(splits[one])
        assert len(found[one]) > 500
        for other in range(one):
            assert not titles[one] & titles[other]
            assert not found[one] & found[other]


def test_test_split_is_of_the_manual_and_long_enough() -> None:
    documents = builtin_text("test")
    assert all(document.title.startswith("manual:") for document in documents)
    assert sum(len(document.text) for document in documents) > 200_000  # 4 to 5 characters to a token


def test_calibration_and_train_are_long_enough() -> None:
    assert sum(len(document.text) for document in builtin_text("calibration")) > 400_000
    assert sum(len(document.text) for document in builtin_text("train")) > 1_400_000


def test_same_text_in_every_process_and_nothing_imported() -> None:
    runs = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = hashlib.sha256(repr(builtin_text("calibration")).encode()).hexdigest()
    assert runs == {f"{here} []\n"}


def test_read_once_per_process() -> None:
    assert builtin_text("test") is builtin_text("test")


def test_as_a_data_set() -> None:
    rows = read_rows("builtin:test")
    assert rows.texts == tuple(document.text for document in builtin_text("test"))
    assert rows.document
    assert (rows.read, rows.dropped) == (len(builtin_text("test")), 0)
    assert read_rows("builtin").sha256 == read_rows("builtin:calibration").sha256 != rows.sha256


def test_repeats_are_removed_in_order_and_short_phrases_are_kept() -> None:
    long = "This paragraph is long enough to count as a passage of its own."
    again = long.replace(" ", "\n   ")
    one, two, three = (
        Document("one", f"{long}\n\nFor example:\n\nx = 1"),
        Document("two", f"Something else that is said here at some length, too.\n \n{again}\n\nFor example:"),
        Document("three", again),
    )
    kept = _without_repeats([one, two, three], set())
    assert kept[0] == one
    assert kept[1].text == "Something else that is said here at some length, too.\n\nFor example:"
    assert len(kept) == 2


def test_docstrings_and_comments_are_found() -> None:
    source = (
        "# A comment block that is long\n#   enough to be a passage.\n\n# too short\nx = 1\n"
        'def f():\n    """Return one, in a sentence of forty characters."""\n    return 1\n'
    )
    assert list(_comments(source)) == ["A comment block that is long\n  enough to be a passage."]
    assert list(_docstrings(source)) == ["Return one, in a sentence of forty characters."]
    with pytest.raises(SyntaxError):
        list(_docstrings("def"))
