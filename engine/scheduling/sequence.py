"""One request's mutable record: tokens, status, sealed length, page ids.

Knows the rules of one sequence: the block grid, what a commit and an end token do. Must not know
other sequences, pools or budgets: the scheduler moves it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

from .prefix_index import ROOT_KEY, prefix_key
from .shadow import Shadow


class Status(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    """For a lane, for the first time or after a preemption."""
    RUNNING = enum.auto()
    """It has a lane and pages."""
    FINISHED = enum.auto()
    ABORTED = enum.auto()


LEGAL_MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.ABORTED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED, Status.ABORTED}),
    Status.FINISHED: frozenset(),
    Status.ABORTED: frozenset(),
}


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """The engine's record of one request. Two sequences are equal only if they are the same object."""

    id: str
    priority: int = 0
    """Smaller is served first and preempted last."""
    arrival: int
    """Order of arrival, unique: earlier is served first within a priority."""
    block_size: int
    """C: positions in a block, and in a page."""
    prompt_token_ids: InitVar[Iterable[int]]
    max_tokens: InitVar[int]
    mask_token_id: int
    eos_token_id: int
    """Fills the canvas right of an end token."""
    pad_token_id: int
    """Stands at positions that do not exist."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text where they are committed."""
    tokens_per_step: int = 1
    """Most commits of a denoising step."""
    is_adaptive: bool = False
    """A step commits as many as its confidences allow, at least one; else `tokens_per_step`, or all that is left."""

    has_drafts: bool = False
    """A draft row may add a commit to a step's one; each is then counted as a denoising step. Needs is_adaptive."""
    shadow: Shadow | None = None
    """The unconditional copy of a guided sequence."""

    prompt_length: int = field(init=False)
    limit: int = field(init=False)
    """prompt_length + max_tokens: positions from here on do not exist."""
    token_ids: list[int] = field(init=False)
    """`limit` rounded up to a multiple of C: prompt, commits, mask where nothing is committed, pad past limit."""
    status: Status = field(init=False, default=Status.WAITING)
    block: int = field(init=False)
    """The canvas: blocks before it are finished."""
    end: int | None = field(init=False, default=None)
    """Position of the end token, in the canvas."""
    num_committed: int = field(init=False, default=0)
    """Tokens committed in all, those right of the end included."""
    num_forward_passes: int = field(init=False, default=0)
    """Passes in which the sequence had a row."""
    num_denoising_steps: int = field(init=False, default=0)
    num_blocks: int = field(init=False, default=0)
    """Canvases that have had a denoising step."""
    num_preemptions: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    """Prompt tokens whose pages came from the prefix index at first admission."""

    lane: int | None = field(init=False, default=None)
    page_ids: list[int] = field(init=False, default_factory=list)
    """Page table: while running, blocks 0 to `block`; the canvas's page comes with the plan of its first pass."""
    num_sealed: int = field(init=False, default=0)
    """Leading blocks whose final keys and values are on their pages."""
    num_prefill_blocks: int = field(init=False, default=0)
    """Blocks that were finished when the lane was given: these are prefilled, later ones sealed."""
    last_turn: int = field(init=False, default=0)
    """Place in the line for denoise rows: smaller goes first. Given at admission and anew with each row."""
    _prefix_keys: list[bytes] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self, prompt_token_ids: Iterable[int], max_tokens: int) -> None:
        prompt = list(prompt_token_ids)
        assert max_tokens >= 1 and self.block_size >= 1 and self.tokens_per_step >= 1, self.id
        assert not self.has_drafts or (self.is_adaptive and self.tokens_per_step == 1 and not self.shadow), self.id
        assert self.mask_token_id not in self.end_token_ids, f"{self.id}: the mask token cannot end a text"
        self.prompt_length = len(prompt)
        self.limit = self.prompt_length + max_tokens
        self.block = self.first_block
        num_absent = -self.limit % self.block_size
        self.token_ids = prompt + [self.mask_token_id] * max_tokens + [self.pad_token_id] * num_absent

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of service: important first, then by arrival."""
        return self.priority, self.arrival

    @property
    def is_waiting(self) -> bool:
        """True while it waits for a lane."""
        return self.status is Status.WAITING

    @property
    def is_running(self) -> bool:
        """True while it has a lane."""
        return self.status is Status.RUNNING

    @property
    def is_prefilling(self) -> bool:
        """True while blocks finished before this lane was given are not on their pages yet."""
        return self.is_running and self.num_sealed < self.num_prefill_blocks

    @property
    def num_lanes(self) -> int:
        """Lanes that it runs on, each with a page table of its own."""
        return 1 if self.shadow is None else 2

    @property
    def lanes(self) -> list[int]:
        """Those that it has."""
        lanes = [self.lane, None if self.shadow is None else self.shadow.lane]
        return [lane for lane in lanes if lane is not None]

    @property
    def first_block(self) -> int:
        """The first canvas: the block that holds the first position past the prompt."""
        return self.prompt_length // self.block_size

    @property
    def has_begun_canvas(self) -> bool:
        """True once the canvas has had a denoising step."""
        return self.num_blocks > self.block - self.first_block

    @property
    def text_token_ids(self) -> list[int]:
        """Generated tokens that are final: up to, and without, the end token or the first masked position."""
        stop = self.limit if self.end is None else self.end
        text = self.token_ids[self.prompt_length : stop]
        return text[: text.index(self.mask_token_id)] if self.mask_token_id in text else text

    @property
    def unconditional_token_ids(self) -> list[int]:
        """`token_ids` as a copy that knows nothing of the prompt has them: masks stand in its place."""
        return [self.mask_token_id] * self.prompt_length + self.token_ids[self.prompt_length :]

    def block_range(self, block: int) -> range:
        """Positions of the block that exist."""
        return range(block * self.block_size, self.key_length(block))

    def canvas_range(self, block: int) -> range:
        """Positions of the block that exist and are not the prompt's."""
        return range(max(block * self.block_size, self.prompt_length), self.key_length(block))

    def key_length(self, block: int) -> int:
        """Positions that a row of the block attends to: its own last tile is cut at the limit."""
        return min((block + 1) * self.block_size, self.limit)

    def block_token_ids(self, block: int) -> list[int]:
        """The block's C token ids, pad at positions that do not exist."""
        return self.token_ids[block * self.block_size : (block + 1) * self.block_size]

    def masked_positions(self, block: int) -> list[int]:
        """Positions of the block that are still to be filled, ascending."""
        # The prompt's positions are fixed whatever they hold.
        return [p for p in self.canvas_range(block) if self.token_ids[p] == self.mask_token_id]

    def num_masked(self, block: int) -> int:
        """How many positions of the block are still to be filled."""
        canvas = self.canvas_range(block)
        return self.token_ids[canvas.start : canvas.stop].count(self.mask_token_id)

    def is_whole(self, block: int) -> bool:
        """True if all C positions of the block exist."""
        return (block + 1) * self.block_size <= self.limit

    def is_last(self, block: int) -> bool:
        """True if the block holds the last position."""
        return self.limit - 1 in self.block_range(block)

    def prefix_key(self, block: int) -> bytes:
        """Key of all tokens up to the end of a finished block."""
        assert block < self.block, f"{self.id}: block {block} is not finished"
        # A finished block never changes, so its key is computed once.
        for b in range(len(self._prefix_keys), block + 1):
            parent = self._prefix_keys[b - 1] if b else ROOT_KEY
            self._prefix_keys.append(prefix_key(parent, self.block_token_ids(b)))
        return self._prefix_keys[block]

    def move_to(self, status: Status) -> None:
        """Change the status. Nothing else does."""
        assert status in LEGAL_MOVES[self.status], f"{self.id}: {self.status.name} -> {status.name}"
        self.status = status

    def take_lane(self, lane: int, page_ids: list[int], num_sealed: int) -> None:
        """Start to run on a lane, with pages for every block up to the canvas, the first ones sealed."""
        assert num_sealed <= self.block and len(page_ids) == self.block + 1, f"{self.id}: {len(page_ids)} pages"
        self.move_to(Status.RUNNING)
        self.lane = lane
        self.page_ids = page_ids
        self.num_sealed = num_sealed
        self.num_prefill_blocks = self.block

    def leave_lane(self, status: Status) -> None:
        """Stop running. Tokens and counts stay, so that a preempted sequence goes on where it was."""
        self.move_to(status)
        self.lane = None
        self.page_ids = []
        self.num_sealed = 0
        self.num_prefill_blocks = 0
        if self.shadow is not None:
            self.shadow.leave_lane()

    def commit(self, commits: Iterable[tuple[int, int]]) -> None:
        """Apply the commits of one denoising step, then the end rule.

        The leftmost end token ends the text. What lies right of it in the canvas becomes the
        end-of-text id, committed or not: it stays attended and is never masked again. What lies left
        of it is still to be filled, and an end token found there moves the end to the left.
        """
        canvas = self.canvas_range(self.block)
        for position, token_id in commits:
            assert position in canvas, f"{self.id}: commit at {position}, canvas is {canvas}"
            assert self.token_ids[position] == self.mask_token_id, f"{self.id}: {position} is committed twice"
            assert token_id != self.mask_token_id, f"{self.id}: the mask token was committed at {position}"
            self.token_ids[position] = token_id
            self.num_committed += 1
            if token_id in self.end_token_ids and (self.end is None or position < self.end):
                self.end = position
        if self.end is not None:
            self.token_ids[self.end + 1 : canvas.stop] = [self.eos_token_id] * (canvas.stop - self.end - 1)

    def start_next_block(self) -> None:
        """Move the canvas on by one block."""
        assert self.end is None and not self.is_last(self.block), f"{self.id}: the text has ended"
        assert not self.num_masked(self.block), f"{self.id}: block {self.block} is not finished"
        self.block += 1
