"""What each inference engine can load."""

from compressor.engines.check import ENGINES, Problem, check, loadable_formats

__all__ = ["ENGINES", "Problem", "check", "loadable_formats"]
