"""Who runs, on which pages, and which rows ride in the next pass.

    plan = scheduler.plan()                     # run it on the device, then:
    changes = scheduler.apply(plan, results)

Plans may run ahead of results: the next one may be made before the last one is applied. It then counts on what is
certain of the passes in flight; what they turn out to have made void is dropped when their results come.

Knows sequences, pages, lanes and budgets. Must not know tensors, devices, clocks or threads: the
same calls always give the same plans.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable

from ..config import EngineConfig
from ..errors import QueueFull
from ..output import FinishReason
from .integrity import check_running
from .lending import PageLending
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
from .prefix_index import PrefixChanges, PrefixIndex
from .rows import Outlook, RowBudget, choose_rows, look_ahead
from .sequence import Sequence, Status


class Scheduler:
    """Admits, plans, applies, preempts and aborts.

    Service is in order of (priority, arrival), smallest first:
    - Admission takes the head of the queue or nobody: while it lacks a lane or pages, nobody behind
      it is admitted, however small, so a large request cannot be overtaken for ever. A preempted
      sequence queues at its old place.
    - Admission reserves pages for every block up to and including the canvas, less those found in the
      prefix index. Each later canvas takes one page; if none is free or cached, the running sequence
      that comes last in the order is preempted, be it the one that asks.
    - So the first sequence in the order never has to go, every plan has rows, and every request ends.
    - Pages that `lending` has given away are held like any others. While they are, the first sequence may have to go
      and a plan may have no rows; but every lease ends, and no other is given before the head of the queue is admitted.
    A smaller priority value always wins, so requests of a larger one may wait for as long as smaller
    ones keep coming; within a priority nobody starves.
    """

    def __init__(self, config: EngineConfig, block_size: int, num_pages: int) -> None:
        self._config = config
        self._block_size = block_size
        self._prefix_index = PrefixIndex()
        self._pool = PagePool(num_pages, self._prefix_index)
        self.lending = PageLending(self._pool, self._prefix_index, share_prefixes=config.share_prefixes)
        self._free_lanes = list(range(config.num_lanes))  # a heap: the lowest lane is given first
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # in order of service
        self._running: list[Sequence] = []  # in order of service
        self._in_flight: dict[Sequence, list[PlannedRow]] = {}  # planned and not applied, of running sequences
        self._had_prefill_row = True  # the last pass; the first one need not make up for another
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a lane, preempted ones included."""
        return len(self._waiting)

    @property
    def num_lanes_waiting(self) -> int:
        """Lanes that sequences without one want; a guided one wants two."""
        return sum(sequence.num_lanes for sequence in self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a lane; a guided one has two."""
        return len(self._running)

    @property
    def num_free_lanes(self) -> int:
        """Lanes that nobody has."""
        return len(self._free_lanes)

    @property
    def num_free_pages(self) -> int:
        """Pages that mean nothing."""
        return self._pool.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds and that a prefix look-up may find: as good as free."""
        return self._pool.num_cached

    @property
    def num_held_pages(self) -> int:
        """Pages in a running sequence's page table, and those that are lent."""
        return self._pool.num_held

    @property
    def prefill_row_limit(self) -> int:
        """Most prefill rows in a pass."""
        return self._config.prefill_row_limit

    def outlooks(self) -> list[Outlook]:
        """Where each running sequence will stand once the passes in flight are done, in order of service."""
        return [self._look_ahead(sequence) for sequence in self._running]

    def num_own_pages(self, sequence: Sequence) -> int:
        """Pages that only this sequence holds: they come free, or stay cached, when it ends."""
        shadow_pages = [] if sequence.shadow is None else sequence.shadow.page_ids
        return sum(self._pool.num_holders(page_id) == 1 for page_id in [*sequence.page_ids, *shadow_pages])

    def take_prefix_changes(self, *, everything: bool = False) -> PrefixChanges:
        """Prefix keys that others may share since this was last called, and those no longer; or all there are."""
        return self._prefix_index.take_changes(everything=everything)

    @property
    def has_work(self) -> bool:
        """True if some sequence waits or runs, so that the next plan has rows."""
        return bool(self._sequences)

    @property
    def is_full(self) -> bool:
        """True while `max_waiting` sequences wait, so that no other may be added."""
        return len(self._waiting) >= self._config.max_waiting

    def check_room(self) -> None:
        """Raise QueueFull if the queue is full."""
        if self.is_full:
            raise QueueFull(
                f"{len(self._waiting)} requests wait and max_waiting is {self._config.max_waiting}; "
                "try again when some have been served, or raise max_waiting"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises QueueFull if `max_waiting` sequences wait already. A sequence whose id is in use, or that needs more
        pages than there are, must have been refused before.
        """
        self.check_room()
        assert sequence.id not in self._sequences, f"{sequence.id} has not ended"
        assert sequence.is_waiting and sequence.block_size == self._block_size, sequence.id
        num_pages = sequence.num_lanes * len(sequence.token_ids) // self._block_size
        assert sequence.num_lanes <= self._config.num_lanes, f"{sequence.id} can never run: it needs two lanes"
        assert num_pages <= self._pool.num_pages, f"{sequence.id} can never run: it needs {num_pages} pages"
        self._sequences[sequence.id] = sequence
        insort(self._waiting, sequence, key=_order)

    def abort(self, sequence_id: str) -> bool:
        """Drop a sequence and free its lane and pages at once; False if the id is unknown or has ended.

        Between `plan` and `apply` too: its rows in flight are then ignored. Passes run in the order of their plans,
        so whoever gets the lane and the pages next writes them after those rows did.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._remove(sequence, Status.ABORTED)
        return True

    def preempt(self, sequence_id: str) -> bool:
        """Send a running sequence back to the queue before the next plan; False if it does not run.

        Its rows in flight are ignored, and it makes the same commits again.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or not sequence.is_running:
            return False
        self._preempt(sequence)
        return True

    def plan(self) -> Plan:
        """Decide the next pass: take up shared pages, find room for canvases, admit, choose rows.

        While there is work, rows are empty only if all that runs awaits the results of passes in flight, or all that
        waits lacks pages that are lent. Every plan must be applied, in order.
        """
        for sequence in self._running:
            self._adopt_prefilled(sequence)
        preempted = self._allocate_canvases()
        admitted = self._admit()
        outlooks = self.outlooks()
        has_prefilling = any(outlook.is_prefilling for outlook in outlooks)
        budget = RowBudget(
            max_rows=self._config.max_rows,
            max_prefill_rows=self._config.prefill_row_limit,
            # Decoding sequences may fill every pass. If the last pass had no prefill row this one has
            # one; not each, or two rows would never be left for a seal row and its denoise row.
            num_reserved=int(has_prefilling and not self._had_prefill_row),
            share_prefixes=self._config.share_prefixes,
            is_lockstep=self._config.batching == "lockstep",
            draft_row_limit=self._config.draft_row_limit,
        )
        rows = choose_rows(outlooks, budget, [row for rows in self._in_flight.values() for row in rows])
        is_blocked = self.has_work and not self._in_flight and not self.lending.is_in_use
        assert rows or not is_blocked, "sequences wait but none can move"
        plan = Plan(rows, tuple(admitted), tuple(preempted))
        if rows:
            self._had_prefill_row = bool(plan.prefill_rows)
        for row in rows:
            self._in_flight.setdefault(row.sequence, []).append(row)
        for row in plan.denoise_rows:
            self._join_line(row.sequence)
        return plan

    def apply(self, plan: Plan, results: Iterable[RowResult]) -> list[Change]:
        """Record what the pass did and return what changed, each sequence's changes in order.

        `results` holds one result for each denoise row that `is_in_flight`; others are ignored.
        The pass's commits come behind a CanvasStarted and before all other changes.
        """
        results = list(results)
        result_of = {result.sequence_id: result for result in results}
        assert len(result_of) == len(results), "a sequence has two results"
        live = [row for row in plan.rows if self.is_in_flight(row)]
        for row in live:
            self._land(row)
        for sequence in {row.sequence.id: row.sequence for row in live}.values():
            sequence.num_forward_passes += 1
        # Seals first: a sequence that ends in this pass leaves its sealed pages to the prefix index.
        denoised = []
        for row in live:
            if row.kind is RowKind.DRAFT:
                continue
            if row.kind not in (RowKind.DENOISE, RowKind.SHADOW):
                self._seal(row)
            elif row.block < row.sequence.block:
                # Where a block turned out to be finished, the denoise row on its way found no masks: it sealed.
                assert row.sequence.is_adaptive, f"{row.sequence.id}: a late row"
                self._seal(row)
            elif row.kind is RowKind.DENOISE:
                assert row.sequence.id in result_of, f"{row.sequence.id} has no result"
                denoised.append(row)
        return [change for row in denoised for change in self._denoise(row, result_of[row.sequence.id])]

    def is_in_flight(self, row: PlannedRow) -> bool:
        """True until the row's plan is applied, or its sequence ends or loses its lane: then it concerns nobody."""
        return any(row is other for other in self._in_flight.get(row.sequence, ()))

    def check_integrity(self) -> None:
        """Assert that pages, lanes, queues and sequences agree. Valid between any two calls."""
        self._pool.check_integrity()
        self.lending.check_integrity()
        num_holders = [0] * self._pool.num_pages
        for page_id in self.lending.page_ids:
            num_holders[page_id] += 1
        for sequence in self._running:
            check_running(self._look_ahead(sequence), self._pool, self._prefix_index, num_holders)
        for page_id, expected in enumerate(num_holders):
            assert self._pool.num_holders(page_id) == expected, f"page {page_id} has {expected} holders"
        for sequence in self._waiting:
            assert sequence.is_waiting and not sequence.lanes and not sequence.page_ids, sequence.id
        lanes = [lane for sequence in self._running for lane in sequence.lanes] + self._free_lanes
        assert sorted(lanes) == list(range(self._config.num_lanes)), lanes
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_order), "a queue is out of order"
        assert all(rows and sequence.is_running for sequence, rows in self._in_flight.items())
        assert {s.id: s for s in self._waiting + self._running} == self._sequences
        assert len(self._waiting) + len(self._running) == len(self._sequences)

    def _look_ahead(self, sequence: Sequence) -> Outlook:
        return look_ahead(sequence, self._in_flight.get(sequence, ()))

    def _land(self, row: PlannedRow) -> None:
        """The row is in flight no more."""
        rows = [other for other in self._in_flight.pop(row.sequence) if other is not row]
        if rows:
            self._in_flight[row.sequence] = rows

    def _adopt_prefilled(self, sequence: Sequence) -> None:
        """Take up pages that others have sealed since: blocks found this way need no prefill row."""
        # Not while rows of its own are on their way to write these blocks.
        is_written = any(not row.is_shadow for row in self._in_flight.get(sequence, ()))
        while sequence.is_prefilling and not is_written:
            page_id = self._prefix_index.find(sequence.prefix_key(sequence.num_sealed))
            if page_id is None:
                break
            self._exchange_page(sequence, sequence.num_sealed, page_id)
            sequence.num_sealed += 1

    def _allocate_canvases(self) -> list[Preemption]:
        """Give each new canvas its page, most important sequence first; return who was preempted for it."""
        preempted: list[Preemption] = []
        for sequence in list(self._running):
            # Sequences later in this list may have been preempted for earlier ones.
            if sequence.is_running and len(sequence.page_ids) == self._look_ahead(sequence).canvas:
                while self._may_preempt_for(sequence):
                    preempted.append(self._preempt_last())
                if sequence.lane is not None and self._pool.num_available >= sequence.num_lanes:
                    sequence.page_ids.append(self._pool.allocate())
                    if sequence.shadow is not None:
                        sequence.shadow.page_ids.append(self._pool.allocate())
        return preempted

    def _may_preempt_for(self, sequence: Sequence) -> bool:
        """True while pages lack, the sequence runs, and the one that would go loses no work if it is this one."""
        if self._pool.num_available >= sequence.num_lanes or not sequence.is_running:
            return False
        # It waits for the results of its own rows first, or it would make the same commits for ever.
        return sequence is not self._running[-1] or sequence not in self._in_flight

    def _preempt_last(self) -> Preemption:
        """Send the least important, youngest running sequence back to the queue."""
        return self._preempt(self._running[-1])

    def _preempt(self, sequence: Sequence) -> Preemption:
        """Send a running sequence back to the queue. Its sealed pages stay cached."""
        assert sequence.lane is not None
        preemption = Preemption(sequence, sequence.lane)
        self._release(sequence, Status.WAITING)
        sequence.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)
        return preemption

    def _admit(self) -> list[Admission]:
        """Give lanes to the head of the queue while there are lanes and pages for it."""
        admitted = []
        while self._has_lanes_for_head() and not self.lending.has_turn:
            sequence = self._waiting[0]
            # At first admission the blocks before the canvas are the prompt's complete ones, after a
            # preemption all finished ones.
            found = self._prefix_index.longest_match(sequence.prefix_key(b) for b in range(sequence.block))
            num_blocks = sequence.block + 1
            num_new = sequence.num_lanes * num_blocks - len(found)
            if num_new > self._pool.num_available - sum(map(self._pool.is_cached, found)):
                break
            # Hold what was found before allocating: allocation evicts cached pages.
            for page_id in found:
                self._pool.hold(page_id)
            page_ids = found + [self._pool.allocate() for _ in range(num_new)]
            lanes = [heapq.heappop(self._free_lanes) for _ in range(sequence.num_lanes)]
            sequence.take_lane(lanes[0], page_ids[:num_blocks], len(found))
            if sequence.shadow is not None:
                sequence.shadow.take_lane(lanes[1], page_ids[num_blocks:], sequence.num_committed)
            num_cached_tokens = len(found) * self._block_size
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = num_cached_tokens
            # Behind those who run already: in front, a stream of short requests could keep them from all rows.
            self._join_line(sequence)
            del self._waiting[0]
            insort(self._running, sequence, key=_order)
            admitted.append(Admission(sequence, lanes[0], num_cached_tokens, *lanes[1:]))
            self.lending.admitted()
        self.lending.hold_up(self._waiting[0] if self._has_lanes_for_head() else None)
        return admitted

    def _has_lanes_for_head(self) -> bool:
        return bool(self._waiting) and len(self._free_lanes) >= self._waiting[0].num_lanes

    def _join_line(self, sequence: Sequence) -> None:
        """Put the sequence behind all others in the line for denoise rows."""
        self._num_turns += 1
        sequence.last_turn = self._num_turns

    def _seal(self, row: PlannedRow) -> None:
        """The block's final keys and values are on its page: count it, and offer the page to others."""
        sequence, block = row.sequence, row.block
        if row.is_shadow:
            # It holds masks in place of the prompt, under this sequence's steering: nobody else can use it.
            assert sequence.shadow is not None and block == sequence.shadow.num_sealed, f"{sequence.id}: {block}"
            sequence.shadow.num_sealed += 1
            return
        assert block == sequence.num_sealed, f"{sequence.id}: block {block} seals after {sequence.num_sealed} blocks"
        assert not sequence.num_masked(block), f"{sequence.id}: block {block} seals with masks in it"
        sequence.num_sealed += 1
        if self._config.share_prefixes:
            # A cut block would not be what its key says. Only the last block can be cut, and it never seals.
            assert sequence.is_whole(block), f"{sequence.id}: block {block} is cut"
            key = sequence.prefix_key(block)
            shared = self._prefix_index.find(key)
            if shared is None:
                self._prefix_index.register(key, sequence.page_ids[block])
            else:
                # Someone sealed the same tokens first: use that page. A sequence then holds every
                # indexed page on the way to its last one, which the order of eviction counts on.
                self._exchange_page(sequence, block, shared)

    def _denoise(self, row: PlannedRow, result: RowResult) -> list[Change]:
        """Apply a denoising step with all that follows from it."""
        sequence, block = row.sequence, row.block
        changes: list[Change] = []
        canvas = sequence.canvas_range(block)
        if not sequence.has_begun_canvas:
            sequence.num_blocks += 1
            changes.append(CanvasStarted(sequence, block, canvas.start, canvas.stop))
        sequence.num_denoising_steps += max(len(result.commits), 1) if sequence.has_drafts else 1
        if not result.is_finite:
            # The cause may be on a shared page. Without this every later request with that prefix would fail.
            for page_id in sequence.page_ids:
                self._prefix_index.forget(page_id)
            return [*changes, self._finish(sequence, FinishReason.ERROR)]
        assert result.commits, f"{sequence.id}: a denoising step must commit at least one token"
        sequence.commit(result.commits)
        changes += self._go_on(sequence)
        if sequence.shadow is not None and sequence.is_running:
            sequence.shadow.follow(sequence.num_committed, sequence.block)
        return changes

    def _go_on(self, sequence: Sequence) -> list[Change]:
        """Finish the canvas and the text if no mask is left in it."""
        block, changes = sequence.block, list[Change]()
        canvas = sequence.canvas_range(block)
        if sequence.num_masked(block):
            return changes
        end = canvas.stop if sequence.end is None else sequence.end
        changes.append(CanvasFinished(sequence, block, canvas.start, end))
        if sequence.end is not None:
            changes.append(self._finish(sequence, FinishReason.STOP))
        elif sequence.is_last(block):
            # The last block is not sealed: nobody but the prefix index would gain.
            changes.append(self._finish(sequence, FinishReason.LENGTH))
        else:
            sequence.start_next_block()
        return changes

    def _finish(self, sequence: Sequence, reason: FinishReason) -> SequenceFinished:
        self._remove(sequence, Status.FINISHED)
        return SequenceFinished(sequence, reason)

    def _remove(self, sequence: Sequence, status: Status) -> None:
        """Forget a sequence for good."""
        del self._sequences[sequence.id]
        if sequence.is_running:
            self._release(sequence, status)
        else:
            self._waiting.remove(sequence)
            sequence.move_to(status)

    def _release(self, sequence: Sequence, status: Status) -> None:
        """Take a running sequence's lane and pages away."""
        self._in_flight.pop(sequence, None)
        self._running.remove(sequence)
        for lane in sequence.lanes:
            heapq.heappush(self._free_lanes, lane)
        self._pool.release_all(sequence.page_ids)
        if sequence.shadow is not None:
            self._pool.release_all(sequence.shadow.page_ids)
        sequence.leave_lane(status)

    def _exchange_page(self, sequence: Sequence, block: int, page_id: int) -> None:
        """Replace the sequence's own page of a block by another one of equal content."""
        self._pool.hold(page_id)
        self._pool.release(sequence.page_ids[block])
        sequence.page_ids[block] = page_id


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
