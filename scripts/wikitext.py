"""Undo the tokenisation of WikiText files (" @-@ ", spaces before punctuation), as most papers evaluate them.

python scripts/wikitext.py wt2.valid.txt valid.txt
"""

import re
import sys
from pathlib import Path


def detokenize(text: str) -> str:
    """Plain prose from WikiText's tokenised form."""
    for symbol in "-,.":
        text = text.replace(f" @{symbol}@ ", symbol)
    text = re.sub(r" ([.,;:!?)\]%])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    text = re.sub(r" (n't|'s|'ve|'re|'ll|'d|'m)\b", r"\1", text)
    return re.sub(r'" ([^"\n]*?) "', r'"\1"', text)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    target.write_text(detokenize(source.read_text("utf-8")), "utf-8")
