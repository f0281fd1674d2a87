"""What the tests of the samplers share: requests, and the log-probabilities of a response worked out without cache or padding."""

from __future__ import annotations

import numpy as np

from mfsdp_cli.config.schema_grpo import RolloutSettings
from mfsdp_cli.rollout.base import Sampling, make_sampler
from mfsdp_cli.rollout.transfer import tensor_shapes

LENGTHS = (5, 9, 2, 9, 14)
TOLERANCE = 1e-4


def sampler_of(folder, max_model_len: int = 64, **settings):
    """A sampler on the CPU in float32 that has had one update, version 1: the folder's own weights."""
    sampler = make_sampler(RolloutSettings(**settings), folder, tensor_shapes(folder), "float32", "cpu", max_model_len)
    sampler.update_weights(str(folder))
    return sampler


def plain(**options) -> Sampling:
    return Sampling(**{"n": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 20, "stop_token_ids": (7,), **options})


def prompts_of(lengths=LENGTHS, vocab_size: int = 430) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab_size, n) for n in lengths]


def seeds_of(count: int, first: int = 100) -> list[int]:
    return list(range(first, first + count))


def log_probs_alone(model, prompt, token_ids, sampling: Sampling) -> np.ndarray:
    """Of each token of a response, by one forward pass without padding or cache, and numpy."""
    import torch

    ids = torch.from_numpy(np.concatenate([prompt, token_ids]))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1:-1].double().numpy()
    found = []
    for row, token in zip(logits, token_ids.tolist(), strict=True):
        row = row / (sampling.temperature or 1.0)
        order = np.argsort(-row, kind="stable")
        if sampling.temperature and sampling.top_k > 0:
            order = order[:sampling.top_k]
        p = np.exp(row[order] - row[order[0]])
        p /= p.sum()
        if sampling.temperature and sampling.top_p < 1:
            count = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1  # the smallest set with at least top_p
            order, p = order[:count], p[:count] / p[:count].sum()
        [at] = np.flatnonzero(order == token)
        found.append(np.log(p[at]))
    return np.array(found)


def hf_model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def file_weights(folder):
    """What the trainer streams: names and tensors of the checkpoint."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as reader:
        yield from [(name, reader.get_tensor(name)) for name in reader.keys()]  # noqa: SIM118
