"""A sampler out of transformers and nothing else: for machines without vLLM, and as the yardstick for those with it.

Rows of a batch are padded on the left, share the prefill of their prompt, and leave the batch, and its cache, when they end. Each draws
its tokens by the inverse of the cumulative distribution from uniform numbers of its own: one Philox stream a row, one number a token.
"""

from __future__ import annotations

import numpy as np
import torch

from mfsdp_cli.rollout.base import Sampling, check_request, respond
from mfsdp_cli.rollout.transfer import check_same_tensors, tensor_shapes
from mfsdp_cli.types import Response

DRAW_ELEMENTS = 1 << 24  # logits of one piece when drawing: 128 MiB in float64


class HfSampler:
    """See `base.Sampler`. max_batch: rows decoded at a time, which bounds the memory of the cache."""

    def __init__(self, model_dir, shapes: dict, dtype: str, device: str, max_model_len: int, max_batch: int, trust_remote_code: bool = False):
        from transformers import AutoConfig, AutoTokenizer

        self.version = 0
        self.max_model_len, self.max_batch = max_model_len, max_batch
        self._dtype, self._device, self._remote = getattr(torch, dtype), torch.device(device), trust_remote_code
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        self._config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        self._shapes = shapes
        self._model = None  # until the first update
        self._awake = True

    def _load(self, folder):
        """Through from_pretrained: it knows how the checkpoint's names map to the module's (fused experts)."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(folder, config=self._config, generation_config=GenerationConfig(), dtype=self._dtype,
                                                     trust_remote_code=self._remote)
        return model.requires_grad_(False).eval().to(self._device)

    def update_weights(self, path: str) -> int:
        assert self._awake
        check_same_tensors(path, tensor_shapes(path), self._shapes, bool(getattr(self._config, "tie_word_embeddings", False)))
        self._model = None  # two copies never lie on the device at once
        self._model = self._load(path)
        self.version += 1
        return self.version

    def sleep(self) -> None:
        self._model, self._awake = self._model and self._model.to("cpu"), False

    def wake(self) -> None:
        self._model, self._awake = self._model and self._model.to(self._device), True

    def close(self) -> None:
        self._model = None

    @torch.inference_mode()
    def generate(self, prompts: list[np.ndarray], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        assert self._awake and self.version, "asleep, or without weights"
        check_request(prompts, sampling, seeds, self.max_model_len)
        # Rows of similar length go together: least padding.
        order = sorted(range(len(seeds)), key=lambda row: len(prompts[row // sampling.n]))
        responses: list = [None] * len(seeds)
        for start in range(0, len(order), self.max_batch):
            rows = order[start:start + self.max_batch]
            used = sorted({row // sampling.n for row in rows})
            owner = [used.index(row // sampling.n) for row in rows]
            decoded = self._decode([prompts[i] for i in used], owner, [seeds[row] for row in rows], sampling)
            for row, (token_ids, log_probs) in zip(rows, decoded, strict=True):
                responses[row] = respond(self._tokenizer, token_ids, log_probs, sampling, self.version)
        return [responses[i:i + sampling.n] for i in range(0, len(responses), sampling.n)]

    def _decode(self, prompts: list[np.ndarray], owner: list[int], seeds: list[int], sampling: Sampling) -> list[tuple]:
        """(token ids, log-probs) of each row; row r continues prompts[owner[r]]."""
        from transformers import DynamicCache

        device, num_rows = self._device, len(seeds)
        ids, mask = (t.to(device) for t in pad_left(prompts))
        cache = DynamicCache(config=self._config)
        logits = self._forward(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        owner = torch.tensor(owner, device=device)
        cache.batch_select_indices(owner)
        logits, mask = logits[owner], mask[owner]
        position = mask.sum(-1)  # of the token drawn next
        uniforms = torch.from_numpy(uniform_streams(seeds, sampling.max_tokens)).to(device)
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        tokens = torch.zeros(num_rows, sampling.max_tokens, dtype=torch.int64, device=device)
        log_probs = torch.zeros(num_rows, sampling.max_tokens, device=device)
        num_tokens = torch.full((num_rows,), sampling.max_tokens, device=device)
        live = torch.arange(num_rows, device=device)
        for step in range(sampling.max_tokens):
            token, log_prob = draw(logits, uniforms[live, step], sampling)
            tokens[live, step], log_probs[live, step] = token, log_prob
            ended = torch.isin(token, stops)
            if ended.any():
                num_tokens[live[ended]] = step + 1
                kept = (~ended).nonzero()[:, 0]
                live, token, mask, position = live[kept], token[kept], mask[kept], position[kept]
                cache.batch_select_indices(kept)
            if len(live) == 0 or step + 1 == sampling.max_tokens:
                break
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            logits = self._forward(token[:, None], mask, position[:, None], cache)
            position = position + 1
        tokens, log_probs = tokens.cpu().numpy(), log_probs.cpu().numpy()
        return [(tokens[row, :n], log_probs[row, :n]) for row, n in enumerate(num_tokens.tolist())]

    def _forward(self, input_ids, mask, position_ids, cache) -> torch.Tensor:
        """Logits [rows, vocabulary] after the last token."""
        return self._model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True,
                           logits_to_keep=1).logits[:, -1]


def pad_left(prompts: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, longest] token ids, and 1 where they are no padding."""
    longest = max(map(len, prompts))
    ids, mask = np.zeros((len(prompts), longest), dtype=np.int64), np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt):] = prompt
        mask[row, longest - len(prompt):] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def uniform_streams(seeds: list[int], length: int) -> np.ndarray:
    """float64 [seeds, length] in [0, 1 - 2^-52], from Philox's raw stream, which numpy keeps the same in all its versions."""
    raw = np.stack([np.random.Philox(key=seed).random_raw(length) for seed in seeds])
    return (raw >> np.uint64(12)) * 2.0**-52


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Token int64 [R] for each row of logits [R, V] and its log-probability float32 [R], from one uniform number a row, float64 [R]."""
    size = max(1, DRAW_ELEMENTS // logits.shape[-1])
    pieces = [_draw(*piece, sampling) for piece in zip(logits.split(size), uniforms.split(size), strict=True)]
    return torch.cat([token for token, _ in pieces]), torch.cat([log_prob for _, log_prob in pieces])


def _draw(logits, uniforms, sampling):
    log_probs = processed(logits, sampling)
    if sampling.temperature == 0:
        token = log_probs.argmax(-1)
    else:
        below = log_probs.double().exp().cumsum(-1)
        # The first token at which the distribution exceeds the number: never one of probability 0.
        token = torch.searchsorted(below, uniforms[:, None] * below[:, -1:], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)  # logits that are not numbers; the log-probability tells
    return token, log_probs.gather(-1, token[:, None])[:, 0]


def processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities float32 [R, V] of the distribution that is drawn from, -inf where a token is left out. vLLM's order and ties."""
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        ascending, index = logits.sort(dim=-1)
        left_out = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        left_out[:, -1] = False
        logits = logits.masked_fill(left_out.scatter(-1, index, left_out), -torch.inf)
    return logits.log_softmax(-1)
