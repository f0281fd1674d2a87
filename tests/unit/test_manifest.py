from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from mfsdp_cli.checkpoint import finding, manifest, retention, saving
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, MfsdpError

TOPOLOGY = {"world": 8, "dp": 2, "tp": 4, "pp": 1, "cp": 1, "ep": 1, "etp": 1}


def make(step: int) -> manifest.Manifest:
    return manifest.Manifest(step=step, total_steps=100, samples_consumed=8 * step, contents=["model", "optimizer", "extra"],
                             topology=TOPOLOGY, dtype="bfloat16", padded_vocab_size=152064, architecture="Qwen2ForCausalLM",
                             source_model="Qwen/Qwen2.5-Math-7B", num_tensors=3)


def save(folder: Path, step: int, text: str = "weights") -> Path:
    tmp = saving.begin(folder, step)
    (tmp / "dist_ckpt").mkdir()
    (tmp / "dist_ckpt" / "__0_0.distcp").write_text(text)
    (tmp / "dist_ckpt" / ".metadata").write_text("meta")
    (tmp / "trainer.json").write_text("{}")
    return saving.commit(tmp, make(step))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_saved_step_reads_back_with_sizes_and_checksums(tmp_path):
    final = save(tmp_path, 100)
    assert final == tmp_path / "step_000100"
    assert names(tmp_path) == ["latest", "step_000100"]
    assert (tmp_path / "latest").read_text() == "step_000100\n"
    read = manifest.require_complete(final)
    assert read.step == 100 and read.samples_consumed == 800 and read.topology == TOPOLOGY and read.schema == 1
    assert read.files["dist_ckpt/__0_0.distcp"] == {"bytes": 7, "crc32": f"{zlib.crc32(b'weights'):08x}"}
    assert sorted(read.files) == ["dist_ckpt/.metadata", "dist_ckpt/__0_0.distcp", "trainer.json"]
    assert manifest.verify(final) == []


def test_checksum_of_a_file_longer_than_one_block(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", 1000)
    data = random.Random(0).randbytes(3500)
    (tmp_path / "f").write_bytes(data)
    assert manifest._crc32(tmp_path / "f") == f"{zlib.crc32(data):08x}"


def test_every_fault_of_the_files_is_told_at_once(tmp_path):
    final = save(tmp_path, 5)
    (final / "dist_ckpt" / "__0_0.distcp").write_text("cut")
    (final / "dist_ckpt" / ".metadata").unlink()
    with pytest.raises(MfsdpError) as caught:
        manifest.require_complete(final)
    assert caught.value.exit_code == BAD_INPUT
    told = {Path(p.key).name: (p.found, p.why) for p in caught.value.problems}
    assert told == {".metadata": ("missing", "manifest.json lists it with 4 bytes"),
                    "__0_0.distcp": ("3 bytes", "manifest.json lists it with 7 bytes")}


def test_many_faults_are_counted_not_listed(tmp_path):
    tmp = saving.begin(tmp_path, 1)
    for i in range(25):
        (tmp / f"f{i}").write_text("x")
    final = saving.commit(tmp, make(1))
    for i in range(25):
        (final / f"f{i}").unlink()
    with pytest.raises(MfsdpError) as caught:
        manifest.require_complete(final)
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1].found == "15 more files"


@pytest.mark.parametrize("text, found", [("{", "Expecting"), ("[]", "no schema number"), ('{"schema": 2}', "schema 2"),
                                         ('{"schema": 1}', "without ")])
def test_an_unreadable_manifest_is_named(tmp_path, text, found):
    final = save(tmp_path, 5)
    (final / "manifest.json").write_text(text)
    with pytest.raises(MfsdpError) as caught:
        manifest.require_complete(final)
    assert found in caught.value.problems[0].found
    assert not manifest.is_complete(final)


