"""What each inference engine can load."""

from compressor.engines.check import ENGINES, Problem, check, check_fp8_cache, check_name, loadable_formats

__all__ = ["ENGINES", "Problem", "check", "check_fp8_cache", "check_name", "loadable_formats"]
