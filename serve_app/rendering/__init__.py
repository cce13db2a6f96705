"""Engine events in; text, diffusion events and the parts of an answer out."""

from .choice import Choice, DiffusionPiece, Piece, TextPiece, require_text
from .formats import AnswerFormat, ChatFormat, CompletionFormat
from .parts import additions, usage

__all__ = [
    "AnswerFormat",
    "ChatFormat",
    "Choice",
    "CompletionFormat",
    "DiffusionPiece",
    "Piece",
    "TextPiece",
    "additions",
    "require_text",
    "usage",
]
