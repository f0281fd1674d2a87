"""DCP's files as mfsdp writes and reads them: with threads, summed up on the way, and no failure lost."""

from __future__ import annotations

import errno
import random
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mfsdp_cli.checkpoint.storage import Reader, Writer


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of many sizes and dtypes, empty, without dimensions, and views of larger ones."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    state = {f"t{i}": torch.randn(rng.randint(0, 3000), rng.randint(1, 5)) for i in range(20)}
    return state | {"scalar": torch.tensor(3), "half": torch.randn(7, 9).bfloat16(), "view": torch.randn(50, 8)[10:20, 2:5],
                    "bytes": torch.arange(9, dtype=torch.uint8)}


@pytest.mark.parametrize("written_by, read_by", [(1, 4), (4, 1), (3, 3), (40, 40)])
def test_what_is_written_is_read_whatever_the_number_of_threads(tmp_path, written_by, read_by):
    state = tensors(written_by)
    writer = Writer(tmp_path, written_by)
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = {name: torch.full_like(tensor, 1) for name, tensor in state.items()}
    dcp.load(found, storage_reader=Reader(tmp_path, read_by), no_dist=True)
    assert all(found[name].equal(tensor) for name, tensor in state.items())
    plain = {name: torch.full_like(tensor, 1) for name, tensor in state.items()}
    dcp.load(plain, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert all(plain[name].equal(tensor) for name, tensor in state.items())
    on_disk = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(on_disk) == written_by + 1 and ".metadata" in on_disk
    assert writer.files == {name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} for name, data in on_disk.items()}


def test_torch_takes_no_checksum_of_its_own_meanwhile_and_does_afterwards(tmp_path):
    tensor = torch.randn(1000)
    dcp.save({"a": tensor, "b": tensor}, storage_writer=Writer(tmp_path / "ours", 2), no_dist=True)
    torch.save(tensor, tmp_path / "theirs")
    for path, wanted in ((tmp_path / "ours" / "__0_0.distcp", False), (tmp_path / "ours" / "__0_1.distcp", False), (tmp_path / "theirs", True)):
        with zipfile.ZipFile(path) as file:
            [record] = [info for info in file.infolist() if info.filename.endswith("data/0")]
        assert (record.CRC == zlib.crc32(tensor.numpy().tobytes())) is wanted


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_disk_that_is_full_is_an_error_in_every_thread(tmp_path, number):
    """DCP's own writer ends well here for the threads other than the first, without the tensors of the full disk."""
    (tmp_path / f"__0_{number}.distcp").symlink_to("/dev/full")
    with pytest.raises(BaseException) as caught:  # CheckpointException is no Exception
        dcp.save(tensors(0), storage_writer=Writer(tmp_path, 4), no_dist=True)
    [cause] = [e for e in caught.value.failures.values()]
    assert cause[0].errno == errno.ENOSPC and not (tmp_path / ".metadata").exists()


def test_a_file_that_is_cut_is_an_error_in_every_thread(tmp_path):
    state = tensors(1)
    dcp.save(state, storage_writer=Writer(tmp_path, 4), no_dist=True)
    for path in sorted(tmp_path.glob("*.distcp")):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(BaseException):
            dcp.load({k: torch.empty_like(v) for k, v in state.items()}, storage_reader=Reader(tmp_path, 4), no_dist=True)
        path.write_bytes(data)
