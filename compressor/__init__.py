"""compressor: distill, scan, plan, quantize, verify and report on transformer models."""

__version__ = "0.1.0"
