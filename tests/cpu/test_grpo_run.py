"""`mfsdp grpo` whole: launcher, driver, local Ray, two trainer ranks and a sampler; killed, continued, and its failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from program import finish, mfsdp, start
from ranks import free_port

from mfsdp_cli.errors import MACHINE_UNFIT, OK, RUN_FAILED, SIGNAL_BASE, STOPPED, MfsdpError
from mfsdp_cli.launch.run import PROCESS_MARK, marked_processes
from mfsdp_cli.train.metrics import read_metrics

EXACT = ("reward", "pass_rate", "loss", "grad_norm", "entropy", "response_length", "samples_consumed", "mismatch/abs")


def command(tiny, prompts, run_dir, *more):
    # A tiny random model never answers right: "length" gives rewards that differ, and so gradients.
    return ["grpo", "--preset", "grpo-tiny-cpu", "--model", tiny("qwen2"), "--train-files", prompts / "train.parquet", "--output", run_dir, "reward.name=length",
            "data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "rollout.n=4", "trainer.total_training_steps=4", "trainer.save_freq=2", *more]


def marks_below(process) -> str:
    """The mark that the launcher gave its processes, read from its child."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == process.pid:
                environ = dict(e.split("=", 1) for e in (folder / "environ").read_text().split("\0") if "=" in e)
                return environ[PROCESS_MARK]
        except OSError:  # it has just ended
            continue
    raise AssertionError("the launcher has no child")


def wait_for(process, text: str) -> None:
    for line in process.stderr:
        if line.startswith(text):
            return
    raise AssertionError(f"the run ended before {text!r}")


def course(run_dir) -> list[tuple]:
    return [tuple(r[k] for k in EXACT) for r in read_metrics(run_dir) if "loss" in r]


def test_killed_in_the_middle_and_continued_is_the_same_run(tiny, prompts, tmp_path):
    """The policy takes two updates a step, so old log-probabilities are computed; SIGTERM after step 1, then kill -9 of everything
    in step 4."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    code, out, err = mfsdp(*command(tiny, prompts, straight))
    assert code == OK and out == f"{straight}/checkpoints/step_000004\n", err
    metrics = course(straight)
    assert len(metrics) == 4 and all(r[3] > 0 for r in metrics)  # every step had a gradient
    assert all(r[-1] < 1e-4 for r in metrics)  # the sampler's log-probabilities are the trainer's

    process = start(*command(tiny, prompts, broken))
    wait_for(process, "step 1/4")
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    stopped_at = int(out.strip()[-6:])
    assert code == STOPPED and out == f"{broken}/checkpoints/step_{stopped_at:06d}\n" and stopped_at in (1, 2), err

    process = start(*command(tiny, prompts, broken))
    wait_for(process, "step 3/4")
    for pid in marked_processes(marks_below(process)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    code, out, _ = finish(process)
    assert code == SIGNAL_BASE + signal.SIGKILL and out == ""
    code, out, err = mfsdp(*command(tiny, prompts, broken))
    assert code == OK and out == f"{broken}/checkpoints/step_000004\n", err
    assert course(broken) == metrics
    for step in (3, 4):
        tables = [pq.read_table(run / "samples" / f"step_{step:06d}.parquet") for run in (straight, broken)]
        assert tables[0].equals(tables[1])


def test_a_killed_trainer_ends_the_run_and_leaves_no_process(tiny, prompts, tmp_path):
    process = start(*command(tiny, prompts, tmp_path / "run", "trainer.total_training_steps=200", "trainer.save_freq=-1"))
    wait_for(process, "step 1/200")
    mark = marks_below(process)
    trainers = [p for p in marked_processes(mark) if b"TrainerActor" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(trainers) == 2
    os.kill(trainers[1], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == RUN_FAILED and out == "", err
    assert re.search("error: trainer[01] failed", err) or "ActorDied" in err, err  # whoever noticed first: the other trainer, or the driver
    assert marked_processes(mark) == []


@pytest.fixture
def ray_cluster(tmp_path):
    """Address of a Ray cluster of three CPUs that is there already, and its process."""
    address = f"127.0.0.1:{free_port()}"
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=3", "--node-ip-address=127.0.0.1",
               f"--port={address.rpartition(':')[2]}", "--include-dashboard=false", "--disable-usage-stats"]
    with open(tmp_path / "ray.log", "w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "ray.log").read_text()
            time.sleep(0.5)
        yield address, process
    finally:
        process.terminate()
        process.wait(60)


def test_on_a_cluster_that_is_there(tiny, prompts, tmp_path, ray_cluster):
    """The run uses it and leaves it alone; a run that it has no room for is refused and not awaited."""
    address, process = ray_cluster
    joined = ["--ray-address", address, "trainer.total_training_steps=1", "actor.ppo_mini_batch_size=4", "trainer.save_freq=-1"]
    code, out, err = mfsdp(*command(tiny, prompts, tmp_path / "run", *joined))
    assert code == OK and out == f"{tmp_path / 'run'}/checkpoints/step_000001\n", err
    code, out, err = mfsdp(*command(tiny, prompts, tmp_path / "large", *joined, "--nproc", 4))
    assert code == MACHINE_UNFIT and out == "" and "this run needs 5" in err, err
    assert process.poll() is None


def test_a_cluster_that_is_too_small_is_refused():
    """Ray by itself would wait for ever. Two trainer ranks with a GPU each and one sampler of two GPUs, on one node of three."""
    from mfsdp_cli.train.ray_group import require_resources

    bundles = [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 2}]
    require_resources(bundles, {"CPU": 3.0, "GPU": 4.0}, {"10.0.0.1": {"CPU": 3.0, "GPU": 4.0}})
    for resources, found in (({"CPU": 3.0, "GPU": 3.0}, "this run needs 4; by node: 10.0.0.1 3"), ({"CPU": 2.0, "GPU": 4.0}, "this run needs 3; by node")):
        with pytest.raises(MfsdpError) as caught:
            require_resources(bundles, resources, {"10.0.0.1": resources})
        assert caught.value.exit_code == MACHINE_UNFIT and found in str(caught.value)


def test_a_wait_ends_and_says_what_it_waited_for():
    import ray

    from mfsdp_cli.train.ray_group import wait

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        never = ray.remote(num_cpus=2)(lambda: None).remote()  # the cluster has one CPU
        with pytest.raises(MfsdpError, match="waiting = the impossible: 1 of 2 not there after 2 s"):
            wait([ray.put(1), never], "the impossible", 2.0)
    finally:
        ray.shutdown()
