"""Rows of parquet files, their columns checked, and how the faulty ones among them are told."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np

from mfsdp_cli.data.chat import RowFault
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

MAX_LISTED = 20
MAX_NUMBERS = 200


class ParquetRows:
    """Some columns of parquet files, row after row and file after file. Values become Python objects when a row is asked for.

    columns      column -> check(column, arrow type), which returns what is wrong with the type, or ""
    setting      the setting that names the column of chats, for messages
    max_samples  only the first N rows; -1: all
    optional     columns that a file may lack
    Raises MfsdpError naming every file that cannot be read and every column that is missing or wrong.
    """

    def __init__(self, files: list[str], columns: dict[str, Callable], setting: str, max_samples: int = -1, optional: tuple[str, ...] = ()):
        self.files, self.tables, problems = list(files), [], []
        for path in self.files:
            table, wrong = read_columns(path, columns, setting, optional)
            self.tables.append(table)
            problems += wrong
        if problems:
            raise MfsdpError(problems)
        self._ends = np.cumsum([len(table) for table in self.tables]).tolist()
        total = self._ends[-1] if self._ends else 0
        self._num_rows = total if max_samples < 0 else min(total, max_samples)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> dict:
        """Column -> value; a column that the file lacks is left out."""
        file, at = self._place(row)
        table = self.tables[file]
        return {name: table.column(name)[at].as_py() for name in table.column_names}

    def where(self, row: int) -> str:
        """"FILE row N", N from 0 in that file."""
        file, at = self._place(row)
        return f"{self.files[file]} row {at}"

    def problems(self, faults: tuple[RowFault, ...]) -> list[Problem]:
        """One problem each for the first 20 faulty rows, and one that counts and numbers the rest."""
        told = [self.problem(fault) for fault in faults[:MAX_LISTED]]
        rest = faults[MAX_LISTED:]
        if rest:
            numbers = ", ".join(str(fault.row) for fault in rest[:MAX_NUMBERS]) + (", …" if len(rest) > MAX_NUMBERS else "")
            why = f"{len(faults)} of {len(self)} rows cannot be trained on; those not listed, numbered through all files: {numbers}"
            told.append(Problem("rows", "", why, "see those above", code=BAD_INPUT))
        return told

    def problem(self, fault: RowFault) -> Problem:
        return Problem(self.where(fault.row), "", fault.reason, fault.fix, code=BAD_INPUT)

    def _place(self, row: int) -> tuple[int, int]:
        assert 0 <= row < self._num_rows, row
        file = bisect.bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def read_columns(path: str, columns: dict[str, Callable], setting: str, optional: tuple[str, ...]):
    """(pyarrow Table of those columns, problems); the table is null when there are any."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def problem(found: str, why: str, fix: str = "prepare the file with mfsdp prep-data") -> Problem:
        return Problem("data", found, why, fix, where=str(path), code=BAD_INPUT)

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        return None, [problem(str(path), f"not a readable parquet file: {error}", "give files that mfsdp prep-data wrote")]
    present = [name for name in columns if name in schema.names]
    problems = [problem(name, f"no such column; there are {', '.join(schema.names)}", f"use the files of mfsdp prep-data, or set {setting}")
                for name in columns if name not in present and name not in optional]
    problems += [problem(name, why) for name in present if (why := columns[name](name, schema.field(name).type))]
    return (None, problems) if problems else (pq.read_table(path, columns=present, memory_map=True), [])


def check_chats(name: str, kind) -> str:
    """What is wrong with the arrow type of a column of chats; "" if nothing is."""
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return f"the column is {kind}, not a list of structs with role and content"
    types = {field.name: field.type for field in kind.value_type}
    wrong = [f"{name}.{part}: {types.get(part, 'missing')}" for part in ("role", "content")
             if not (part in types and (pa.types.is_string(types[part]) or pa.types.is_large_string(types[part])))]
    return f"must be string: {', '.join(wrong)}" if wrong else ""
