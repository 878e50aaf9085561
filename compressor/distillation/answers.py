"""From predictions to what is counted: answers of a question, entities of a sentence, overlap of a summary."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def normalized(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(" " if c in string.punctuation else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 when the normalised answer is one of the references (an empty one where there is no answer)."""
    return float(any(normalized(prediction) == normalized(r) for r in references or [""]))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """The best F1 of word overlap with a reference (Rajpurkar et al. 2016)."""
    best = 0.0
    words = normalized(prediction).split()
    for reference in references or [""]:
        expected = normalized(reference).split()
        if not words or not expected:
            best = max(best, float(words == expected))
            continue
        common = sum((Counter(words) & Counter(expected)).values())
        best = max(best, 2 * common / (len(words) + len(expected)))
    return best


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin 2004), without stemming."""
    a, b = normalized(prediction).split(), normalized(reference).split()
    if not a or not b:
        return float(a == b)
    row = [0] * (len(b) + 1)
    for word in a:
        previous = 0
        for j, other in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / (len(a) + len(b))


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first, last, type) of the entities in BIO tags; an I- without a B- before it begins one, as in CoNLL."""
    found: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for at, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        goes_on = prefix in ("I", "E") and name == kind
        if kind and not goes_on:
            found.add((start, at - 1, kind))
            kind = ""
        if not kind and prefix in ("B", "I", "S", "E") and name:
            start, kind = at, name
    return found


def best_span(
    start: NDArray[np.float64], end: NDArray[np.float64], longest: int = 30
) -> tuple[int, int, float]:
    """The likeliest (start, end) with start ≤ end < start + ``longest``, and its score."""
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.ones_like(scores, dtype=bool)) & np.tril(
        np.ones_like(scores, dtype=bool), longest - 1
    )
    scores = np.where(allowed, scores, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    return int(first), int(last), float(scores[first, last])
