"""Footers of parquet files: rows, columns with pyarrow's words for their types, null counts.

Importing pyarrow, and numpy with it, takes longer than all the rest of a check, so the files that people train on, which hold
texts, numbers, lists and structs, are read here; whatever else a footer holds, and whatever is wrong with it, is left to
pyarrow. Formats: github.com/apache/parquet-format (Thrift's compact protocol); ARROW:schema, a flatbuffer, Arrow's Schema.fbs.
"""

from __future__ import annotations

import binascii
import os
import struct

MAGIC = b"PAR1"
LARGEST = 1 << 17  # bytes of a footer; a file of many row groups is quicker in C++
PHYSICAL = {0: "bool", 1: "int32", 2: "int64", 4: "float", 5: "double"}
UTF8, LIST = 0, 3  # converted types
PLAIN_LOGICAL = {UTF8: 1, LIST: 3}  # and the logical type that says the same
REQUIRED, REPEATED = 0, 2
PLAIN_ARROW = {2, 3, 5, 6, 12, 13}  # Int, FloatingPoint, Utf8, Bool, List, Struct


class NotPlain(Exception):
    """Something that only pyarrow should judge."""


def read_plain(path: str) -> tuple[int, dict[str, str], dict[str, int]]:
    """(rows, column -> type, dotted path of a leaf -> nulls) of a file. Raises NotPlain."""
    try:
        metadata = _Thrift(_footer(path)).struct()
        keys = {entry[1]: entry.get(2, b"") for entry in metadata.get(5, [])}
        if b"ARROW:schema" in keys and not _is_plain_arrow(binascii.a2b_base64(keys[b"ARROW:schema"])):
            raise NotPlain
        elements = iter(metadata[2])
        rows, columns = metadata[3], dict(_fields(elements, next(elements)[5]))
        if len(columns) != metadata[2][0][5] or type(rows) is not int or rows < 0:
            raise NotPlain  # a name that stands twice, a damaged number
        return rows, columns, _nulls(metadata.get(4, []))
    except (LookupError, ValueError, TypeError, AttributeError, StopIteration, RuntimeError, struct.error) as error:
        raise NotPlain from error


def _footer(path: str) -> bytes:
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise NotPlain
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length, magic = struct.unpack("<I4s", file.read(8))
        if magic != MAGIC or length > min(LARGEST, size - 12):
            raise NotPlain
        file.seek(size - 8 - length)
        return file.read(length)


def _fields(elements, count: int):
    """(name, type) of the next `count` elements with all that lies below them, as the schema lists them: depth first."""
    for _ in range(count):
        element = next(elements)
        yield element[4].decode(), _type(element, elements)


def _type(element: dict, elements) -> str:
    """pyarrow's word for the type of an element, whose children come next."""
    converted, logical = element.get(6), element.get(10)
    if element.get(3) == REPEATED or (logical is not None and PLAIN_LOGICAL.get(converted) not in logical):
        raise NotPlain
    if 5 not in element:
        if converted == UTF8 and element[1] == 6:
            return "string"
        if converted is not None:
            raise NotPlain
        return PHYSICAL[element[1]]
    if converted == LIST:
        middle = next(elements)
        if (element[5], middle[5], middle[3], middle[4]) != (1, 1, REPEATED, b"list"):
            raise NotPlain  # one of the old layouts
        return f"list<{_child(elements)}>"
    if converted is not None:
        raise NotPlain
    return f"struct<{', '.join(_child(elements) for _ in range(element[5]))}>"


def _child(elements) -> str:
    element = next(elements)
    return f"{element[4].decode()}: {_type(element, elements)}{' not null' if element.get(3) == REQUIRED else ''}"


def _nulls(row_groups: list[dict]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in row_groups:
        for column in group[1]:
            data = column[3]
            nulls = data.get(12, {}).get(3)
            if nulls is not None:
                name = ".".join(step.decode() for step in data[3])
                counts[name] = counts.get(name, 0) + nulls
    return counts


class _Thrift:
    """Thrift's compact protocol: a struct becomes a dict of field number -> value."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self) -> int:
        """An unsigned varint."""
        value = 0
        for shift in range(0, 70, 7):  # 64 bits
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise NotPlain

    def signed(self) -> int:
        value = self.number()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> dict:
        found, number = {}, 0
        while header := self.byte():
            number = number + (header >> 4) if header >> 4 else self.signed()
            kind = header & 0x0F
            found[number] = kind == 1 if kind in (1, 2) else self.value(kind)
        return found

    def value(self, kind: int):
        if kind in (1, 2, 3):  # an element of a list of booleans, or a byte
            return self.byte()
        if kind in (4, 5, 6):
            return self.signed()
        if kind == 7:
            return self.bytes(8)
        if kind == 8:
            return self.bytes(self.number())
        if kind in (9, 10):
            header = self.byte()
            count = header >> 4 if header >> 4 < 15 else self.number()
            return [self.value(header & 0x0F) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise NotPlain

    def bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise NotPlain
        return self.data[self.at - count : self.at]


def _is_plain_arrow(message: bytes) -> bool:
    """Whether pyarrow, which restores the types it once wrote, restores nothing that parquet's own types do not say: no
    dictionaries, large or view types, extensions."""
    if b"ARROW:extension:name" in message:
        return False
    start = 8 if message[:4] == b"\xff\xff\xff\xff" else 4
    root = _Table(message, start + struct.unpack_from("<I", message, start)[0])
    return all(_is_plain_field(field) for field in root.table(2).tables(1))  # Message.header is the Schema, its slot 1 the fields


def _is_plain_field(field: _Table) -> bool:
    """Slots of a Field: 0 name, 1 nullable, 2 type, 3 the type's table, 4 dictionary, 5 children."""
    return field.byte(2) in PLAIN_ARROW and not field.slot(4) and all(map(_is_plain_field, field.tables(5)))


class _Table:
    """One table of a flatbuffer."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def slot(self, number: int) -> int:
        """Where the field with this number lies; 0 when it is absent."""
        table = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        place = 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, table + place)[0] if place < struct.unpack_from("<H", self.data, table)[0] else 0
        return self.at + offset if offset else 0

    def byte(self, number: int) -> int:
        return self.data[self.slot(number)] if self.slot(number) else 0

    def table(self, number: int) -> _Table:
        at = self.slot(number)
        if not at:
            raise NotPlain
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])

    def tables(self, number: int) -> list[_Table]:
        if not self.slot(number):
            return []
        vector = self.table(number).at
        count = struct.unpack_from("<I", self.data, vector)[0]
        if vector + 4 + 4 * count > len(self.data):
            raise NotPlain
        places = [vector + 4 + 4 * i for i in range(count)]
        return [_Table(self.data, at + struct.unpack_from("<I", self.data, at)[0]) for at in places]
