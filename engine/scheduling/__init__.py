"""Which rows run next, on which pages, for whom. Standard library only: knows no tensor and no device."""

from .lending import PageLease, PageLending
from .page_pool import PagePool
from .plan import (
    Admission,
    CanvasFinished,
    CanvasStarted,
    Change,
    Plan,
    PlannedRow,
    Preemption,
    RowKind,
    RowResult,
    SequenceFinished,
)
from .prefix_index import ROOT_KEY, PrefixChanges, PrefixIndex, prefix_key, prefix_keys
from .requested import make_sequence
from .rows import Outlook
from .scheduler import Scheduler
from .sequence import Sequence, Status
from .shadow import Shadow

__all__ = [
    "ROOT_KEY",
    "Admission",
    "CanvasFinished",
    "CanvasStarted",
    "Change",
    "Outlook",
    "PageLease",
    "PageLending",
    "PagePool",
    "Plan",
    "PlannedRow",
    "Preemption",
    "PrefixChanges",
    "PrefixIndex",
    "RowKind",
    "RowResult",
    "Scheduler",
    "Sequence",
    "SequenceFinished",
    "Shadow",
    "Status",
    "make_sequence",
    "prefix_key",
    "prefix_keys",
]
