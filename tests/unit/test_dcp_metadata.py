"""Reading `.metadata` as torch wrote it; and as someone wrote it who wants something run, or the machine brought down."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import sys
from math import prod
from pathlib import Path

import dcp_for_tests
import pytest
from dcp_for_tests import written_by_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfsdp_cli.checkpoint import dcp_pickle
from mfsdp_cli.checkpoint.dcp_metadata import read_dcp
from mfsdp_cli.errors import BAD_INPUT, MfsdpError

EXAMPLES = int(os.environ.get("MFSDP_FUZZ", 0)) or 40
META = b"torch.distributed.checkpoint.metadata\n"


@pytest.fixture
def dcp(tmp_path_factory, tmp_path) -> Path:
    return Path(shutil.copytree(written_by_torch(tmp_path_factory) / "dcp", tmp_path / "bare"))


def told(folder: Path) -> str:
    """What is found when the folder is refused, as it must be."""
    with pytest.raises(MfsdpError) as caught:
        read_dcp(folder)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == BAD_INPUT and problem.key == str(folder / ".metadata") and problem.found.isprintable()
    return f"{problem.why}: {problem.found}"


# ---------------------------------------------------------------- what torch writes

def test_tensors_chunks_and_files_are_those_that_torch_wrote(dcp):
    found = read_dcp(dcp)
    assert found.problems == ()
    by_name = {entry.name: entry for entry in found.tensors}
    assert len(by_name) == 11
    both = ("__0_0.distcp", "__1_0.distcp")
    emb = by_name["model.module.embedding.word_embeddings.weight"]
    assert (emb.shape, emb.dtype, emb.num_chunks, emb.files, emb.num_bytes) == ((6, 4), "bfloat16", 2, both, 48)
    moment = by_name["optimizer.state.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg_sq"]
    assert (moment.shape, moment.dtype, moment.num_chunks, moment.files, moment.num_bytes) == ((3, 4), "float32", 2, both, 48)
    norm = by_name["model.module.decoder.final_layernorm.weight"]
    assert (norm.num_chunks, len(norm.files), norm.num_bytes) == (1, 1, 16)
    step = by_name["optimizer.param_groups.0.step"]
    assert (step.shape, step.num_elements, step.num_bytes) == ((), 1, 4)
    assert sorted(found.objects) == ["extra.rng", "optimizer.param_groups.0.betas", "optimizer.param_groups.0.lr"]
    assert found.files == {name: (dcp / name).stat().st_size for name in both}


def test_a_large_file_is_read_whole_and_quickly(tmp_path_factory):
    """A tenth of a 70B model on 64 ranks; that takes 0.1 s on a quiet machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = read_dcp(written_by_torch(tmp_path_factory) / "large")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wanted = dcp_for_tests.shapes(dcp_for_tests.LAYERS)
    assert {t.name: t.shape for t in found.tensors} == wanted
    assert {t.num_chunks for t in found.tensors} == {64} and len(found.tensors[0].files) == 64
    assert len(found.problems) == 64, "its shards were never written"
    one_rank = sum(4 * prod(shape) // 64 + 1024 for shape in wanted.values())
    assert found.files["__0_0.distcp"] == one_rank, "embedding and all else divide by 64"
    assert after.ru_utime - before.ru_utime < 1.0


def test_a_missing_and_a_truncated_file_are_both_told(dcp):
    first, second = dcp / "__0_0.distcp", dcp / "__1_0.distcp"
    size = first.stat().st_size
    os.truncate(first, size - 1)
    second.unlink()
    problems = {Path(p.key).name: p for p in read_dcp(dcp).problems}
    assert problems["__1_0.distcp"].found == "missing"
    assert problems["__0_0.distcp"].found == f"{size - 1:,} bytes" and f"up to byte {size:,}" in problems["__0_0.distcp"].why
    assert all(p.code == BAD_INPUT for p in problems.values())


def test_damaged_metadata_is_an_error_at_every_length(dcp):
    data = (dcp / ".metadata").read_bytes()
    for length in range(0, len(data), 137):
        (dcp / ".metadata").write_bytes(data[:length])
        assert "damaged or cut short" in told(dcp)
    (dcp / ".metadata").write_bytes(pickle.dumps({"not": "metadata"}))
    assert "damaged" in told(dcp)
    (dcp / ".metadata").unlink()
    assert "did not finish" in told(dcp)


# ---------------------------------------------------------------- what an attacker writes

class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_calls_a_function_is_refused_and_not_run(tmp_path, protocol):
    evidence = tmp_path / "ran"
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"model": Attack(evidence)}, protocol))
    assert "may be an attack" in (why := told(tmp_path)) and why.endswith(".system")
    assert not evidence.exists()


