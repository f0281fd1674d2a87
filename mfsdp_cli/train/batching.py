"""Which rows of a global batch make which micro batch of which data-parallel rank. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import heapq

from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem


def plan_micro_batches(lengths: list[int], *, dp_size: int, max_tokens: int) -> list[list[list[int]]]:
    """[dp rank][micro batch] -> indices into `lengths`; every rank gets the same number of micro batches, each of at most `max_tokens`.

    Sequences go, longest first, to the emptiest micro batch (LPT), with the fewest micro batches that fit. Micro batches of like size
    run at the same time on all ranks, so that none waits long for another. One may be empty: `data.pack` makes it a masked dummy.
    Raises MfsdpError naming every sequence that is longer than max_tokens by itself.
    """
    assert lengths and dp_size >= 1
    overlong = [(index, length) for index, length in enumerate(lengths) if length > max_tokens]
    if overlong:
        rows = f"of the {len(lengths)} of this batch"
        told = [(f"row {index + 1} {rows} (index {index}) has {length} tokens, above the limit of {max_tokens}",
                 f"raise it to {length} or more, or let data.truncation cut at data.max_length") for index, length in overlong]
        raise MfsdpError([Problem("data.max_token_len_per_gpu", str(max_tokens), *words, code=BAD_INPUT) for words in told])
    num_micro = max(1, -(-sum(lengths) // (dp_size * max_tokens)))
    while True:
        bins = longest_first(lengths, dp_size * num_micro)
        if max(load for load, _ in bins) <= max_tokens:
            return deal(bins, dp_size)
        num_micro += 1  # ends at the latest when each sequence has a micro batch of its own


def longest_first(lengths: list[int], num_bins: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of each bin. Ties go to the bin of lower number, and to the lower index, so the outcome is one."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = heap[0]
        bins[number].append(index)
        heapq.heapreplace(heap, (load + lengths[index], number))
    return [(load, sorted(bins[number])) for load, number in sorted(heap, key=lambda item: item[1])]


def deal(bins: list[tuple[int, list[int]]], dp_size: int) -> list[list[list[int]]]:
    """Bins, largest first, in rounds of dp_size; within a round the largest goes to the rank with the least so far."""
    ordered = sorted(bins, key=lambda item: (-item[0], item[1]))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    totals = [0] * dp_size
    for start in range(0, len(ordered), dp_size):
        needy = sorted(range(dp_size), key=lambda rank: (totals[rank], rank))
        for rank, (load, indices) in zip(needy, ordered[start:start + dp_size], strict=True):
            ranks[rank].append(indices)
            totals[rank] += load
    return ranks


def fixed_micro_batches(num_rows: int, dp_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    """[dp rank][micro batch] -> indices, `micro_batch_size` rows each in order; for a batch that does not divide, the last ones are
    smaller, or empty, and every rank still has as many as the others."""
    assert num_rows >= 1 and dp_size >= 1 and micro_batch_size >= 1
    num_micro = -(-num_rows // (dp_size * micro_batch_size))
    per_rank = num_micro * micro_batch_size
    return [[list(range(min(start, num_rows), min(start + micro_batch_size, num_rows)))
             for start in range(rank * per_rank, (rank + 1) * per_rank, micro_batch_size)] for rank in range(dp_size)]
