"""Checkpoints written by torch.distributed.checkpoint itself: a program, since it needs torch, and a function that runs it once.

    python dcp_for_tests.py ROOT LAYERS RANKS

    ROOT/dcp      two ranks, names as Megatron-FSDP gives them; 3 rows on 2 ranks are an uneven split
    ROOT/same     the same tensors from one rank
    ROOT/other    from one rank, with other values, shapes, dtypes and names
    ROOT/large    only the .metadata of a Llama of hidden size 8192 (70B parameters at 80 layers), weights and two moments, every tensor
                  split by rows over RANKS: more chunks than Megatron-FSDP makes, which leaves small tensors on few ranks
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

HIDDEN, FFN, QKV, VOCAB = 8192, 28672, 10240, 128256
LAYER = {
    "self_attention.linear_qkv.weight": (QKV, HIDDEN), "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
    "mlp.linear_fc1.weight_w": (FFN, HIDDEN), "mlp.linear_fc1.weight_v": (FFN, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, FFN),
    "input_layernorm.weight": (HIDDEN,), "pre_mlp_layernorm.weight": (HIDDEN,),
}
LAYERS, RANKS = 8, 64
EMBEDDING, FC1, NORM = ("module." + name for name in (
    "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"))


def written_by_torch(tmp_path_factory) -> Path:
    """ROOT; read only, for it is written once for all tests."""
    return _written(tmp_path_factory.getbasetemp() / "written-by-torch")


@functools.cache
def _written(root: Path) -> Path:
    root.mkdir()
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, str(root), str(LAYERS), str(RANKS)], capture_output=True, text=True,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return root


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """name -> shape of everything that ROOT/large stores."""
    weights = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,),
               "output_layer.weight": (VOCAB, HIDDEN)}
    weights |= {f"decoder.layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER.items()}
    stored = {f"model.{name}": shape for name, shape in weights.items()}
    return stored | {f"optimizer.state.{name}.{moment}": shape for name, shape in weights.items() for moment in ("exp_avg", "exp_avg_sq")}


def write_large(path: str, layers: int, ranks: int) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata)

    entries, storage, ends = {}, {}, [0] * ranks
    for name, shape in shapes(layers).items():
        chunks, rows = [], shape[0] // ranks
        for rank in range(ranks):
            offset = torch.Size((rank * rows, *[0] * (len(shape) - 1)))
            size = torch.Size((rows if rank < ranks - 1 else shape[0] - rank * rows, *shape[1:]))
            chunks.append(ChunkStorageMetadata(offset, size))
            length = 4 * size.numel() + 1024
            storage[MetadataIndex(name, offset, rank)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
            ends[rank] += length
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    metadata = Metadata(entries, {name: (name,) for name in entries}, storage, StorageMeta("run", "save"), "1.0.0")
    with open(path, "wb") as file:
        pickle.dump(metadata, file)


def write_small(root: str, rank: int, world: int, names: list[str]) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{root}/store{world}", rank=rank, world_size=world)
    mesh, bf16 = init_device_mesh("cpu", (world,)), torch.bfloat16

    def put(*shape, dtype=torch.float32, how=Shard(0)):
        return distribute_tensor(torch.ones(*shape, dtype=dtype), mesh, [how])

    def moments(rows):
        return {"exp_avg": put(rows, 4), "exp_avg_sq": put(rows, 4)}

    for name in names:
        state = {
            "model": {EMBEDDING: put(6, 4, dtype=bf16), FC1 + "_w": put(3, 4, dtype=bf16), FC1 + "_v": put(3, 4, dtype=bf16),
                      NORM: put(4, how=Replicate())},
            "optimizer": {"state": {"module." + n: moments(rows) for n, rows in ((EMBEDDING, 6), (FC1 + "_w", 3), (FC1 + "_v", 3))},
                          "param_groups": [{"lr": 1e-5, "betas": (0.9, 0.95), "step": torch.tensor(7.0)}]},
            "extra": {"rng": b"bytes"},
        }
        if name == "other":
            model, state["optimizer"]["param_groups"][0]["step"] = state["model"], torch.tensor(float("nan"))
            model[EMBEDDING].to_local()[5, 3] = 0.5
            model[FC1 + "_w"], model[NORM] = put(3, 4), put(5)
            model["module.decoder.new.weight"] = model.pop(FC1 + "_v")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{root}/{name}"))
    dist.destroy_process_group()


def main(root: str, layers: int, ranks: int) -> int:
    import torch  # noqa: F401  once, before the ranks are forked

    os.mkdir(f"{root}/large")
    write_large(f"{root}/large/.metadata", layers, ranks)
    children = []
    for world, rank, names in ((2, 0, ["dcp"]), (2, 1, ["dcp"]), (1, 0, ["same", "other"])):
        pid = os.fork()
        if pid == 0:
            write_small(root, rank, world, names)
            os._exit(0)
        children.append(pid)
    return int(max(os.waitpid(pid, 0)[1] for pid in children) != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
