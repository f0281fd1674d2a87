"""The memory terms that no run on one GPU shows, against the buffers that Megatron-FSDP really has: shards, gathered weights and
gradients on their way, with dense weights and experts shared by two ranks or not."""

from __future__ import annotations

import json

import pytest
from models import Layout, build, conversations, step
from ranks import run_ranks

from mfsdp_cli.launch import memory
from mfsdp_cli.config.parameters import model_shape

BATCH = conversations(seed=3)


def buffers(model, layout: Layout) -> dict[str, int]:
    """Bytes that stay, and the most of each kind of bucket at a time in two steps."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    engine = build(model, layout)
    groups = engine.module.module.param_and_grad_buffer.parameter_groups
    most = {"weight": 0, "grad": 0}

    def watch(cls):
        allocate = cls.allocate

        def watched(self, *args, **kwargs):
            bucket = allocate(self, *args, **kwargs)
            for kind, buffer in (("weight", "model_weight_buffer"), ("grad", "main_grad_buffer")):
                allocators = {id(a): a for g in groups if (a := getattr(g, buffer).temporary_bucket_allocator)}
                size = sum(b.data.untyped_storage().nbytes() for a in allocators.values() for b in a.buckets.values())
                most[kind] = max(most[kind], size)
            return bucket

        cls.allocate = watched

    watch(fsdp.TemporaryBucketAllocator)
    watch(fsdp.StorageResizeBasedBucketAllocator)
    for _ in range(2):
        step(engine, BATCH, 1e-3)

    def kept(name):
        return sum(getattr(g, name).data.nbytes for g in groups)

    moments = sum(entry[m].to_local().nbytes for entry in engine.optimizer.optimizer.state.values() for m in ("exp_avg", "exp_avg_sq"))
    return {"weights": kept("model_weight_buffer"), "master": kept("main_weight_buffer"), "gradients": kept("main_grad_buffer"),
            "moments": moments, "gathered": most["weight"], "waiting": most["grad"]}


@pytest.mark.parametrize("name, layout, split", [
    ("qwen2", Layout(ranks=2, dtype="bfloat16"), memory.Layout(dp=2, expert_dp=2)),
    ("qwen2", Layout(ranks=2, tp=2, dtype="bfloat16"), memory.Layout(tp=2, expert_dp=2, split=2)),
    ("qwen3_moe", Layout(ranks=2, dtype="bfloat16"), memory.Layout(dp=2, expert_dp=2)),
    ("qwen3_moe", Layout(ranks=2, ep=2, dtype="bfloat16"), memory.Layout(dp=2, ep=2)),
], ids=str)
def test_buffers_are_as_large_as_predicted(tiny, name, layout, split):
    """But for padding: at most 1 % even in these small models."""
    shape = model_shape(json.loads((tiny(name) / "config.json").read_text()))
    found = run_ranks(2, buffers, tiny(name), layout)[0]
    wanted = {
        "weights": memory.weights(shape, split), "master": memory.master_weights(shape, split), "gradients": memory.gradients(shape, split),
        "moments": memory.moments(shape, split), "gathered": memory.gathered_weights(shape, split),
        "waiting": memory.waiting_gradients(shape, split, shape.layers),
    }
    assert {key: found[key] for key in wanted if not wanted[key]} == {key: 0 for key in wanted if not wanted[key]}
    assert found == pytest.approx(wanted, rel=0.01)
    assert all(found[key] >= wanted[key] - 8 for key in ("weights", "master", "gradients"))
