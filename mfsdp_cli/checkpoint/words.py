"""Sizes, ages and columns as people read them."""

from __future__ import annotations

from datetime import datetime


def size_words(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"; whole bytes below 1 KiB."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        num_bytes /= 1024
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.1f} {unit}"


def shape_words(shape: list[int] | tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def age_words(created: str, now: datetime) -> str:
    """How long before `now` an ISO 8601 time was, in its largest unit: "2 d"; "-" when it is no time."""
    try:
        seconds = (now - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def columns(rows: list[tuple[str, ...]], numbers: int = 0) -> list[str]:
    """Lines of aligned cells; the last `numbers` columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    first = len(widths) - numbers
    places = [f"<{width}" if i < first else f">{width}" for i, width in enumerate(widths)]
    return ["  ".join(format(cell, place) for cell, place in zip(row, places)).rstrip() for row in rows]
