"""A save that fails on one rank fails on all of them at once, says why, and leaves no half checkpoint behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mfsdp_cli.checkpoint.finding import complete_steps
from mfsdp_cli.checkpoint.manifest import require_complete
from mfsdp_cli.checkpoint.words import size_words
from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
WAYS_OUT = {
    **dict.fromkeys(NO_ROOM, "make room there, or lower trainer.max_ckpt_to_keep"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f, or the file system's own)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable for every rank"),
}


def on_first_rank(action: Callable[[], object], group=None) -> None:
    """Call it on rank 0, while the others wait. What goes wrong there is raised on every rank. Collective, in `group`."""
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failure = error
    told = [failure if failure is None or isinstance(failure, OSError) else RuntimeError(f"rank 0: {failure!r}")]
    dist.broadcast_object_list(told, src=0, group=group)
    if told[0] is not None:
        raise failure or told[0]


@contextmanager
def explained(tmp: Path, step: int, group=None):
    """Around a save into `tmp` on every rank: a failure to write becomes an MfsdpError that says what to do. Collective, in `group`.

    Nobody trains on for days without a checkpoint: a save that fails ends the run."""
    try:
        yield
    except CheckpointException as error:  # raised on every rank, with what went wrong on each; no Exception, so that few catch it
        failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        if not any(isinstance(failure, OSError) for failure in failures.values()):
            raise RuntimeError(str(error)) from error
        rank, failure = next((rank, failure) for rank, failure in failures.items() if isinstance(failure, OSError))
        raise _failed(tmp, step, failure, rank, len(failures), group) from error
    except OSError as error:
        raise _failed(tmp, step, error, 0, 1, group) from error


def _failed(tmp: Path, step: int, error: OSError, rank: int, num_ranks: int, group) -> MfsdpError:
    checkpoints = tmp.parent
    earlier = complete_steps(checkpoints)
    room = _room(tmp, earlier) if error.errno in NO_ROOM else ""
    dist.barrier(group)  # every rank has looked at what is there
    if dist.get_rank() == 0:
        shutil.rmtree(tmp, ignore_errors=True)
    dist.barrier(group)
    who = f"rank {rank}" + (f" and {num_ranks - 1} more" if num_ranks > 1 else "")
    safe = f"{earlier[max(earlier)].name} is whole, and the same command then goes on from it" if earlier else "there is no earlier one"
    why = f"step {step} could not be saved, so the run ends here{room}; {safe}"
    fix = WAYS_OUT.get(error.errno, "see what is wrong with that file system")
    return MfsdpError(Problem(str(error.filename or checkpoints), f"{error.strerror or error} on {who}", why, fix, code=MACHINE_UNFIT))


def _room(tmp: Path, earlier: dict[int, Path]) -> str:
    """How much the last checkpoint took, and how much there was for this one."""
    if not earlier:
        return ""
    needed = sum(entry["bytes"] for entry in require_complete(earlier[max(earlier)]).files.values())
    written = sum(os.path.getsize(path) for path in tmp.rglob("*") if path.is_file())
    free = shutil.disk_usage(tmp.parent).free + written
    return f": the last one took {size_words(needed)}, and there was room for {size_words(free)}"
