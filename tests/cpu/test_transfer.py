"""Weights written for the samplers: whole or not at all, in shared memory while there is room."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError
from mfsdp_cli.rollout import transfer
from mfsdp_cli.rollout.transfer import num_bytes_of, remove_versions, tensor_shapes, transfer_folder, write_weights


@pytest.fixture(scope="session", autouse=True)
def megatron():
    """Stands in for the fixture that imports Megatron, which nothing here needs."""


def weights() -> dict:
    import torch

    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(i + 1, 8, generator=generator) for i in range(5)}


def read(path: Path) -> dict:
    from safetensors.torch import load_file

    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes, num_files", [(1 << 30, 1), (96, 4), (1, 5)])  # 32, 64, 96, 128, 160 bytes
def test_what_is_written_is_read_back_and_indexed(tmp_path, monkeypatch, shard_bytes, num_files):
    import torch

    monkeypatch.setattr(transfer, "SHARD_BYTES", shard_bytes)
    path = write_weights(iter(weights().items()), tmp_path / "a" / "w", is_writer=True)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert path == tmp_path / "a" / "w" / "version_000001" and len(files) == num_files
    found = read(path)
    assert found.keys() == weights().keys() and all(torch.equal(found[name], tensor) for name, tensor in weights().items())
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 480 and sorted(set(index["weight_map"].values())) == files
    assert all(name in tensor_shapes_of(path / file) for name, file in index["weight_map"].items())
    assert num_bytes_of(tensor_shapes(path), 4) == 480


def tensor_shapes_of(file: Path) -> set:
    from safetensors import safe_open

    with safe_open(file, "np") as reader:
        return set(reader.keys())


def test_views_of_one_buffer_and_of_another_stride_are_written_as_they_look(tmp_path):
    import torch

    buffer = torch.arange(24.0).reshape(4, 6)
    named = {"top": buffer[:2], "bottom": buffer[2:], "turned": buffer.T, "all": buffer}
    found = read(write_weights(iter(named.items()), tmp_path / "w", True))
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


def test_versions_count_up_and_older_ones_go_when_told(tmp_path):
    folder = tmp_path / "w"
    first = write_weights(iter(weights().items()), folder, True)
    second = write_weights(iter(weights().items()), folder, True)
    assert first.is_dir() and second.name == "version_000002"
    (folder / "version_000003.tmp").mkdir()  # a writer was killed
    remove_versions(folder, keep=second)
    assert [path.name for path in folder.iterdir()] == ["version_000002"]
    assert write_weights(iter(weights().items()), folder, True).name == "version_000003"
    remove_versions(folder, keep=None)
    assert not folder.exists()
    remove_versions(folder, keep=None)


def test_every_rank_takes_the_whole_stream_and_one_writes(tmp_path, monkeypatch):
    taken = []

    def stream():
        for name, tensor in weights().items():
            taken.append(name)
            yield name, tensor

    assert write_weights(stream(), tmp_path / "w", is_writer=False) is None
    assert len(taken) == 5 and not (tmp_path / "w").exists()
    # a disk that is full after the first shard: the others' collectives are not left hanging
    monkeypatch.setattr(transfer, "SHARD_BYTES", 1)
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: 40)
    with pytest.raises(MfsdpError) as caught:
        write_weights(stream(), tmp_path / "w", is_writer=True)
    assert caught.value.exit_code == MACHINE_UNFIT and "to write" in caught.value.problems[0].why
    assert len(taken) == 10 and list((tmp_path / "w").iterdir()) == []


def test_an_interrupted_stream_leaves_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "SHARD_BYTES", 1)

    def broken():
        yield from list(weights().items())[:3]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        write_weights(broken(), tmp_path / "w", True)
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["version_000001.tmp"]
    assert read(write_weights(iter(weights().items()), tmp_path / "w", True)).keys() == weights().keys()


def test_shared_memory_while_two_versions_fit_else_the_run_folder(tmp_path, monkeypatch):
    run, shm = tmp_path / "run", tmp_path / "shm"
    run.mkdir()
    shm.mkdir()
    free = {run: 10 << 30, shm: 3 << 30}
    monkeypatch.setattr(transfer, "free_bytes", lambda folder: free[folder])
    monkeypatch.setattr(transfer, "available_memory", lambda: 8 << 30)
    place = transfer_folder(run, 1 << 30, shared_memory=shm)
    assert place.parent == shm and str(os.getuid()) in place.name and list(shm.iterdir()) == []
    assert transfer_folder(tmp_path / "run" / ".." / "run", 1 << 30, shared_memory=shm) == place
    assert transfer_folder(run, 2 << 30, shared_memory=shm) == run / "weights"
    assert transfer_folder(run, 1 << 30, one_host=False, shared_memory=shm) == run / "weights"
    assert transfer_folder(run, 1 << 30, shared_memory=tmp_path / "none") == run / "weights"
    monkeypatch.setattr(transfer, "available_memory", lambda: 1 << 30)
    assert transfer_folder(run, 1 << 30, shared_memory=shm) == run / "weights"
    with pytest.raises(MfsdpError) as caught:
        transfer_folder(run, 5 << 30, shared_memory=shm)
    [problem] = caught.value.problems
    assert caught.value.exit_code == MACHINE_UNFIT
    assert "two versions of 5.00 GiB, 10.06 GiB in all" in problem.why and "1.00 GiB to give" in problem.why
    assert "0.06 GiB on that disk" in problem.fix


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or shutil.disk_usage("/dev/shm").free < 1 << 28, reason="no room in /dev/shm")
def test_the_real_shared_memory(tmp_path):
    folder = transfer_folder(tmp_path, 480)
    try:
        path = write_weights(iter(weights().items()), folder, True)
        assert path.is_relative_to("/dev/shm") and folder.stat().st_mode & 0o777 == 0o700 and len(read(path)) == 5
    finally:
        remove_versions(folder, keep=None)
    assert not folder.exists()
