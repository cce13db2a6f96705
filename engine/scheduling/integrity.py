"""What must hold of a running sequence between any two calls of the scheduler.

Knows a sequence, its outlook, and who holds and indexes pages. Changes nothing but the count it is given.
"""

from __future__ import annotations

from .page_pool import PagePool
from .prefix_index import PrefixIndex
from .rows import Outlook
from .sequence import Sequence


def check_running(outlook: Outlook, pool: PagePool, prefix_index: PrefixIndex, num_holders: list[int]) -> None:
    """Assert that lanes, pages and blocks of a running sequence agree; adds its pages to `num_holders`."""
    sequence, canvas = outlook.sequence, outlook.canvas
    assert sequence.is_running and len(sequence.lanes) == sequence.num_lanes, sequence.id
    # Only a sequence that is about to begin a canvas may still lack its page.
    has_canvas_page = len(sequence.page_ids) == canvas + 1
    assert has_canvas_page or len(sequence.page_ids) == canvas >= sequence.num_prefill_blocks + 1
    assert sequence.block - 1 <= sequence.num_sealed <= sequence.block or sequence.is_prefilling, sequence.id
    for block, page_id in enumerate(sequence.page_ids):
        num_holders[page_id] += 1
        if block >= sequence.num_sealed:
            assert pool.num_holders(page_id) == 1, f"{sequence.id}: unsealed block {block} is shared"
            assert page_id not in prefix_index, f"{sequence.id}: unsealed block {block} is indexed"
    _check_shadow(sequence, pool, prefix_index, num_holders)


def _check_shadow(sequence: Sequence, pool: PagePool, prefix_index: PrefixIndex, num_holders: list[int]) -> None:
    """The unconditional copy has pages for the same blocks, and nobody else has them."""
    shadow = sequence.shadow
    if shadow is None:
        return
    assert len(shadow.page_ids) == len(sequence.page_ids), f"{sequence.id}: the copy has {shadow.page_ids}"
    assert sequence.block - 1 <= shadow.num_sealed <= sequence.block or shadow.is_prefilling, sequence.id
    for page_id in shadow.page_ids:
        num_holders[page_id] += 1
        assert page_id not in prefix_index, f"{sequence.id}: a page of the copy is indexed"
        assert pool.num_holders(page_id) == 1, f"{sequence.id}: a page of the copy is shared"
