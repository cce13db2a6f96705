"""A scheduler driven by a pretended device that checks every pass, and the same generation written plainly.

The pretended device chooses positions and tokens as a pure function of (stream, position), so a
sequence must end with the tokens of `generate_alone` whatever happens around it. It also keeps, in
place of keys and values, the tokens that were seen when a page was written: a row that attends to
a page with anything but the final tokens of its own prefix is a fault. Of an unconditional copy it also
keeps which steering schedules had ended by then: a row that attends to a page of another time is a fault.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.config import EngineConfig
from engine.output import FinishReason
from engine.scheduling import (
    Admission,
    CanvasFinished,
    CanvasStarted,
    Change,
    Plan,
    PlannedRow,
    Preemption,
    RowKind,
    RowResult,
    Scheduler,
    Sequence,
    SequenceFinished,
    Shadow,
)
from engine.scheduling.rows import Outlook, look_ahead

MASK, EOS, PAD, END = range(4)
FIRST_WORD = 10

Content = tuple[tuple[int, ...], int]
"""What a page holds: the tokens up to its end, and of a copy's page how many steering schedules had ended."""


def draw(*parts: object) -> int:
    """A number that depends on the parts alone."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A request: what to generate, and which stream of pretended randomness decides the text."""

    id: str
    prompt: tuple[int, ...] = ()
    max_tokens: int = 4
    priority: int = 0
    tokens_per_step: int = 1
    stream: str = ""
    """Empty: its id. Two requests with one prompt and one stream write the same text."""
    end_percent: int = 0
    """How many of a hundred positions would get an end token."""
    is_adaptive: bool = False
    """A step fills as many as it likes, up to `tokens_per_step`."""
    has_drafts: bool = False
    """Every second prediction or so comes true."""
    is_guided: bool = False
    cutoffs: tuple[int, ...] = ()
    """Of a guided request: numbers of commits at which what its copy's pages hold becomes stale."""

    def order_at(self, position: int) -> int:
        return draw("order", self.stream or self.id, position)

    def token_at(self, position: int) -> int:
        number = draw("token", self.stream or self.id, position)
        return END if number % 100 < self.end_percent else FIRST_WORD + number % 90

    def steps(self, masked: Iterable[int]) -> list[int]:
        """Which of the masked positions the next denoising step fills, in commit order."""
        most = 1 if self.has_drafts else self.tokens_per_step
        masked = sorted(masked, key=self.order_at)
        num_filled = 1 + draw("number", self.stream or self.id, tuple(masked)) % most if self.is_adaptive else most
        return masked[:num_filled]


def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """The first `length` tokens of a family of prompts: all its members share their prefixes."""
    return tuple(FIRST_WORD + draw("prompt", family, i) % 90 for i in range(length))


def make_sequence(spec: Spec, *, block_size: int = 4, arrival: int = 0) -> Sequence:
    return Sequence(
        id=spec.id,
        priority=spec.priority,
        arrival=arrival,
        block_size=block_size,
        prompt_token_ids=spec.prompt,
        max_tokens=spec.max_tokens,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=PAD,
        end_token_ids=frozenset({END}),
        tokens_per_step=1 if spec.has_drafts else spec.tokens_per_step,
        is_adaptive=spec.is_adaptive or spec.has_drafts,
        has_drafts=spec.has_drafts,
        shadow=Shadow(cutoffs=spec.cutoffs) if spec.is_guided else None,
    )


