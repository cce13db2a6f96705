"""Analyses of text, each a generator that does one slice of device work between two passes at a time."""

from .desk import AnalysisDesk
from .score_cache import ScoreCache
from .start import start_analysis

__all__ = ["AnalysisDesk", "ScoreCache", "start_analysis"]
