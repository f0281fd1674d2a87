"""From responses to what is learned of them: scores, advantages, experience; and the record that people look at."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.rewards.base import STATUSES, RewardResult
from mfsdp_cli.rewards.length import overlong_penalty
from mfsdp_cli.train.advantages import group_advantages, zero_variance_groups
from mfsdp_cli.types import Experience, Prompt, Response, Sample


@dataclass
class Answer:
    """A response with its score. `group` numbers the prompts of a batch; `reward` is the score with penalties, `advantage` of it."""

    prompt: Prompt
    response: Response
    group: int
    index: int
    result: RewardResult
    reward: float
    advantage: float = 0.0


def score(prompts: list[Prompt], responses: list[list[Response]], pool, settings: GrpoSettings, first_group: int = 0) -> list[Answer]:
    """Answers in order, scored in the pool's processes."""
    pairs = [(g, i, p, r) for g, (p, group) in enumerate(zip(prompts, responses, strict=True)) for i, r in enumerate(group)]
    results = pool.score([(p.data_source, r.text, p.ground_truth, p.extra_info) for _, _, p, r in pairs])
    assert len(results) == len(pairs), (len(results), len(pairs))
    algorithm, limit = settings.algorithm, settings.data.max_response_length
    answers = []
    for (g, i, prompt, response), result in zip(pairs, results):
        reward = result.score
        if algorithm.overlong_buffer_length:
            reward += overlong_penalty(len(response.input_ids), limit, algorithm.overlong_buffer_length, algorithm.overlong_penalty_factor)
        answers.append(Answer(prompt, response, first_group + g, i, result, reward))
    return answers


def usable_groups(answers: list[Answer]) -> list[Answer]:
    """Those of groups whose rewards differ."""
    flat = set(zero_variance_groups([a.reward for a in answers], [a.group for a in answers]).tolist())
    return [a for a in answers if a.group not in flat]


def split(answers: list[Answer], groups_per_part: int) -> list[list[int]]:
    """Positions of the answers, by so many groups at a time, in order."""
    groups = list(dict.fromkeys(a.group for a in answers))
    parts = [set(groups[i : i + groups_per_part]) for i in range(0, len(groups), groups_per_part)]
    return [[i for i, a in enumerate(answers) if a.group in part] for part in parts]


def subtract_kl(answers: list[Answer], old: dict, ref: dict, settings: GrpoSettings) -> dict:
    """reward -= kl_coef * sum over the response of the KL estimate, as verl's apply_kl_penalty; its mean per token."""
    import torch

    from mfsdp_cli.train import losses

    total, count = 0.0, 0
    for i, answer in enumerate(answers):
        kl = losses.kl_penalty(torch.from_numpy(old[i]), torch.from_numpy(ref[i]), settings.algorithm.kl_penalty)
        answer.reward -= settings.algorithm.kl_coef * float(kl.sum())
        total, count = total + float(kl.sum()), count + len(kl)
    return {"kl_in_reward": total / max(1, count)}


def set_advantages(answers: list[Answer], settings: GrpoSettings) -> None:
    algorithm = settings.algorithm
    values = group_advantages([a.reward for a in answers], [a.group for a in answers], algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo)
    for answer, value in zip(answers, values):
        answer.advantage = float(value)


def sample_of(answer: Answer, row: int) -> Sample:
    """Prompt and response as one sequence, the response to be learned."""
    prompt, response = answer.prompt.input_ids, answer.response.input_ids
    return Sample(np.concatenate([prompt, response]), np.arange(len(prompt) + len(response)) >= len(prompt), row)


def experience(answers: list[Answer], samples: list[Sample], old: dict | None, ref: dict | None, settings: GrpoSettings) -> list[Experience]:
    """What the ranks need. With overlong_filter a truncated response does not count; tokens without a finite
    log-probability of the sampler are left in, for the ranks to count and leave out (`correction.usable_mask`)."""
    found = []
    for i, (answer, sample) in enumerate(zip(answers, samples)):
        counts = np.full(len(answer.response.input_ids), not (settings.algorithm.overlong_filter and answer.response.is_truncated))
        found.append(Experience(sample, counts, answer.response.log_probs, answer.advantage, old and old[i], ref and ref[i]))
    return found


def answer_metrics(answers: list[Answer]) -> dict[str, float]:
    """What a step's responses were like. Shares are of all responses, zero_variance of the groups."""
    lengths = np.array([len(a.response.input_ids) for a in answers])
    rewards = np.array([a.reward for a in answers])
    status = Counter(a.result.status for a in answers)
    groups = np.array([a.group for a in answers])
    flat = zero_variance_groups(rewards, groups) if np.unique(groups, return_counts=True)[1].min() > 1 else []
    return {
        "reward": float(rewards.mean()), "reward_std": float(rewards.std()), "pass_rate": status["right"] / len(answers),
        **{f"{s}_share": status[s] / len(answers) for s in STATUSES[2:]},
        "response_length": float(lengths.mean()), "response_length_max": int(lengths.max()),
        "truncated_share": float(np.mean([a.response.is_truncated for a in answers])), "empty_responses": int((lengths == 0).sum()),
        "zero_variance_share": len(flat) / len(np.unique(groups)),
    }


def write_samples(run_dir: Path, step: int, answers: list[Answer], most: int, kind: str = "train") -> None:
    """RUN/samples/step_N.parquet (val_step_N.parquet): whole groups, evenly spread over the batch, up to `most` responses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = sorted({a.group for a in answers})
    per_group = max(1, len(answers) // len(groups))
    keep = len(groups) if most < 0 else max(1, min(len(groups), math.ceil(most / per_group)))
    chosen = {groups[k * len(groups) // keep] for k in range(keep)}
    kept = [a for a in answers if a.group in chosen]
    columns = {
        "step": [step] * len(kept), "row": [a.prompt.row for a in kept], "group": [a.group for a in kept], "index": [a.index for a in kept],
        "prompt": [chat_text(a.prompt.messages) for a in kept], "response": [a.response.text for a in kept], "reward": [a.reward for a in kept],
        "status": [a.result.status for a in kept], "parsed": [a.result.parsed for a in kept], "ground_truth": [a.prompt.ground_truth for a in kept],
        "advantage": [a.advantage for a in kept], "num_tokens": [len(a.response.input_ids) for a in kept],
        "is_truncated": [a.response.is_truncated for a in kept],
    }
    folder = run_dir / "samples"
    folder.mkdir(exist_ok=True)
    path = folder / f"{'' if kind == 'train' else kind + '_'}step_{step:06d}.parquet"
    schema = {"parsed": pa.string()}
    pq.write_table(pa.table({k: pa.array(v, schema.get(k)) for k, v in columns.items()}), path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def chat_text(messages: list[dict]) -> str:
    """A chat for people: what a single message says, or all of them with their roles."""
    return messages[0]["content"] if len(messages) == 1 else "\n".join(f"{m['role']}: {m['content']}" for m in messages)
