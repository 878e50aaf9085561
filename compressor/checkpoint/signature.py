"""``model.sig``: a signature of a whole checkpoint, made with model-signing (the OpenSSF's) and a key of one's own.

It covers every file, ``SHA256SUMS`` included, and is in the format that ``model_signing verify key`` reads too. Nothing is
asked of the network. Elliptic-curve signatures are random, so this is the one file that two equal runs do not share.
https://github.com/sigstore/model-transparency
"""

import os
from pathlib import Path
from typing import Any

from compressor.checkpoint.artifact import Artifact
from compressor.checkpoint.file_checks import Failed
from compressor.errors import InputRefused, MachineLimit

SIGNATURE = "model.sig"


def check_key(private_key: Path) -> None:
    """Raise MachineLimit without model-signing, InputRefused for a file that it takes no private key from."""
    _signer(private_key)


def sign(directory: Path, private_key: Path) -> None:
    """Write ``model.sig``, replacing it at once. Raises as :func:`check_key`."""
    signer = _signer(private_key)
    unfinished = directory.with_name(f".{directory.name}.{SIGNATURE}")
    signer.set_hashing_config(_all_files(directory)).sign(directory, unfinished)
    os.replace(unfinished, directory / SIGNATURE)


def check_signature(public_key: Path, artifact: Artifact) -> str:
    """Every file is as it was signed with the private half of ``public_key``, none is missing or new."""
    signing = _model_signing()
    file = artifact.path / SIGNATURE
    if not file.is_file():
        raise Failed(f"no {SIGNATURE}: the checkpoint is not signed")
    try:
        verifier = signing.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError) as error:
        raise InputRefused(f"{public_key}: not a public key in PEM form ({_line(error)})") from None
    try:
        verifier.set_hashing_config(_all_files(artifact.path)).verify(artifact.path, file)
    except Exception as error:  # whatever a forged or broken file makes of it
        raise Failed(f"{SIGNATURE}: does not hold for {public_key.name}: {_line(error)}") from None
    return f"holds for {public_key.name}"


def _signer(private_key: Path) -> Any:
    signing = _model_signing()
    try:
        return signing.signing.Config().use_elliptic_key_signer(private_key=private_key)
    except (OSError, ValueError, TypeError) as error:  # a TypeError for one with a password
        raise InputRefused(
            f"{private_key}: not an elliptic-curve private key in PEM form without a password ({_line(error)}): make one "
            "with openssl ecparam -name prime256v1 -genkey -noout"
        ) from None


def _all_files(directory: Path) -> Any:
    ignored = [directory / SIGNATURE]
    hashing = _model_signing().hashing.Config()
    return hashing.set_ignored_paths(paths=ignored, ignore_git_paths=False)


def _model_signing() -> Any:
    try:
        import model_signing
    except ImportError:
        # pyopenssl: model-signing 1.1 imports it and does not ask for it.
        raise MachineLimit("signatures need model-signing: pip install model-signing pyopenssl") from None
    return model_signing


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
