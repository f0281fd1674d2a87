"""How the policy's weights reach the samplers after every step: one class a way, chosen by `rollout.weight_transfer`.

`send` returns the version that all samplers then have; `close` leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

from mfsdp_cli.config.rules_rollout import weight_transfer
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.rollout.transfer import num_bytes_of, remove_versions, transfer_folder


def weight_sync(settings: GrpoSettings, cluster, run_dir: Path, shapes: dict):
    """shapes: Hugging Face name -> shape of the policy's tensors."""
    way = weight_transfer(settings, cluster.on_gpu)
    if way == "file":
        element_bytes = 2 if settings.engine.dtype == "bfloat16" else 4
        return FileSync(cluster, transfer_folder(run_dir, num_bytes_of(shapes, element_bytes)))
    return IpcSync(cluster) if way == "ipc" else NcclSync(cluster, settings.rollout.tensor_model_parallel_size)


class FileSync:
    """Through a folder of safetensors in shared memory, or on the run's disk: for every sampler, also on CPU (`rollout.transfer`)."""

    def __init__(self, cluster, folder: Path):
        self.cluster, self.folder = cluster, folder

    def send(self) -> int:
        paths = self.cluster.on_ranks("write_weights", str(self.folder), self.cluster.writers)
        path = Path(next(p for p in paths if p))
        version = _only(self.cluster.on_samplers("update_weights", str(path)))
        remove_versions(self.folder, keep=path)  # the version before goes once all of them have the new one
        return version

    def close(self) -> None:
        remove_versions(self.folder, keep=None)


class IpcSync:
    """vLLM on the trainer's GPUs: buffers on the GPU itself, by CUDA IPC handles (`rollout.native`)."""

    def __init__(self, cluster):
        self.cluster = cluster
        cluster.on_samplers("open_transfer", {})

    def send(self) -> int:
        self.cluster.on_samplers("begin_update")
        self.cluster.hand_over_weights()
        return _only(self.cluster.on_samplers("end_update"))

    def close(self) -> None:
        """The buffers end with their processes."""


class NcclSync:
    """vLLM on GPUs of its own: a broadcast from the trainer's rank 0 to every worker of every engine (`rollout.native`)."""

    def __init__(self, cluster, workers_per_engine: int):
        self.cluster = cluster
        [self.layout, *_] = cluster.on_ranks("weight_layout")
        address, port = cluster.free_address()
        world_size = 1 + cluster.num_samplers * workers_per_engine
        places = [{"master_address": address, "master_port": port, "rank_offset": 1 + i * workers_per_engine, "world_size": world_size}
                  for i in range(cluster.num_samplers)]
        cluster.on_both("open_transfer", (address, port, world_size), "open_transfer", [(place,) for place in places])

    def send(self) -> int:
        self.cluster.on_samplers("begin_update")
        self.cluster.on_both("broadcast_weights", (), "receive", [(self.layout,)] * self.cluster.num_samplers)
        return _only(self.cluster.on_samplers("end_update"))

    def close(self) -> None:
        """The group ends with its processes."""


def _only(versions: list[int]) -> int:
    assert len(set(versions)) == 1, versions
    return versions[0]
