"""``python -m compressor``."""

from compressor.cli.main import main

main()
