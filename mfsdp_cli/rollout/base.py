"""What a sampler is: prompts in, responses with their log-probabilities out, new weights from a folder.

A response is a function of the weights, its prompt and its own seed. It does not depend on what else is in the batch, so that a
resumed run, and any split of a batch over engines, repeats it (up to the rounding of kernels whose order of summation depends on
the size of the batch).
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.types import Response

if TYPE_CHECKING:
    from mfsdp_cli.config.schema_grpo import RolloutSettings


@dataclass(frozen=True)
class Sampling:
    """How to draw responses. A token's log-probability is that of the distribution it was drawn from: logits / temperature, then the
    top_k largest (-1: all; ties stay), then the smallest set of tokens with at least top_p of what is left, renormalised.
    Temperature 0 takes the likeliest token and reports the model's own log-probability, as at temperature 1.

    n               responses per prompt
    max_tokens      longest response, end-of-turn token included
    stop_token_ids  a response ends with the first of these, which stays in it
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    def __post_init__(self):
        assert self.n >= 1 and self.max_tokens >= 1 and self.temperature >= 0, self
        assert 0 < self.top_p <= 1 and (self.top_k == -1 or self.top_k >= 1), self


class Sampler(Protocol):
    """`version` counts the weight updates received; 0: no weights yet, and nothing may be generated."""

    version: int

    def generate(self, prompts: list[np.ndarray], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        """sampling.n responses to each prompt (int64 [P]); seeds[i * n + j] is that of response j to prompt i."""

    def update_weights(self, path: str) -> int:
        """Load a folder of safetensors with the model's own names (see `transfer`), forget every cached prefix, return the new version.
        Raises MfsdpError, and changes nothing, if a tensor is missing, superfluous or of another shape."""

    def sleep(self) -> None:
        """Free the accelerator's memory where that is possible; `wake` before the next generate or update_weights."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


def make_sampler(settings: RolloutSettings, model_dir: str | Path, shapes: dict[str, tuple[int, ...]], dtype: str, device: str,
                 max_model_len: int, trust_remote_code: bool = False) -> Sampler:
    """A sampler without weights: the first `update_weights` gives it those of the policy, whatever the run starts from.

    model_dir: configuration and tokenizer; shapes: name -> shape of the tensors that every update must bring; dtype bfloat16 | float32;
    device cpu | cuda; max_model_len: longest prompt and its response, tokens.
    Raises MfsdpError if vLLM is asked for and cannot be imported, or is built for another device."""
    made_by = sampler_class(settings.name)
    if settings.name == "hf":
        return made_by(model_dir, shapes, dtype, device, max_model_len, settings.max_num_seqs, trust_remote_code)
    return made_by(settings, model_dir, shapes, dtype, device, max_model_len, trust_remote_code)


def sampler_class(name: str) -> type:
    """The class of a sampler, vllm | hf, once all that it is made of is imported: most of a sampler's start, and neither the model nor
    the GPU is touched. Raises MfsdpError if vLLM is asked for and cannot be imported."""
    if name == "hf":
        from transformers.models.auto import modeling_auto  # noqa: F401

        from mfsdp_cli.rollout.hf import HfSampler

        return HfSampler
    assert name == "vllm", name
    try:
        from vllm import LLM  # noqa: F401: the package alone imports next to nothing
        from vllm.v1.worker import gpu_worker  # noqa: F401: the engine would import it later; the CPU's worker is one too
    except ImportError as error:
        why = f"vLLM cannot be imported: {error}"
        raise MfsdpError(Problem("rollout.name", "vllm", why, "install it, or set rollout.name=hf", code=MACHINE_UNFIT)) from error
    from mfsdp_cli.rollout.vllm import VllmSampler

    return VllmSampler


def response_seed(seed: int, step: int, prompt_row: int, index: int) -> int:
    """63 bits; the same on every machine and in every version of Python and numpy."""
    digest = hashlib.blake2b(struct.pack("<4q", seed % 2**63, step, prompt_row, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_ids(tokenizer, model_dir: Path, end_of_turn_id: int | None) -> tuple[int, ...]:
    """Every token that ends an answer: the tokenizer's eos, those of the model's generation config (of its config, if there is none),
    the chat template's."""
    file = next((file for name in ("generation_config.json", "config.json") if (file := model_dir / name).is_file()), None)
    configured = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file else None
    configured = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({tokenizer.eos_token_id, end_of_turn_id, *configured} - {None}))


# ---------------------------------------------------------------- shared by the samplers


def check_request(prompts: list[np.ndarray], sampling: Sampling, seeds: list[int], max_model_len: int) -> None:
    assert len(seeds) == sampling.n * len(prompts), (len(seeds), sampling.n, len(prompts))
    longest = max(map(len, prompts), default=0)
    assert longest + sampling.max_tokens <= max_model_len, f"{longest} + {sampling.max_tokens} tokens, and room for {max_model_len}"
    assert all(len(prompt) for prompt in prompts), "an empty prompt"


def respond(tokenizer, token_ids, log_probs, sampling: Sampling, version: int) -> Response:
    input_ids, log_probs = np.asarray(token_ids, dtype=np.int64), np.asarray(log_probs, dtype=np.float32)
    assert len(input_ids) == len(log_probs) > 0
    if not np.isfinite(log_probs).all():
        raise ArithmeticError("a sampled token has a log-probability that is not finite: the sampler's weights or logits are not")
    is_truncated = int(input_ids[-1]) not in sampling.stop_token_ids
    assert not is_truncated or len(input_ids) == sampling.max_tokens, "a response ended without a reason"
    return Response(input_ids, log_probs, tokenizer.decode(input_ids.tolist(), skip_special_tokens=True), is_truncated, version)