def test_a_manifest_may_not_point_outside_its_folder(tmp_path):
    final = save(tmp_path, 5)
    data = json.loads((final / "manifest.json").read_text())
    data["files"]["../../etc/passwd"] = {"bytes": 1, "crc32": "0"}
    (final / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(MfsdpError, match="below its own folder"):
        manifest.require_complete(final)


def test_interrupted_saves_are_refused(tmp_path):
    tmp = saving.begin(tmp_path, 7)
    manifest.write_manifest(tmp, make(7))
    with pytest.raises(MfsdpError, match="interrupted"):
        manifest.require_complete(tmp)
    (tmp_path / "step_000008").mkdir()
    with pytest.raises(MfsdpError, match="manifest.json is written last"):
        manifest.require_complete(tmp_path / "step_000008")
    assert finding.latest_complete(tmp_path) is None
    with pytest.raises(MfsdpError) as caught:
        finding.resolve(tmp_path)
    assert caught.value.problems[0].found == "step_000007.tmp, step_000008"


def test_verify_finds_one_flipped_bit(tmp_path):
    final = save(tmp_path, 5)
    shard = final / "dist_ckpt" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    assert manifest.is_complete(final), "same size: only verify can see it"
    (problem,) = manifest.verify(final)
    assert problem.code == MISMATCH and problem.key == str(shard)
    assert problem.found == f"CRC-32 {zlib.crc32(data):08x}" and f"{zlib.crc32(b'weights'):08x}" in problem.why


def test_resolve_accepts_every_way_to_name_a_checkpoint(tmp_path, monkeypatch):
    final = save(tmp_path / "checkpoints", 3)
    for given in (tmp_path, tmp_path / "checkpoints", final, final / "dist_ckpt"):
        assert finding.resolve(given) == final, given
    monkeypatch.chdir(final)
    assert finding.resolve(".") == final
    moved = tmp_path / "best"
    shutil.copytree(final, moved)
    assert finding.resolve(moved) == moved
    for absent, why in ((tmp_path / "nowhere", "there is no such folder"), (final / "trainer.json", "a checkpoint is a folder")):
        with pytest.raises(MfsdpError, match=why):
            finding.resolve(absent)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MfsdpError, match="there is no checkpoint here"):
        finding.resolve(tmp_path / "empty")


def test_the_pointer_decides_and_a_broken_pointer_is_told(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_000002\n")
    problems = []
    assert finding.latest_complete(tmp_path, problems).name == "step_000002" and problems == []
    for broken in ("step_000009\n", "nonsense", "step_000003.tmp"):
        (tmp_path / "latest").write_text(broken)
        problems = []
        assert finding.latest_complete(tmp_path, problems).name == "step_000003"
        assert [(p.level, p.found) for p in problems] == [("warning", broken.strip())]
    (tmp_path / "latest").unlink()
    problems = []
    assert finding.resolve(tmp_path, problems).name == "step_000003" and problems[0].found == "missing"


def test_prune_keeps_the_newest_the_pointed_and_what_is_not_complete(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "step_000003" / "trainer.json").unlink()  # incomplete: neither counted nor deleted
    (tmp_path / "latest").write_text("step_000002\n")
    (tmp_path / "step_000001.tmp").mkdir(), (tmp_path / "step_000006.tmp").mkdir()  # remains of a dead save, and a save in progress
    deleted = retention.prune(tmp_path, keep=2)
    assert sorted(p.name for p in deleted) == ["step_000001", "step_000001.tmp", "step_000004"]
    assert names(tmp_path) == ["latest", "step_000002", "step_000003", "step_000005", "step_000006.tmp"]
    assert retention.prune(tmp_path, keep=1) == []
    assert retention.prune(tmp_path, keep=None) == []


def test_a_save_makes_room_first_of_all_that_interrupted_ones_left(tmp_path):
    save(tmp_path, 4)
    for remains in ("step_000003.tmp", "step_000005.tmp", "step_000007.tmp"):
        (tmp_path / remains / "dist_ckpt").mkdir(parents=True)
    saving.begin(tmp_path, 6)
    assert names(tmp_path) == ["latest", "step_000004", "step_000006.tmp"]


def test_prune_without_a_complete_checkpoint_deletes_nothing(tmp_path):
    saving.begin(tmp_path, 1)
    assert retention.prune(tmp_path, keep=1) == [] and names(tmp_path) == ["step_000001.tmp"]


@pytest.mark.parametrize("seed", range(5))
def test_prune_against_its_rules_on_random_folders(tmp_path, seed):
    rng = random.Random(seed)
    complete = set(rng.sample(range(1, 12), rng.randint(1, 8)))
    for step in complete:
        save(tmp_path, step)
    pointed, keep = rng.choice(sorted(complete)), rng.randint(1, 5)
    (tmp_path / "latest").write_text(manifest.step_folder(pointed))
    retention.prune(tmp_path, keep)
    left = finding.complete_steps(tmp_path).keys()
    assert {max(complete), pointed} <= left <= complete
    assert len(left) == min(len(complete), max(keep, len({max(complete), pointed})))
    assert all(gone < kept for gone in complete - left for kept in left - {pointed})


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4, "first")
    final = save(tmp_path, 4, "second!")
    assert (final / "dist_ckpt" / "__0_0.distcp").read_text() == "second!"
    assert names(tmp_path) == ["latest", "step_000004"] and manifest.verify(final) == []


