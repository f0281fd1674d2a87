"""Chats out of parquet files, in an order that is a function of (seed, epoch) and a position that is one number.

Every rank builds the same global batches and takes its own part of them, so neither order nor position depends on the number of ranks.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from mfsdp_cli.data.chat import ChatError, ChatTokenizer, RowFault, encode_row
from mfsdp_cli.data.rows import ParquetRows, check_chats
from mfsdp_cli.errors import MfsdpError, Problem
from mfsdp_cli.types import Sample

CACHE_TOKENS = 50_000_000  # about 250 MB a process; rows beyond are rendered again when their turn comes


@dataclass(frozen=True)
class DatasetCheck:
    """What a pass over rows found: faulty rows, and totals over the good ones. `merge_checks` adds up those of several ranks."""

    faults: tuple[RowFault, ...] = ()
    num_rows: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    num_truncated: int = 0
    num_straddling: int = 0
    longest: int = 0


def merge_checks(checks: list[DatasetCheck]) -> DatasetCheck:
    faults = tuple(sorted((fault for check in checks for fault in check.faults), key=lambda fault: fault.row))
    sums = {f.name: sum(getattr(check, f.name) for check in checks) for f in fields(DatasetCheck) if f.name.startswith("num_")}
    return DatasetCheck(faults=faults, longest=max(check.longest for check in checks), **sums)


class ChatDataset:
    """Rows of parquet files, one after the other, each rendered when first asked for.

    files         parquet files, each with the column `messages_key`: list of {role, content}
    chat          share one among data sets of one tokenizer: it holds the lock that makes it safe to use in two threads
    max_length    tokens; truncation error | left | right
    max_samples   only the first N rows; -1: all
    Raises MfsdpError naming every file that cannot be read or has no such column.
    """

    def __init__(self, files: list[str], messages_key: str, chat: ChatTokenizer, max_length: int, truncation: str, max_samples: int = -1):
        self.chat, self.max_length, self.truncation, self.messages_key = chat, max_length, truncation, messages_key
        self.rows = ParquetRows(files, {messages_key: check_chats}, "data.messages_key", max_samples)
        self._cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """"FILE row N", N from 0 in that file."""
        return self.rows.where(row)

    def messages(self, row: int) -> list[dict]:
        return self.rows[row][self.messages_key]

    def sample(self, row: int) -> Sample:
        """Raises MfsdpError for a row that cannot be trained on."""
        if row not in self._cache:
            try:
                return self._encode(row)[0]
            except ChatError as error:
                raise MfsdpError(self.rows.problem(RowFault(row, str(error), error.fix))) from error
        input_ids, loss_mask = self._cache[row]
        return Sample(input_ids.astype(np.int64), loss_mask, row)

    def check(self, rank: int = 0, world: int = 1) -> DatasetCheck:
        """Render rows rank, rank + world, …: no faulty row is left to be found in the middle of a run. Rows rendered here are kept."""
        faults, counts = [], np.zeros(5, dtype=np.int64)
        longest = 0
        for row in range(rank, len(self), world):
            try:
                sample, truncated, straddling = self._encode(row)
            except ChatError as error:
                faults.append(RowFault(row, str(error), error.fix))
                continue
            counts += (1, sample.num_tokens, sample.num_targets, truncated, straddling)
            longest = max(longest, sample.num_tokens)
        return DatasetCheck(tuple(faults), *counts.tolist(), longest)

    def problems(self, check: DatasetCheck) -> list[Problem]:
        """One problem each for the first 20 faulty rows, and one that counts and numbers the rest."""
        return self.rows.problems(check.faults)

    def _encode(self, row: int) -> tuple[Sample, bool, int]:
        encoded = encode_row(self.chat, row, self.messages(row), self.max_length, self.truncation)
        sample = encoded[0]
        if row not in self._cache and self._cached_tokens + sample.num_tokens <= CACHE_TOKENS:
            self._cache[row] = (sample.input_ids.astype(np.int32), sample.loss_mask.copy())
            self._cached_tokens += sample.num_tokens
        return encoded


# ---------------------------------------------------------------- order and position


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [num_rows], read-only: the order of an epoch. From PCG64's raw stream, which numpy keeps the same in all its versions."""
    if shuffle:
        order = np.argsort(np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows), kind="stable")
    else:
        order = np.arange(num_rows)
    order.setflags(write=False)
    return order


def batch_rows(num_rows: int, batch_size: int, seed: int, shuffle: bool, samples_consumed: int) -> np.ndarray:
    """int64 [batch_size], the rows of the global batch after `samples_consumed`. An epoch has num_rows // batch_size batches."""
    epoch, offset = divmod(samples_consumed, num_rows // batch_size * batch_size)
    return epoch_order(num_rows, seed, epoch, shuffle)[offset:offset + batch_size]


class Samples(Protocol):
    """What a stream draws from: a `ChatDataset`, or `prompts.PromptDataset`."""

    def __len__(self) -> int: ...

    def sample(self, row: int) -> Any: ...


class BatchStream:
    """Endless iterator of global batches (list of samples), epoch after epoch; one batch is prepared ahead in a background thread.

    samples_consumed  the whole state: a stream that starts from it goes on exactly where the other stood. A batch counts when handed out
    num_dropped       rows of an epoch that fill no batch and are left out of it
    Raises MfsdpError if the rows fill no batch, or samples_consumed is not a number of whole batches; what goes wrong in the
    thread is raised by the next batch.
    """

    def __init__(self, dataset: Samples, batch_size: int, seed: int, shuffle: bool, samples_consumed: int = 0):
        if len(dataset) < batch_size:
            why = f"there are only {len(dataset)} rows: no batch would be full"
            raise MfsdpError(Problem("data.train_batch_size", str(batch_size), why, f"use at most {len(dataset)}, or more data"))
        if samples_consumed % batch_size:
            why = f"the run stands after {samples_consumed} rows, which is no number of whole batches of {batch_size}"
            raise MfsdpError(Problem("data.train_batch_size", str(batch_size), why, "resume with the batch size that the run began with"))
        self.dataset, self.batch_size, self.seed, self.shuffle = dataset, batch_size, seed, shuffle
        self.samples_consumed = samples_consumed
        self.num_dropped = len(dataset) % batch_size
        self._ahead: Future | None = None
        self._thread: threading.Thread | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self.samples_consumed // (len(self.dataset) - self.num_dropped)

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> list:
        if self._ahead is None:
            self._prefetch()
        batch = self._ahead.result()
        self.samples_consumed += self.batch_size
        self._prefetch()
        return batch

    def close(self) -> None:
        """Wait for the thread; the batch it prepared is forgotten, and was never counted."""
        if self._thread:
            self._thread.join()
        self._ahead = self._thread = None

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _prefetch(self) -> None:
        rows = batch_rows(len(self.dataset), self.batch_size, self.seed, self.shuffle, self.samples_consumed).tolist()
        self._ahead = Future()
        self._thread = threading.Thread(target=self._load, args=(rows, self._ahead), daemon=True, name="mfsdp-batch")
        self._thread.start()

    def _load(self, rows: list[int], ahead: Future) -> None:
        try:
            ahead.set_result([self.dataset.sample(row) for row in rows])
        except BaseException as error:
            ahead.set_exception(error)
