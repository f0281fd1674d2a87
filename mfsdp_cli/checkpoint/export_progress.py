"""What an export says while it runs, on the terminal that the front end was started from."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from mfsdp_cli.output import use_color

INTERVAL_S = 5.0


class Progress:
    """Remarks, and how many tensors and bytes are written: a bar on a terminal, else a line every few seconds."""

    def __init__(self, stream: TextIO = sys.stderr, quiet: bool = False, no_color: bool = False, clock=time.monotonic):
        self.stream, self.quiet, self.no_color, self.clock = stream, quiet, no_color, clock
        self.started = self.last_shown = clock()
        self.bar = None

    def say(self, text: str) -> None:
        if not self.quiet:
            self.stop()
            print(text, file=self.stream, flush=True)

    def advance(self, tensors: int, num_tensors: int, done_bytes: int, num_bytes: int) -> None:
        if self.quiet:
            return
        sizes = f"{done_bytes / 1e9:.2f} of {num_bytes / 1e9:.2f} GB"
        if self.stream.isatty() and os.environ.get("TERM") != "dumb":
            self._move_bar(tensors, num_tensors, done_bytes, num_bytes, sizes)
        elif self.clock() - self.last_shown >= INTERVAL_S or tensors == num_tensors:
            self.last_shown = self.clock()
            print(f"{tensors}/{num_tensors} tensors, {sizes}, {self.last_shown - self.started:.0f} s", file=self.stream, flush=True)

    def _move_bar(self, tensors: int, num_tensors: int, done_bytes: int, num_bytes: int, sizes: str) -> None:
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            screen = Console(file=self.stream, no_color=not use_color(self.stream, self.no_color))
            self.bar = Bar(BarColumn(24), TextColumn("{task.fields[count]} tensors, {task.fields[sizes]}", markup=False), TimeElapsedColumn(),
                           TextColumn("left"), TimeRemainingColumn(), console=screen, transient=True)
            self.bar.add_task("", total=num_bytes, count="", sizes="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done_bytes, total=num_bytes, count=f"{tensors}/{num_tensors}", sizes=sizes)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
