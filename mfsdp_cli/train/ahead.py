"""Responses that were sampled one step ahead, as bytes of a checkpoint: by weights that a resumed run no longer has."""

from __future__ import annotations

import io
import json

import numpy as np

from mfsdp_cli.types import Prompt, Response


def to_bytes(prompts: list[Prompt], responses: list[list[Response]], num_updates: int) -> bytes:
    """num_updates: that the samplers have had by now; the age of each response is kept, since a resumed run counts anew."""
    flat = [response for group in responses for response in group]
    texts = np.frombuffer(json.dumps([r.text for r in flat]).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(
        file, texts=texts, rows=np.array([p.row for p in prompts]), per_prompt=np.array([len(group) for group in responses]),
        lengths=np.array([len(r.input_ids) for r in flat]), input_ids=np.concatenate([r.input_ids for r in flat]),
        log_probs=np.concatenate([r.log_probs for r in flat]), is_truncated=np.array([r.is_truncated for r in flat]),
        age=np.array([num_updates - r.weight_version for r in flat]),
    )
    return file.getvalue()


def from_bytes(data: bytes, prompts: list[Prompt], per_prompt: int, num_updates: int) -> list[list[Response]] | None:
    """The responses to these prompts, so many to each; None when those kept are of other prompts or of another number."""
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        found = {name: kept[name] for name in kept.files}
    if found["rows"].tolist() != [p.row for p in prompts] or set(found["per_prompt"].tolist()) != {per_prompt}:
        return None
    ends = np.cumsum(found["lengths"])[:-1]
    parts = zip(np.split(found["input_ids"], ends), np.split(found["log_probs"], ends), json.loads(found["texts"].tobytes()),
                found["is_truncated"].tolist(), found["age"].tolist(), strict=True)
    flat = [Response(ids, log_probs, text, cut, num_updates - age) for ids, log_probs, text, cut, age in parts]
    return [flat[i : i + per_prompt] for i in range(0, len(flat), per_prompt)]
