"""One replica: passes of rows, each request at its own pace.

Between two events the rows of a pass do not change, so a stretch of equal passes is one step of the simulation, however
many passes it has.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .cache import PageCache
from .workload import SimRequest

PASS_SECONDS = ((1, 0.00487), (2, 0.00541), (3, 0.0066), (4, 0.00784), (8, 0.0139), (16, 0.0263), (32, 0.052))
"""(rows, seconds of a pass) of an H200 with 256 keys a row, bfloat16, the 8B shape; see docs/performance.md. 3 rows
and 32 rows are estimates."""
MAX_ROWS = 32


def pass_table(points: Sequence[tuple[int, float]] = PASS_SECONDS) -> list[float]:
    """Seconds of a pass by rows, from 0 to MAX_ROWS."""
    table = [0.0]
    for rows in range(1, MAX_ROWS + 1):
        below, above = [p for p in points if p[0] <= rows][-1], next(p for p in points if p[0] >= rows)
        share = (rows - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        table.append(below[1] + share * (above[1] - below[1]))
    return table


@dataclass(eq=False, slots=True)
class Running:
    """A request that has a lane."""

    request: SimRequest
    num_prefill_left: int
    block: int = 0
    end_pass: int = 0
    """Number of the pass behind the block's last one, once it denoises."""


class SimReplica:
    """Lanes, pages, a queue, and the stretch of passes that runs now."""

    def __init__(self, index: int, num_lanes: int, num_pages: int, seconds: Sequence[float]) -> None:
        self.index = index
        self.num_lanes = num_lanes
        self.cache = PageCache(num_pages)
        self.waiting: deque[SimRequest] = deque()
        self.decoding: list[tuple[int, int, Running]] = []  # a heap by the end of the block
        self.prefilling: list[Running] = []
        self.ends_s: float | None = None
        """When the stretch ends; None while nothing runs."""
        self._seconds = seconds
        self._num_seals = 0
        self._next_pass = 0
        self._begun_s = 0.0
        self._num_passes = 0
        self._pass_s = 0.0
        self._num_started = 0

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def pass_at(self, now_s: float) -> int:
        """Number of the pass that runs then, or of the next one."""
        if self.ends_s is None:
            return self._next_pass
        return self._next_pass + min(int((now_s - self._begun_s) / self._pass_s), self._num_passes)

    def can_admit(self) -> bool:
        """True if the head of the queue would get a lane and pages."""
        return bool(self.waiting) and self.num_running < self.num_lanes and self.cache.can_hold(self.waiting[0])

    def add(self, request: SimRequest, now_s: float) -> bool:
        """Queue a request. True if the stretch now ends sooner, to let it in at the next pass."""
        self.waiting.append(request)
        if self.ends_s is None or not self.can_admit():
            return False
        # At the end of the pass that runs now.
        done = min(int((now_s - self._begun_s) / self._pass_s) + 1, self._num_passes)
        if done == self._num_passes:
            return False
        self._num_passes = done
        self.ends_s = self._begun_s + done * self._pass_s
        return True

    def end_stretch(self, now_s: float) -> list[Running]:
        """Count its passes, finish the blocks that end with it; returns those, requests that are over included."""
        self._next_pass += self._num_passes
        self.ends_s = None
        ended = []
        while self.decoding and self.decoding[0][0] == self._next_pass:
            running = heapq.heappop(self.decoding)[2]
            ended.append(running)
            request = running.request
            if running.block == 0:
                request.first_block_s = now_s
            running.block += 1
            if running.block == request.num_blocks:
                request.finished_s = now_s
                self.cache.give_back(request)
            else:
                # It seals in the pass that begins the next block.
                self._num_seals += 1
                self._denoise(running)
        return ended

    def begin_stretch(self, now_s: float) -> list[SimRequest]:
        """Admit who can be, and run passes until something changes. Returns those admitted."""
        admitted = []
        while self.can_admit():
            request = self.waiting.popleft()
            request.num_found_blocks = self.cache.take(request)
            admitted.append(request)
            self.prefilling.append(Running(request, request.num_prompt_blocks - request.num_found_blocks))
        if not self.num_running:
            return admitted
        num_rows = len(self.decoding) + self._num_seals
        is_single = bool(self._num_seals or self.prefilling)
        self._num_seals = 0
        num_rows += self._prefill(MAX_ROWS - num_rows)
        self._num_passes = 1 if is_single else self.decoding[0][0] - self._next_pass
        self._begun_s = now_s
        self._pass_s = self._seconds[num_rows]
        self.ends_s = now_s + self._num_passes * self._pass_s
        return admitted

    def _prefill(self, room: int) -> int:
        """Rows of prompts in the next pass, and of the canvases that ride behind their last blocks."""
        num_rows = 0
        still = []
        for running in self.prefilling:
            num_blocks = min(running.num_prefill_left, room - num_rows)
            running.num_prefill_left -= num_blocks
            num_rows += num_blocks
            if not running.num_prefill_left and num_rows < room:
                num_rows += 1
                self._denoise(running)
            else:
                still.append(running)
        self.prefilling = still
        return num_rows

    def _denoise(self, running: Running) -> None:
        self._num_started += 1
        running.end_pass = self._next_pass + running.request.num_passes(running.block)
        heapq.heappush(self.decoding, (running.end_pass, self._num_started, running))
