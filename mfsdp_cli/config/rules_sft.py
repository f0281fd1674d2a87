"""Rules of supervised fine-tuning alone: batches of rows, their length, and nodes that meet through torchrun. See `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.config.rulebook import rule
from mfsdp_cli.config.rules_parallel import data_parallel, world_size
from mfsdp_cli.config.values import divisors, either
from mfsdp_cli.errors import Problem

SFT = ("sft",)


def batch_problem(train_batch_size: int, dp: int, micro: int) -> tuple[str, str] | None:
    """(why, fix) when a batch of rows cannot be split over `dp` ranks in micro batches of `micro` rows; None when it can.

    >>> batch_problem(8, 4, 3)[0]
    '8 rows cannot be split over 4 data-parallel ranks x 3 rows a micro batch = 12'
    """
    unit = dp * micro
    if train_batch_size % unit == 0:
        return None
    why = f"{train_batch_size} rows cannot be split over {dp} data-parallel ranks x {micro} rows a micro batch = {unit}"
    micros = [str(m) for m in divisors(train_batch_size // dp)] if train_batch_size % dp == 0 else []
    below = train_batch_size // unit * unit
    batches = " or ".join(str(b) for b in (below, below + unit) if b > 0)
    by_micro = f"data.micro_batch_size_per_gpu {either(micros)}, or " if micros else ""
    return why, f"{by_micro}data.train_batch_size {batches}"


@rule("batch-divides", "with micro batches of rows, a batch is whole micro batches on every data-parallel rank",
      "verl PR 7259, PR 1811 (rows mod DP x micro batch)", kinds=SFT, fix="a data.train_batch_size that is a multiple of DP x micro batch")
def batch_divides(s, f) -> Iterator[Problem]:
    dp, size = data_parallel(s), s.data.train_batch_size
    if dp is not None and not s.data.use_dynamic_bsz:
        wrong = batch_problem(size, dp, s.data.micro_batch_size_per_gpu)
        if wrong:
            yield Problem("data.train_batch_size", str(size), *wrong)


@rule("batch-feeds-ranks", "with micro batches by tokens, a batch has a row for each data-parallel rank", "verl issue 606", kinds=SFT,
      fix="a data.train_batch_size of at least DP")
def batch_feeds_ranks(s, f) -> Iterator[Problem]:
    dp, size = data_parallel(s), s.data.train_batch_size
    if dp is not None and s.data.use_dynamic_bsz and size < dp:
        why = f"{size} rows cannot feed {dp} data-parallel ranks ({world_size(s)} ranks / TP x CP)"
        yield Problem("data.train_batch_size", str(size), why, f"data.train_batch_size={dp} or more")


@rule("length-in-budget", "the longest conversation fits a micro batch", "verl PR 7553", kinds=SFT,
      fix="data.max_length at most data.max_token_len_per_gpu")
def length_in_budget(s, f) -> Iterator[Problem]:
    """With sequence parallelism a micro batch is a multiple of TP."""
    budget, longest, multiple = s.data.max_token_len_per_gpu, s.data.max_length, s.engine.sequence_multiple
    usable = s.engine.usable_tokens(budget)
    if longest is not None and longest > usable:
        used = f"{budget}" if usable == budget else f"{budget}, of which {usable} are a multiple of TP {multiple}"
        why = f"a conversation of {longest} tokens does not fit into a micro batch of max_token_len_per_gpu = {used}"
        larger = f"data.max_token_len_per_gpu={-(-longest // multiple) * multiple}"
        yield Problem("data.max_length", str(longest), why, f"data.max_length={usable}, or {larger}" if usable else larger)
    elif not usable:
        why = f"with sequence parallelism a micro batch is a multiple of TP {multiple}, so not one token fits"
        yield Problem("data.max_token_len_per_gpu", str(budget), why, f"at least {multiple}")


@rule("length-in-positions", "no conversation is longer than the model has positions", "the model's config.json, max_position_embeddings",
      kinds=SFT, fix="data.max_length at most max_position_embeddings")
def length_in_positions(s, f) -> Iterator[Problem]:
    """Rotary embeddings beyond the trained positions are numbers the model has never seen; nothing fails, and nothing is learned
    well. An error where data.max_length asks for it, a warning where it only may happen."""
    budget, longest, positions = s.data.max_token_len_per_gpu, s.data.max_length, (f.model_config or {}).get("max_position_embeddings")
    if not isinstance(positions, int):
        return
    if longest is not None and longest > positions:
        yield Problem(
            "data.max_length", str(longest), f"the model has {positions} positions (max_position_embeddings)", f"at most {positions}",
        )
    elif longest is None and budget > positions:
        why = f"conversations up to {budget} tokens are accepted, but the model has {positions} positions"
        yield Problem("data.max_length", "null", why, f"data.max_length={positions}", level="warning")


# --- nodes ----------------------------------------------------------------------------------------------------------


@rule("nodes-meet", "several nodes have one address to meet at", "torch 2.11 distributed/run.py, static rendezvous", kinds=SFT,
      fix="--rdzv-endpoint HOST:PORT of node 0, the same on every node")
def nodes_meet(s, f) -> Iterator[Problem]:
    t = s.trainer
    if t.nnodes > 1 and not t.rdzv_endpoint:
        yield Problem(
            "trainer.rdzv_endpoint", "null", f"{t.nnodes} nodes must find each other",
            "--rdzv-endpoint HOST:PORT of node 0, the same on every node",
        )
    elif t.rdzv_endpoint and not (t.rdzv_endpoint.rpartition(":")[0] and t.rdzv_endpoint.rpartition(":")[2].isdigit()):
        yield Problem("trainer.rdzv_endpoint", t.rdzv_endpoint, "expected HOST:PORT", "for example node0:29500")


@rule("node-rank", "nodes are numbered from 0 to nnodes - 1", "torch 2.11 distributed/run.py", kinds=SFT, fix="--node-rank below --nnodes")
def node_rank(s, f) -> Iterator[Problem]:
    t = s.trainer
    if t.node_rank >= t.nnodes:
        yield Problem(
            "trainer.node_rank", str(t.node_rank), f"nodes are numbered from 0 to {t.nnodes - 1} (trainer.nnodes = {t.nnodes})",
            f"at most {t.nnodes - 1}",
        )
