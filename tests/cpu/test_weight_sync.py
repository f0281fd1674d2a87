"""The two ways of vLLM's own weight transfer, driver to trainer rank to sampler, with stand-ins for the GPU and for vLLM's two engines.

The real engines were run on GPUs (README); here it is shown that the parts call each other rightly, that what arrives is the policy,
and that an update which lacks a tensor is refused.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from direct import Direct, by_letters, run_loop, settings_for, steps

SENT: list = []  # what lies in the buffer of the GPU, or on the wire


@dataclass
class UpdateInfo:
    names: list
    dtype_names: list
    shapes: list
    packed: bool = True


def info_of(part) -> UpdateInfo:
    names, tensors = zip(*part)
    return UpdateInfo(list(names), [str(t.dtype).removeprefix("torch.") for t in tensors], [list(t.shape) for t in tensors])


class IPCWeightTransferEngine:
    @staticmethod
    def trainer_send_weights(iterator, args):
        assert args["packed"]
        weights = list(iterator)
        for part in (weights[:5], weights[5:]):  # two buffers
            SENT[:] = part
            args["send_mode"](info_of(part))


class NCCLWeightTransferEngine:
    @staticmethod
    def trainer_init(place):
        assert place["world_size"] == 2 and place["master_port"] > 0
        return "group"

    @staticmethod
    def trainer_send_weights(iterator, args):
        assert args == {"group": "group", "packed": True}
        SENT[:] = iterator


def stand_in(monkeypatch) -> None:
    for name, engine in (("ipc_engine", IPCWeightTransferEngine), ("nccl_engine", NCCLWeightTransferEngine)):
        module = types.ModuleType(f"vllm.distributed.weight_transfer.{name}")
        setattr(module, engine.__name__, engine)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


class Engine:
    """What VllmSampler asks of vLLM's LLM in an update; the weights end up in a transformers model."""

    def __init__(self, sampler, folder: Path):
        self.sampler, self.folder, self.opened, self.arrived = sampler, folder, None, None

    def init_weight_transfer_engine(self, request):
        self.opened = request["init_info"]

    def start_weight_update(self):
        assert self.opened is not None
        self.arrived = {}

    def update_weights(self, request):
        info = request["update_info"]
        assert info["names"] == [name for name, _ in SENT] and info["shapes"] == [list(t.shape) for _, t in SENT]
        self.arrived |= dict(SENT)

    def finish_weight_update(self):
        from safetensors.torch import save_file

        self.folder.mkdir(exist_ok=True)
        save_file({k: v.clone() for k, v in self.arrived.items()}, self.folder / "model.safetensors", metadata={"format": "pt"})
        self.sampler.update_weights(str(self.folder))

    def reset_prefix_cache(self):
        return True


class WithVllmsTransfer(Direct):
    """A sampler with VllmSampler's own methods of an update, over transformers."""

    on_gpu = True

    def start_samplers(self, *args):
        from mfsdp_cli.rollout.vllm import VllmSampler

        super().start_samplers(*args)
        hf = self.sampler
        sampler = VllmSampler.__new__(VllmSampler)
        sampler.version, sampler._shapes, sampler._config, sampler._awake = 0, hf._shapes, hf._config, True
        sampler._llm = Engine(hf, Path(self.settings.trainer.output_dir) / "arrived")
        sampler.generate = hf.generate
        self.sampler = sampler

    def free_address(self):
        return "127.0.0.1", 1234

    def on_both(self, of_ranks, rank_args, of_samplers, sampler_args):
        self.on_ranks(of_ranks, *rank_args)
        self.on_samplers(of_samplers, *sampler_args[0])

    def hand_over_weights(self):
        self.on_ranks("hand_over_weights", lambda info: self.on_samplers("receive", info))


class LosesATensor(WithVllmsTransfer):
    def on_samplers(self, method, *args):
        if method == "receive" and "model.norm.weight" in args[0]["names"]:
            at = args[0]["names"].index("model.norm.weight")
            del SENT[at]
            args = ({**args[0], **{k: args[0][k][:at] + args[0][k][at + 1:] for k in ("names", "dtype_names", "shapes")}},)
        return super().on_samplers(method, *args)


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_the_sampler_has_the_policy_after_every_step(tiny, prompts, tmp_path, monkeypatch, way):
    stand_in(monkeypatch)
    settings = settings_for(tiny, prompts, tmp_path, rollout__weight_transfer=way)
    records = steps(run_loop(settings, tmp_path, by_letters, WithVllmsTransfer))
    assert len(records) == 3 and all(r["mismatch/abs"] < 1e-5 and r["staleness"] == 0 and r["grad_norm"] > 0 for r in records)


@pytest.mark.parametrize("way", ["ipc", "nccl"])
def test_an_update_that_lacks_a_tensor_is_refused(tiny, prompts, tmp_path, monkeypatch, way):
    stand_in(monkeypatch)
    with pytest.raises(RuntimeError, match="model.norm.weight is missing"):
        run_loop(settings_for(tiny, prompts, tmp_path, rollout__weight_transfer=way), tmp_path, by_letters, LosesATensor)