def test_a_replacement_killed_between_its_two_renames_keeps_the_step(tmp_path):
    final = save(tmp_path, 4, "first")
    tmp = saving.begin(tmp_path, 4)
    manifest.write_manifest(tmp, make(4))
    os.rename(final, tmp_path / "step_000004.old")
    assert finding.latest_complete(tmp_path).name == "step_000004.old"
    saving.begin(tmp_path, 4)  # the next attempt puts it back before it starts
    assert finding.latest_complete(tmp_path) == final and names(tmp_path) == ["latest", "step_000004", "step_000004.tmp"]


SAVER = """
import sys
from pathlib import Path
from mfsdp_cli.checkpoint import finding, manifest, retention, saving
sys.path.insert(0, sys.argv[2])
from test_manifest_helpers import make
root = Path(sys.argv[1])
found = finding.latest_complete(root)
step = manifest.require_complete(found).step if found else 0
print("ready", flush=True)
while True:
    # every third step is saved twice: the replacement of a folder is killed too
    for _ in range(2 if step % 3 == 0 else 1):
        tmp = saving.begin(root, step + 1)
        (tmp / "dist_ckpt").mkdir()
        for shard in range(3):
            (tmp / "dist_ckpt" / f"__{shard}_0.distcp").write_bytes(bytes([step % 256]) * 20_000)
        saving.commit(tmp, make(step + 1))
        retention.prune(root, 1)
    step += 1
"""


def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """Keeps one checkpoint only, the hardest case, with the disk's own flushes in between."""
    root, code = tmp_path / "checkpoints", tmp_path / "code"
    code.mkdir()
    (code / "test_manifest_helpers.py").write_text(
        "from mfsdp_cli.checkpoint.manifest import Manifest\n"
        f"def make(step): return Manifest(step, 10**6, 8 * step, ['model'], {TOPOLOGY!r}, 'float32', 512, 'A', 'm', 3)\n")
    rng = random.Random(0)
    last, deadline, kills, progressed, longest_s = 0, time.monotonic() + 30, 0, 0, 0.06
    repo = Path(manifest.__file__).parents[2]
    while kills < 25 and time.monotonic() < deadline:
        child = subprocess.Popen([sys.executable, "-c", SAVER, str(root), str(code)], cwd=repo, stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n", f"the saver could not start from what kill {kills} left"
        time.sleep(rng.uniform(0, longest_s))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        kills += 1
        found = finding.latest_complete(root)
        if found is None:
            assert last == 0, f"no complete checkpoint after kill {kills}, step {last} before"
            longest_s *= 1.5
            continue
        step = manifest.require_complete(found).step
        assert manifest.verify(found) == []
        assert step >= last, f"kill {kills}: step went from {last} back to {step}"
        progressed += step > last
        longest_s *= 1 if step > last else 1.5  # a busy machine needs longer for a save
        last = step
    assert kills >= 10 and progressed >= 5, (kills, progressed)


def run_and_die_at_event(event_number: int, action) -> bool:
    """Fork, run `action`, SIGKILL the child right before its Nth file operation. True when it finished before that."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event, _):
            nonlocal count
            if event == "open" or event.startswith(("os.", "shutil.")):
                count += 1
                if count == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"the child failed by itself: {status}"
    return status == 0


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_death_before_each_single_file_operation_of_a_save(tmp_path, again):
    """The same promise as above, without luck: every operation of save and prune is tried as the last one."""
    step = 4 if again else 5
    for event_number in range(1, 500):
        root = tmp_path / str(event_number)
        save(root, 4, "first")

        def save_and_prune():
            save(root, step, "second")
            retention.prune(root, 1)

        finished = run_and_die_at_event(event_number, save_and_prune)
        found = finding.latest_complete(root)
        assert found is not None and manifest.verify(found) == [], f"operation {event_number}"
        assert manifest.require_complete(found).step in (4, step)
        save(root, step, "third")
        retention.prune(root, 1)
        assert names(root) == ["latest", manifest.step_folder(step)], f"rubbish left after operation {event_number}"
        if finished:
            break
    assert finished and event_number > 20, event_number