def generate_alone(spec: Spec, block_size: int) -> tuple[list[int], FinishReason]:
    """The slow twin: the whole generation of one request, block by block, without any scheduling."""
    limit = len(spec.prompt) + spec.max_tokens
    text = {}
    for start in range(len(spec.prompt) // block_size * block_size, limit, block_size):
        masked = set(range(max(start, len(spec.prompt)), min(start + block_size, limit)))
        end = None
        while masked:
            for position in spec.steps(masked):
                masked.remove(position)
                text[position] = spec.token_at(position)
            ends = [p for p in text if p >= start and text[p] == END]
            if ends:
                end = min(ends)
                masked = {p for p in masked if p < end}
        if end is not None:
            return [text[p] for p in range(len(spec.prompt), end)], FinishReason.STOP
    return [text[p] for p in range(len(spec.prompt), limit)], FinishReason.LENGTH


@dataclass
class PretendedLane:
    """What a device knows of a sequence: its tokens when it came, and what it committed itself since."""

    sequence: Sequence
    is_shadow: bool = False
    token_ids: list[int] = field(init=False)
    num_committed: int = field(init=False)
    has_failed: bool = False
    """Its logits were not finite: what it does until the host learns of that concerns nobody."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.sequence.token_ids)
        self.num_committed = self.sequence.num_committed
        if self.is_shadow:
            self.token_ids[: self.sequence.prompt_length] = [MASK] * self.sequence.prompt_length

    def content(self, stop: int) -> Content:
        """What a page holds whose row has seen the positions up to `stop`."""
        cutoffs = self.sequence.shadow.cutoffs if self.is_shadow and self.sequence.shadow is not None else ()
        return tuple(self.token_ids[:stop]), sum(cutoff <= self.num_committed for cutoff in cutoffs)

    def follow(self, other: PretendedLane) -> None:
        """Take over what the sequence's own lane has committed."""
        start = self.sequence.prompt_length
        self.token_ids[start:], self.num_committed = other.token_ids[start:], other.num_committed
        self.has_failed = other.has_failed

    def denoise(self, row: PlannedRow, spec: Spec) -> list[tuple[int, int]]:
        """Commit as the spec says; right of the leftmost end there is nothing to fill."""
        canvas = self.sequence.canvas_range(row.block)
        positions = spec.steps(p for p in canvas if self.token_ids[p] == MASK)
        commits = [(p, spec.token_at(p)) for p in positions]
        for position, token_id in commits:
            self.token_ids[position] = token_id
        self.num_committed += len(commits)
        ends = [p for p in canvas if self.token_ids[p] == END]
        if ends:
            self.token_ids[min(ends) + 1 : canvas.stop] = [EOS] * (canvas.stop - min(ends) - 1)
        return commits


class PretendedDevice:
    """Runs plans on pages that remember the tokens they were written for."""

    def __init__(self) -> None:
        self.written: dict[int, Content] = {}
        self.lanes: dict[int, PretendedLane] = {}
        self.fail_next: set[str] = set()

    def run(self, plan: Plan, specs: dict[str, Spec]) -> list[RowResult]:
        for preemption in plan.preempted:
            assert self.lanes.pop(preemption.lane).sequence is preemption.sequence
        gone = {preemption.sequence for preemption in plan.preempted}
        self.lanes = {
            lane: state
            for lane, state in self.lanes.items()
            if lane in state.sequence.lanes and state.sequence not in gone
        }
        for admission in plan.admitted:
            for lane, is_shadow in ((admission.lane, False), (admission.shadow_lane, True)):
                if lane is not None:
                    assert lane not in self.lanes, "a lane was given twice"
                    self.lanes[lane] = PretendedLane(admission.sequence, is_shadow)
        targets = [row.page_ids[-1] for row in plan.rows if row.kind is not RowKind.DRAFT]
        assert len(set(targets)) == len(targets), "two rows write one page"
        for row in plan.rows:
            if row.kind is not RowKind.DRAFT:
                self._write(row)
        # Only now does any row attend.
        for row in plan.rows:
            self._attend(row)
        drafted = {row.sequence.id for row in plan.draft_rows}
        return [self._result(row, specs[row.sequence.id], drafted) for row in plan.denoise_rows]

    def _write(self, row: PlannedRow) -> None:
        lane = self.lanes[row.lane]
        assert row.is_shadow == lane.is_shadow
        content = lane.content(row.key_length)
        seen = content[0][row.sequence.prompt_length if row.is_shadow else 0 :]
        # A denoise row may come too late and find nothing to fill.
        assert MASK not in seen or row.kind in (RowKind.DENOISE, RowKind.SHADOW) or lane.has_failed
        assert PAD not in seen
        self.written[row.page_ids[-1]] = content

    def _attend(self, row: PlannedRow) -> None:
        sequence, lane = row.sequence, self.lanes[row.lane]
        assert lane.sequence is sequence
        assert len(row.page_ids) == row.block + 1
        for block, page_id in enumerate(() if lane.has_failed else row.page_ids[:-1]):
            final = lane.content((block + 1) * sequence.block_size)
            assert self.written.get(page_id) == final, f"{sequence.id}: page {page_id} is not that of block {block}"

    def _result(self, row: PlannedRow, spec: Spec, drafted: set[str]) -> RowResult:
        if spec.id in self.fail_next:
            self.fail_next.remove(spec.id)
            self.lanes[row.lane].has_failed = True
            self._tell_shadow(row)
            return RowResult(spec.id, (), is_finite=False)
        lane = self.lanes[row.lane]
        commits = lane.denoise(row, spec)
        self._tell_shadow(row)
        assert len(commits) <= row.num_commits or lane.has_failed
        has_ended = any(token_id == END for _, token_id in commits)
        if spec.id in drafted and commits and not has_ended and draw("accepted", spec.id, commits) % 2:
            commits += lane.denoise(row, spec)
        return RowResult(spec.id, tuple(commits))

    def _tell_shadow(self, row: PlannedRow) -> None:
        assert (row.shadow_lane is None) == (row.sequence.shadow is None)
        if row.shadow_lane is not None:
            self.lanes[row.shadow_lane].follow(self.lanes[row.lane])


class Driver:
    """A scheduler and its device; every step checks what must hold at every step."""

    def __init__(self, *, num_pages: int, block_size: int = 4, is_late: bool = False, **config: object) -> None:
        """`is_late`: results of a pass come when the next one has been planned and run."""
        self.config = EngineConfig(**config)
        self.is_late = is_late
        self.in_flight: deque[tuple[Plan, list[RowResult]]] = deque()
        self.block_size = block_size
        self.num_pages = num_pages
        self.scheduler = Scheduler(self.config, block_size, num_pages)
        self.device = PretendedDevice()
        self.specs: dict[str, Spec] = {}
        self.sequences: dict[str, Sequence] = {}
        self.changes: dict[str, list[Change]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.computed: dict[str, list[tuple[int, int]]] = {}
        """(residence, block) of every prefill and seal row."""
        self.rewritten: dict[tuple[str, int, int], list[int]] = {}
        """Blocks of the copy that had such rows, by sequence, residence and cutoffs passed."""
        self.num_passes = 0
        self.waited: Counter[str] = Counter()
        """Passes since a sequence last had a denoise row, while it could have had one."""
        self.num_passes_without_prefill = 0
        self.counts: Counter[str] = Counter()

    def add(self, *specs: Spec) -> None:
        for spec in specs:
            sequence = make_sequence(spec, block_size=self.block_size, arrival=len(self.sequences))
            self.scheduler.add(sequence)
            self.sequences[spec.id] = sequence
            self.specs[spec.id] = spec
            self.changes[spec.id] = []
            self.computed[spec.id] = []
            self.check()

    def abort(self, sequence_id: str) -> bool:
        was_live = self.scheduler.abort(sequence_id)
        self.check()
        return was_live

    def preempt(self, sequence_id: str) -> bool:
        lanes = self.sequences[sequence_id].lanes
        was_running = self.scheduler.preempt(sequence_id)
        assert was_running == bool(lanes)
        for lane in lanes:
            self.device.lanes.pop(lane, None)
        self.counts["preempted"] += was_running
        self.check()
        return was_running

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.check()
        self.check_plan(plan)
        self.run(plan)
        while len(self.in_flight) > (1 if self.is_late and plan.rows else 0):
            self.land()
        return plan

    def run(self, plan: Plan) -> None:
        self.in_flight.append((plan, self.device.run(plan, self.specs)))
        self.num_passes += bool(plan.rows)

    def land(self) -> None:
        """Apply the oldest pass in flight."""
        changes = self.scheduler.apply(*self.in_flight.popleft())
        self.check()
        for change in changes:
            self.record(change)

    def finish(self, max_passes: int = 10_000) -> None:
        """Step until nothing is left; every request must end."""
        for _ in range(max_passes):
            if not self.scheduler.has_work:
                break
            self.step()
        # What nobody waits for any more.
        while self.in_flight:
            self.land()
        assert not self.scheduler.has_work, f"work is left after {max_passes} passes"
        assert self.scheduler.num_held_pages == 0
        assert self.scheduler.num_free_lanes == self.config.num_lanes

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        pages = scheduler.num_free_pages + scheduler.num_cached_pages + scheduler.num_held_pages
        assert pages == self.num_pages
        num_used = sum(len(sequence.lanes) for sequence in self.sequences.values())
        assert num_used + scheduler.num_free_lanes == self.config.num_lanes

    def check_plan(self, plan: Plan) -> None:
        assert bool(plan.rows) == self.scheduler.has_work or self.in_flight or self.scheduler.lending.is_in_use
        assert len(plan.rows) <= self.config.max_rows
        assert len(plan.prefill_rows) <= self.config.prefill_row_limit
        deciding = plan.denoise_rows + plan.draft_rows + plan.shadow_rows
        assert plan.rows == deciding + plan.seal_rows + plan.prefill_rows
        assert len(plan.rows) <= self.config.draft_row_limit or not plan.draft_rows
        denoised = {(row.sequence.id, row.block) for row in plan.denoise_rows}
        assert len(denoised) == len(plan.denoise_rows)
        for row in plan.draft_rows:
            assert (row.sequence.id, row.block) in denoised, "a draft rides alone"
        self.counts["drafts"] += len(plan.draft_rows)
        guided = {(row.sequence.id, row.block, row.shadow_lane) for row in plan.denoise_rows if row.sequence.shadow}
        assert guided == {(row.sequence.id, row.block, row.lane) for row in plan.shadow_rows}
        for row in plan.seal_rows:
            is_split = row.sequence.shadow is not None and self.config.max_rows < 4
            assert is_split or (row.sequence.id, row.block + 1) in denoised, "a seal row rides alone"
        for row in plan.seal_rows + plan.prefill_rows:
            sequence, shadow = row.sequence, row.sequence.shadow
            if shadow is not None and row.is_shadow:
                # As for its sequence, and once more, from the first on, whenever a schedule has ended.
                key = (sequence.id, sequence.num_preemptions, shadow._num_passed)
                self.counts["rewritten"] += any(k[:2] == key[:2] and k != key for k in self.rewritten)
                blocks = self.rewritten.setdefault(key, [])
                assert not blocks or row.block > blocks[-1]
                blocks.append(row.block)
                continue
            # A block is computed once per residence, and in order.
            computed = self.computed[sequence.id]
            before = [b for residence, b in computed if residence == sequence.num_preemptions]
            assert not before or row.block > before[-1]
            computed.append((sequence.num_preemptions, row.block))
        if self.config.batching == "lockstep":
            self.check_step(plan)
        else:
            self.check_turns(plan)
        self.counts["preempted"] += len(plan.preempted)
        self.counts["admitted"] += len(plan.admitted)
        self.counts["cached_tokens"] += sum(admission.num_cached_tokens for admission in plan.admitted)
        self.counts["mixed"] += len({row.kind for row in plan.rows} - {RowKind.DRAFT, RowKind.SHADOW}) == 3

    def outlooks(self) -> list[Outlook]:
        """Where the running sequences will stand after this plan."""
        scheduler = self.scheduler
        return [
            look_ahead(sequence, scheduler._in_flight.get(sequence, ()))
            for sequence in self.sequences.values()
            if sequence.is_running
        ]

    def check_step(self, plan: Plan) -> None:
        """In lockstep, canvases begin together."""
        begin = {row.sequence.id for row in plan.denoise_rows if not row.sequence.has_begun_canvas}
        begin |= {row.sequence.id for row in plan.denoise_rows if row.block != row.sequence.block}
        begin -= {row.sequence.id for plan, _ in self.in_flight for row in plan.denoise_rows if row.sequence.is_running}
        amid = [row for row in plan.denoise_rows if row.sequence.has_begun_canvas and row.block == row.sequence.block]
        assert not (begin and [row for row in amid if row.sequence.id not in begin])

    def check_turns(self, plan: Plan) -> None:
        """Nobody waits long for a row: neither prefill nor, within a priority, any decoding sequence."""
        running = [s for s in self.sequences.values() if s.is_running]
        served = {row.sequence.id for row in plan.denoise_rows}
        most_important = min((s.priority for s in running), default=0)
        for sequence in running:
            is_shadow_prefilling = sequence.shadow is not None and sequence.shadow.is_prefilling
            is_passed_over = sequence.id not in served and not sequence.is_prefilling and not is_shadow_prefilling
            may_wait = sequence.priority > most_important
            self.waited[sequence.id] = self.waited[sequence.id] + 1 if is_passed_over and not may_wait else 0
            # Two rows serve anyone, and every second pass has all rows for decoding sequences. Whose last commits are
            # in flight waits for them.
            longest = 2 * -(-self.config.num_lanes // (self.config.max_rows // 2)) + self.is_late
            if any(other.shadow is not None for other in running):
                # Four rows serve anyone, or two passes of fewer; and schedules that may end are waited for.
                longest = 4 * -(-self.config.num_lanes // max(self.config.max_rows // 4, 1)) + 2
            assert self.waited[sequence.id] <= longest, f"{sequence.id} waited {self.waited[sequence.id]} passes"
        # A block that someone writes is taken over once its results are in, so needs no row.
        in_flight = [row for rows in self.scheduler._in_flight.values() for row in rows]
        kinds = (RowKind.SEAL, RowKind.PREFILL)
        writing = [row for row in in_flight if row.kind in kinds and row.block < row.sequence.block]
        keys = {row.sequence.prefix_key(row.block) for row in writing if not row.is_shadow}

        def wants_row(outlook: Outlook) -> bool:
            sequence, num_sealed = outlook.sequence, outlook.num_sealed
            num_own = max(sequence.num_prefill_blocks - num_sealed, 0)
            return outlook.num_to_prefill > num_own or (num_own > 0 and sequence.prefix_key(num_sealed) not in keys)

        wanting = [outlook for outlook in self.outlooks() if wants_row(outlook)]
        is_starved = bool(wanting) and bool(plan.rows) and not plan.prefill_rows
        self.num_passes_without_prefill = self.num_passes_without_prefill + 1 if is_starved else 0
        assert self.num_passes_without_prefill <= 1

    def record(self, change: Change) -> None:
        sequence = change.sequence
        self.changes[sequence.id].append(change)
        if isinstance(change, SequenceFinished):
            self.reasons[sequence.id] = change.reason
            if change.reason is not FinishReason.ERROR:
                self.check_finished(sequence)

    def check_finished(self, sequence: Sequence) -> None:
        """The text, the events and the counts of a sequence that ended by itself."""
        spec = self.specs[sequence.id]
        text, reason = generate_alone(spec, self.block_size)
        assert sequence.text_token_ids == text
        assert self.reasons[sequence.id] == reason
        assert sequence.token_ids[: sequence.prompt_length] == list(spec.prompt)
        stop = sequence.limit if sequence.end is None else sequence.end
        blocks = range(sequence.first_block, sequence.block + 1)
        expected: list[Change] = []
        for block in blocks:
            canvas = sequence.canvas_range(block)
            expected.append(CanvasStarted(sequence, block, canvas.start, canvas.stop))
            expected.append(CanvasFinished(sequence, block, canvas.start, min(canvas.stop, stop)))
        assert self.changes[sequence.id] == expected + [SequenceFinished(sequence, reason)]
        assert sequence.num_blocks == len(blocks)
        if reason is FinishReason.LENGTH:
            assert sequence.num_committed == spec.max_tokens
        assert sequence.num_forward_passes <= self.num_passes
        if sequence.has_drafts:
            assert sequence.num_denoising_steps == sequence.num_committed
        else:
            assert sequence.num_denoising_steps <= sequence.num_forward_passes


def rows_of(plan: Plan) -> list[tuple[str, str, int]]:
    """(kind, sequence id, block) of each row."""
    return [(row.kind.name, row.sequence.id, row.block) for row in plan.rows]


def ids(items: Iterable[PlannedRow | Admission | Preemption | Change]) -> list[str]:
    return [item.sequence.id for item in items]
