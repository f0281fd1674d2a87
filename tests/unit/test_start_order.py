"""GRPO's trainers and samplers start at the same time: samplers import while trainers load the model, and touch the GPU only when the
trainers have theirs. The cluster's own code, with stand-ins for Ray's actors; imports Ray, starts none."""

from __future__ import annotations

import pytest
from grpo_for_tests import grpo_settings

RESULTS = {"node": ("here", [0]), "free_port": 1234, "start": {"step": 7}}


class Actors:
    """In place of an actor class: every call to one of its actors is noted, none is answered before somebody waits."""

    def __init__(self, kind: str, events: list):
        self.kind, self.events, self.count = kind, events, 0

    def options(self, **_):
        return self

    def remote(self, *_):
        self.count += 1
        return Handle(f"{self.kind}{self.count - 1}", self.events)


class Handle:
    def __init__(self, name: str, events: list):
        self.name, self.events = name, events

    def __getattr__(self, method: str):
        return Method(self, method)


class Method:
    def __init__(self, actor: Handle, name: str):
        self.actor, self.name = actor, name

    def remote(self, *args) -> tuple:
        called = (self.actor.name, args[0] if self.name == "call" else self.name)
        self.actor.events.append(called)
        return called


class Group:
    def ready(self) -> tuple:
        return "group", "ready"


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """(Cluster on 2 GPUs with its actors made, what has happened: calls as (actor, method), waits as (ended, for what))."""
    import ray

    from mfsdp_cli.train import ray_group

    events: list = []

    def wait(refs, *_) -> list:
        events.append(("ended", tuple(refs)))
        return [RESULTS.get(method) for _, method in refs]

    for name, value in {"wait": wait, "TrainerActor": Actors("trainer", events), "SamplerActor": Actors("sampler", events),
                        "placement_group": lambda *_, **__: Group()}.items():
        monkeypatch.setattr(ray_group, name, value)
    for name, value in {"cluster_resources": {"CPU": 8, "GPU": 2}, "available_resources": {}, "nodes": []}.items():
        monkeypatch.setattr(ray, name, lambda value=value: value)
    settings = grpo_settings(trainer__n_gpus_per_node=2, rollout__tensor_model_parallel_size=1, rollout__num_engines=2)
    made = ray_group.Cluster(settings, tmp_path, tmp_path, on_gpu=True)
    made._start_actors()
    return made, events


def test_samplers_import_while_trainers_load(cluster):
    cluster, events = cluster
    assert cluster.start_trainers() == {"step": 7}
    fired = [("sampler0", "prepare"), ("sampler1", "prepare"), ("trainer0", "start"), ("trainer1", "start")]
    assert [e for e in events if e in fired] == fired
    # one wait for all of it, after all of it has begun: whichever fails first is told first
    waits = [done for what, done in events if what == "ended" and set(done) & set(fired)]
    assert waits == [(*fired[2:], *fired[:2])] and events[-1] == ("ended", waits[0])


def test_samplers_start_when_trainers_have_loaded_and_are_waited_for_later(cluster):
    cluster, events = cluster
    cluster.start_trainers()
    loaded = len(events)
    cluster.start_samplers("folder", {})
    started = [("sampler0", "start"), ("sampler1", "start")]
    assert not set(started) & set(events[:loaded]) and events[loaded:] == started
    cluster.samplers_started()
    assert events[loaded + 2 :] == [("ended", tuple(started))]


def test_a_sampler_that_cannot_be_imported_is_told_by_its_import(monkeypatch):
    import sys

    from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError
    from mfsdp_cli.rollout.base import sampler_class

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MfsdpError, match="rollout.name = vllm: vLLM cannot be imported: import of vllm halted") as caught:
        sampler_class("vllm")
    assert caught.value.exit_code == MACHINE_UNFIT and caught.value.problems[0].fix == "install it, or set rollout.name=hf"
