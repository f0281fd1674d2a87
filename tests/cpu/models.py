"""What the tests compare: the engine on forked ranks, and a plain transformers loop with torch's AdamW, one conversation at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mfsdp_cli.config.schema import EngineSettings, OptimSettings
from mfsdp_cli.types import Sample

FAMILIES = {
    "qwen2": {"family": "qwen2"},
    "qwen2-untied": {"family": "qwen2", "tied": False},
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False},
}
# The default epsilon, 1e-8, lets Adam make a full step out of a gradient that is rounding noise: a plain loop then differs from
# itself with the conversations in another order by more than the 1e-5 asked for here.
OPTIM = OptimSettings(lr=1e-3, weight_decay=0.1, betas=[0.9, 0.95], clip_grad=1.0, eps=1e-6)
# Uneven on purpose. Dealt out in turn to two ranks: 13 + 7 + 5 tokens to one, 30 + 22 to the other.
LENGTHS = (13, 30, 7, 22, 5)


def conversations(seed: int = 0, lengths=LENGTHS, vocab_size: int = 430) -> list[Sample]:
    """Random tokens; of each conversation a random first part is not learned. No special tokens: transformers gives the row of
    the padding token in the input embedding no gradient, even where it is a token of the text."""
    random = np.random.default_rng(seed)
    return [Sample(random.integers(0, vocab_size, n), np.arange(n) >= random.integers(1, max(n - 1, 2)), row)
            for row, n in enumerate(lengths)]


# ---------------------------------------------------------------- on a rank


@dataclass(frozen=True)
class Layout:
    """ranks = dp * tp. num_micro: micro batches that each rank's conversations are dealt out to; some stay empty."""

    ranks: int = 1
    tp: int = 1
    ep: int = 1
    sp: bool | None = None
    num_micro: int = 1
    dtype: str = "float32"
    recompute: str = "none"

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(tensor_model_parallel_size=self.tp, expert_model_parallel_size=self.ep, sequence_parallel=self.sp,
                              dtype=self.dtype, recompute=self.recompute, device="cpu")

    def __str__(self) -> str:
        plain = vars(Layout())
        return "-".join(f"{key}{value}" for key, value in vars(self).items() if value != plain[key]) or "one"


def build(model: Path, layout: Layout, optim: OptimSettings | None = OPTIM, **options):
    """The engine of this rank. A process has one layout for all the models that it builds."""
    from megatron.core import parallel_state as mpu

    from mfsdp_cli.engine.megatron import MegatronEngine, init_distributed

    device = "cpu" if mpu.is_initialized() else init_distributed(layout.settings, timeout_s=60)
    import torch

    return MegatronEngine(str(model), layout.settings, optim, device=torch.device(device), **options)


def micro_batches(engine, batch: list[Sample], num_micro: int) -> list:
    from mfsdp_cli.data.pack import pack

    mine = batch[engine.dp_rank::engine.dp_size]
    return [pack(mine[i::num_micro], multiple_of=engine.sequence_multiple) for i in range(num_micro)]


def step(engine, batch: list[Sample], lr: float, num_micro: int = 1) -> tuple[float, float]:
    """One optimizer step as the trainer takes it: (loss over all ranks, gradient norm before clipping)."""
    import torch.distributed as dist

    num_targets = sum(sample.num_targets for sample in batch)
    loss = engine.forward_backward(micro_batches(engine, batch, num_micro), lambda lp, b: -(lp * b.target_mask).sum() / num_targets)
    norm = engine.optimizer_step(lr)
    dist.all_reduce(loss, group=engine.dp_group)
    return loss.item(), norm.item()


def packed_log_probs(engine, batch: list[Sample]) -> list[np.ndarray]:
    """Log-probabilities of tokens 1, 2, … of each conversation, all packed into one micro batch, the same on every rank."""
    from mfsdp_cli.data.pack import pack

    everything_learned = [replace(s, loss_mask=np.ones(s.num_tokens, bool)) for s in batch]
    packed = pack(everything_learned, multiple_of=engine.sequence_multiple)
    [log_probs] = engine.log_probs([packed])
    starts = packed.cu_seqlens.tolist()
    return [log_probs[start:start + s.num_tokens - 1].numpy() for start, s in zip(starts, batch)]


def weights(engine) -> dict:
    """Hugging Face name -> float32 tensor."""
    import torch

    return dict(engine.named_weights(torch.float32))


# ---------------------------------------------------------------- the reference


class HfLoop:
    """Nothing of ours but the tokens: a model of transformers in float32, conversations one after the other, torch's AdamW."""

    def __init__(self, folder: Path, optim: OptimSettings = OPTIM):
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.clip_grad = optim.clip_grad
        parameters = dict(self.model.named_parameters())
        exempt = [p for name, p in parameters.items() if "norm" in name or name.endswith("bias")]
        decayed = [p for p in parameters.values() if not any(p is other for other in exempt)]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)

    def log_probs(self, sample: Sample):
        import torch

        ids = torch.from_numpy(sample.input_ids)
        return torch.log_softmax(self.model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]

    def backward(self, batch: list[Sample]) -> float:
        import torch

        self.optimizer.zero_grad()
        num_targets = sum(int(s.loss_mask[1:].sum()) for s in batch)
        loss = -sum((self.log_probs(s) * torch.from_numpy(s.loss_mask[1:])).sum() for s in batch) / num_targets
        loss.backward()
        return loss.item()

    def step(self, batch: list[Sample], lr: float) -> tuple[float, float]:
        import torch

        loss = self.backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad or float("inf")).item()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss, norm

    def weights(self, scratch: Path) -> dict:
        """As they would lie in the model's folder: transformers splits what it has fused."""
        from safetensors.torch import load_file

        self.model.save_pretrained(scratch)
        return load_file(scratch / "model.safetensors")


def largest_difference(mine: dict, theirs: dict) -> float:
    """Over two dicts of tensors, which must have the same names."""
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    return max((mine[name].double() - theirs[name].double()).abs().max().item() for name in theirs)
