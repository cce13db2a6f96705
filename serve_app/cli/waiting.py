"""What is shown while a model loads: how much of its weights is read, then what else is waited for."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_MIB = 1024**2


class Waiting:
    """A bar on the terminal, gone at its end; nothing where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Else it would end with an empty line there.
            disable=not console.is_terminal,
        )
        # torch's import comes first and takes seconds.
        self._task = self._progress.add_task("starting", total=None, amount="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int) -> None:
        """Bytes of weights read and in all. After the last the engine makes its memory, and captures on a GPU."""
        amount = f"{done / _MIB:,.1f} of {total / _MIB:,.1f} MiB"
        is_last = done >= total
        self._progress.update(
            self._task, description="weights", completed=done, total=total, amount=amount, refresh=is_last
        )
        if is_last:
            # Another task, since one that had a total cannot lose it.
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task("starting the engine", total=None, amount="")
            self._progress.refresh()