def text(word: bytes) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word


RUN = b"touch ran"
REFUSED = {
    "eval by REDUCE": (b"cbuiltins\neval\n" + text(b"1") + b"\x85R.", "builtins.eval"),
    "exec by REDUCE": (b"cbuiltins\nexec\n" + text(b"1") + b"\x85R.", "builtins.exec"),
    "getattr": (b"cbuiltins\ngetattr\n" + text(b"a") + text(b"b") + b"\x86R.", "builtins.getattr"),
    "import": (b"cbuiltins\n__import__\n" + text(b"os") + b"\x85R.", "builtins.__import__"),
    "torch.load": (b"ctorch\nload\n" + text(b"x") + b"\x85R.", "torch.load"),
    "a class of ours": (b"cmfsdp_cli.errors\nMfsdpError\n)\x81.", "mfsdp_cli.errors.MfsdpError"),
    "the module's own import": (b"c" + META + b"os\n.", "torch.distributed.checkpoint.metadata.os"),
    "a relative of OrderedDict": (b"ccollections\nCounter\n)R.", "collections.Counter"),
    "system by INST": (b"(" + text(RUN) + b"ios\nsystem\n.", "os.system"),
    "system by OBJ": (b"(cos\nsystem\n" + text(RUN) + b"o.", "os.system"),
    "Popen by NEWOBJ": (b"csubprocess\nPopen\n" + text(RUN) + b"\x85\x81.", "subprocess.Popen"),
    "Popen by NEWOBJ_EX": (b"csubprocess\nPopen\n)}\x92.", "subprocess.Popen"),
    "system by STACK_GLOBAL": (text(b"os") + text(b"system") + b"\x93" + text(RUN) + b"\x85R.", "os.system"),
    "a dotted name": (b"\x80\x04" + text(b"torch") + text(b"Size.__class__.mro") + b"\x93.", "torch.Size.__class__.mro"),
    "a dotted path out": (b"\x80\x04" + text(b"torch.serialization") + text(b"os.system") + b"\x93.", "torch.serialization.os.system"),
    "an attribute of a known class": (b"\x80\x04" + text(META[:-1]) + text(b"Metadata.__init__.__globals__") + b"\x93.", "__globals__"),
    "a name with a line in it": (b"\x80\x04" + text(b"os\nroot") + text(b"\x1b[2J") + b"\x93.", r"os\nroot.\x1b[2J"),
    "a persistent id": (b"Psome id\n.", "a persistent id"),
    "a binary persistent id": (text(b"id") + b"Q.", "a persistent id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_way_to_name_a_callable_is_refused(tmp_path, name):
    payload, found = REFUSED[name]
    (tmp_path / ".metadata").write_bytes(payload)
    assert "may be an attack" in (why := told(tmp_path)) and why.endswith(found)
    assert [p.name for p in tmp_path.iterdir()] == [".metadata"] and not Path("ran").exists()


NEST = 1_000_000
STATE = b"c" + META + b"Metadata\n"
DAMAGED = {
    "an extension code": b"\x82\x01.",
    "a long extension code": b"\x84\xff\xff\xff\x7f.",
    "state under special names": STATE + b")\x81}(" + text(b"__class__") + b"N" + text(b"__setstate__") + b"N" + text(b"__reduce__") + b"Nub.",
    "slots of a class": STATE + b"N}(" + text(b"__setstate__") + b"c" + META + b"StorageMeta\nu\x86b" + b")\x81}b.",
    "state of a tuple": b"ctorch\nSize\n)R}b.",
    "state of a number": b"K\x01}b.",
    "a class as metadata": STATE + b".",
    "keys that cannot be": b"}]Ks.",
    "a memo of 2**31 places": b"Nr\xff\xff\xff\x7f.",
    "a bytearray of 2**60 bytes": b"\x96" + (1 << 60).to_bytes(8, "little") + b".",
    "a text of 2**60 bytes": b"\x8d" + (1 << 60).to_bytes(8, "little") + b".",
    "a frame of 2**60 bytes": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
    "a number of 2**31 - 1 bytes": b"\x8b\xff\xff\xff\x7f.",
    "a number of negative length": b"\x8b\xff\xff\xff\xff.",
    "an out-of-band buffer": b"\x80\x05\x97.",
    "marks, a million": b"(" * NEST + b".",
    "lists in lists, a million": b"]" * NEST + b"a" * (NEST - 1) + b".",
    "tuples in tuples as a key": b"})" + b"\x85" * NEST + b"Ns.",
    "sets in sets": b"(" + b"cbuiltins\nfrozenset\n(" * 1000 + b"l" + b"\x85R" * 1000 + b".",
    "a list copied without end": b"](" + b"K\x01" * 50_000 + b"ep0\nctorch\nSize\np1\n0(" + b"g1\ng0\n\x85R" * 100_000 + b"l.",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_read_is_an_error_and_no_crash(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(DAMAGED[name])
    assert "damaged or cut short" in told(tmp_path)


def test_a_pickle_that_takes_for_ever_is_stopped(tmp_path, monkeypatch):
    """Thirty doublings, each of a tuple with itself, give a key whose hash takes 2**30 steps, and so on: 40 would take hours."""
    quick = tmp_path / "quick.py"
    quick.write_text(Path(dcp_pickle.__file__).read_text().replace("SECONDS, SECONDS_PER_MIB = 5, 4", "SECONDS, SECONDS_PER_MIB = 1, 1"))
    monkeypatch.setattr(dcp_pickle, "__file__", str(quick))
    (tmp_path / ".metadata").write_bytes(b"})" + b"2\x86" * 40 + b"Ns.")
    assert "took too long" in told(tmp_path)


def test_names_that_lead_out_of_the_folder_or_move_the_cursor_are_damage(dcp):
    data = (dcp / ".metadata").read_bytes()
    for old, new in ((b"__0_0.distcp", b"../../passwd"), (b"__0_0.distcp", b"/etc//passwd"), (b"__0_0.distcp", b"a\0b00.distcp"),
                     (b"extra.rng", b"extra\x1b[2J")):
        assert old in data and len(old) == len(new)
        (dcp / ".metadata").write_bytes(data.replace(old, new))
        assert "damaged" in told(dcp), new


def pieces() -> st.SearchStrategy[bytes]:
    """Bytes, single opcodes, and whole attacks without their STOP."""
    attacks = [payload[:-1] for payload, _ in REFUSED.values()] + [payload[:-1] for payload in DAMAGED.values() if len(payload) < 200]
    return st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from(attacks),
                     st.sampled_from([bytes([code]) for code in range(256)]))


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_change_of_a_valid_file_gets_more_than_an_error(tmp_path_factory, data):
    """Spans of a valid file replaced, removed or doubled, and attacks put in between."""
    valid = (written_by_torch(tmp_path_factory) / "dcp" / ".metadata").read_bytes()
    folder, changed = tmp_path_factory.mktemp("changed"), bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(changed)))
        length = data.draw(st.sampled_from([0, 0, 1, 1, 2, 9, 40]))
        span = bytes(changed[start:start + length])
        changed[start:start + length] = data.draw(st.one_of(pieces(), st.just(b""), st.just(span * 2)))
    (folder / ".metadata").write_bytes(changed)
    try:
        found = read_dcp(folder)
    except MfsdpError as error:
        assert error.exit_code == BAD_INPUT and len(error.problems) == 1 and error.problems[0].found.isprintable()
    else:
        assert all(t.name.isprintable() and t.num_bytes >= 0 for t in found.tensors)
    assert [p.name for p in folder.iterdir()] == [".metadata"]


def test_the_reader_stands_alone():
    """It is run by its path with -I -S: whatever lies in the working folder or in site-packages has no part in it."""
    source = Path(dcp_pickle.__file__).read_text()
    imported = {line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from ")) and "__future__" not in line}
    assert imported <= set(sys.stdlib_module_names)
