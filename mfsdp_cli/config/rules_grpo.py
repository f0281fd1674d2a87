"""Rules of reinforcement learning on what is computed: groups, batches, lengths, sampling, the reference, the algorithm.
See `rules`."""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.config.rules_machine import files_are_readable, train_rows
from mfsdp_cli.config.rules_model import data_parallel, world_size
from mfsdp_cli.config.values import as_text, either
from mfsdp_cli.errors import BAD_INPUT, Problem

# --- groups and batches ---------------------------------------------------------------------------------------------


def group_size(s, f) -> Iterator[Problem]:
    n, name = s.rollout.n, {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO"}[s.algorithm.adv_estimator]
    if n < 2 and not s.trainer.val_only:
        why = f"{name} compares responses of one prompt, so it needs at least 2."
        yield Problem("rollout.n", str(n), why, "set rollout.n to 2 or more (presets use 8)")


def mini_batches(s, f) -> Iterator[Problem]:
    size, mini = s.data.train_batch_size, s.actor.ppo_mini_batch_size
    if size % mini == 0 or s.trainer.val_only:
        return
    if mini > size:
        why = f"a mini batch of {mini} prompts is larger than the batch of {size} that is sampled"
    else:
        why = f"{size} prompts cannot be split into mini batches of {mini}: {size} mod {mini} = {size % mini}"
    fits = [d for d in range(1, size + 1) if size % d == 0]
    near = sorted(sorted(fits, key=lambda d: abs(d - mini))[:3])
    whole = -(-size // mini) * mini
    fix = f"actor.ppo_mini_batch_size {either([str(d) for d in near])}, or data.train_batch_size {whole}"
    yield Problem("actor.ppo_mini_batch_size", str(mini), why, fix)


def update_problem(mini: int, n: int, dp: int, micro: int) -> tuple[str, str] | None:
    """(why, fix) when one update of `mini` prompts x `n` responses gives no whole number of micro batches to each rank.

    >>> update_problem(8, 2, 4, 16)[0]
    '8 x 2 / 4 = 4 samples per rank per update, below micro batch 16: gradients would be accumulated over nothing'
    """
    samples = mini * n
    if samples % dp:
        why = (f"{mini} prompts x {n} responses = {samples} samples cannot be split over {dp} data-parallel ranks: "
               f"{samples} mod {dp} = {samples % dp}")
        step = next(m for m in range(1, dp + 1) if m * n % dp == 0)  # mini batches that do are its multiples
        minis = [str(m) for m in (mini // step * step, -(-mini // step) * step) if m > 0]
        return why, f"actor.ppo_mini_batch_size {either(list(dict.fromkeys(minis)))}"
    share = samples // dp
    if share % micro == 0:
        return None
    fits = either([str(m) for m in range(1, share + 1) if share % m == 0])
    below = f"below micro batch {micro}: gradients would be accumulated over nothing"
    why = f"{mini} x {n} / {dp} = {share} samples per rank per update, {below if share < micro else f'no multiple of micro batch {micro}'}"
    return why, f"actor.ppo_micro_batch_size_per_gpu {fits}, or actor.use_dynamic_bsz=True"


def update(s, f) -> Iterator[Problem]:
    dp, a, n = data_parallel(s), s.actor, s.rollout.n
    if dp is None or s.trainer.val_only:
        return
    samples = a.ppo_mini_batch_size * n
    if a.use_dynamic_bsz:
        if samples < dp:
            why = (f"{a.ppo_mini_batch_size} prompts x {n} responses = {samples} samples cannot feed {dp} data-parallel ranks "
                   f"({world_size(s)} ranks / TP x CP)")
            yield Problem("actor.ppo_mini_batch_size", str(a.ppo_mini_batch_size), why, f"actor.ppo_mini_batch_size={-(-dp // n)} or more")
    elif wrong := update_problem(a.ppo_mini_batch_size, n, dp, a.ppo_micro_batch_size_per_gpu):
        key = "actor.ppo_mini_batch_size" if samples % dp else "actor.ppo_micro_batch_size_per_gpu"
        yield Problem(key, str(a.ppo_mini_batch_size if samples % dp else a.ppo_micro_batch_size_per_gpu), *wrong)


def one_full_batch(s, f) -> Iterator[Problem]:
    rows, size = train_rows(s, f), s.data.train_batch_size
    if files_are_readable(s, f) and rows < size and not s.trainer.val_only:
        why = f"there are {rows} training prompts, so not one full batch"
        yield Problem("data.train_batch_size", str(size), why, f"at most {rows}, or more data" if rows else "more data")


def validation(s, f) -> Iterator[Problem]:
    t, r = s.trainer, s.rollout
    if t.val_only and not s.data.val_files:
        yield Problem("trainer.val_only", "True", "there is nothing to validate on", "--val-files FILE.parquet")
    if s.data.val_files and r.val_n > 1 and r.val_temperature == 0:
        why = f"at temperature 0 the {r.val_n} responses to a prompt are the same"
        yield Problem("rollout.val_n", str(r.val_n), why, "rollout.val_n=1, or a rollout.val_temperature above 0", level="warning")


# --- lengths --------------------------------------------------------------------------------------------------------


def lengths(s, f) -> Iterator[Problem]:
    prompt, response = s.data.max_prompt_length, s.data.max_response_length
    total = f"{prompt} tokens of prompt + {response} of response = {prompt + response}"
    positions = (f.model_config or {}).get("max_position_embeddings")
    if isinstance(positions, int) and prompt + response > positions:
        why = f"{total}, and the model has {positions} positions (max_position_embeddings)"
        fix = f"data.max_response_length={positions - prompt}" if positions > prompt else f"a data.max_prompt_length below {positions}"
        yield Problem("data.max_response_length", str(response), why, fix)
    tp = s.engine.tensor_model_parallel_size
    budgets = {"actor.ppo_max_token_len_per_gpu": s.actor.ppo_max_token_len_per_gpu}
    if uses_reference(s) and s.ref.log_prob_max_token_len_per_gpu is not None:
        budgets["ref.log_prob_max_token_len_per_gpu"] = s.ref.log_prob_max_token_len_per_gpu
    for key, budget in budgets.items():
        usable = budget // tp * tp if s.engine.sequence_parallel is not False else budget  # a micro batch is a multiple of TP
        if prompt + response > usable:
            used = f"{budget}" if usable == budget else f"{budget}, of which {usable} are a multiple of TP {tp}"
            need = -(-(prompt + response) // tp) * tp
            yield Problem(key, str(budget), f"{total} do not fit into a micro batch of {used}", f"{key}={need} or more")
    buffer = s.algorithm.overlong_buffer_length
    if buffer > response:
        why = f"the buffer is longer than a response of at most {response} tokens, so every response would lose reward"
        fix = f"below data.max_response_length, for example {response // 4}"
        yield Problem("algorithm.overlong_buffer_length", str(buffer), why, fix)


# --- sampling -------------------------------------------------------------------------------------------------------


def sampling(s, f) -> Iterator[Problem]:
    r = s.rollout
    for name in ("top_p", "val_top_p"):
        if getattr(r, name) == 0:
            yield Problem(f"rollout.{name}", "0", "no candidate would be left", f"rollout.{name}=1 takes all")
    if s.trainer.val_only:
        return
    if r.temperature == 0:
        why = "all responses to a prompt would be the same, so there is nothing to compare"
        yield Problem("rollout.temperature", "0", why, "rollout.temperature=1; for greedy validation rollout.val_temperature=0")
    if r.top_k == 0:
        yield Problem("rollout.top_k", "0", "no candidate would be left", "rollout.top_k=-1 takes all")
    told = "the sampler draws from a cut-off distribution, and the trainer weighs the whole one: their mismatch is part of every step"
    if 0 < r.top_p < 1:
        yield Problem("rollout.top_p", as_text(r.top_p), told, "rollout.top_p=1", level="warning")
    if r.top_k > 0:
        yield Problem("rollout.top_k", str(r.top_k), told, "rollout.top_k=-1", level="warning")


def one_step_ahead(s, f) -> Iterator[Problem]:
    if not s.rollout.one_step_ahead:
        return
    if s.algorithm.rollout_correction == "none":
        why = "responses come from the weights of one step ago, and nothing corrects for it"
        yield Problem("rollout.one_step_ahead", "True", why, "algorithm.rollout_correction=truncate", level="warning")
    if s.rollout.colocate:
        why = "the samplers share the trainer's GPUs, so that sampling and training slow each other down"
        yield Problem("rollout.one_step_ahead", "True", why, "rollout.colocate=False, with GPUs for the samplers", level="note")


# --- the algorithm --------------------------------------------------------------------------------------------------


def uses_reference(s) -> bool:
    return s.actor.use_kl_loss or s.algorithm.use_kl_in_reward


def kl(s, f) -> Iterator[Problem]:
    if s.actor.use_kl_loss and s.algorithm.use_kl_in_reward:
        why = "the distance from the reference counts twice: in the loss (actor.use_kl_loss) and in the reward"
        yield Problem("algorithm.use_kl_in_reward", "True", why, "keep one of the two", level="warning")
    if s.actor.use_kl_loss and s.actor.kl_loss_type in ("kl", "k1"):
        why = "the gradient of this estimator is 0 on average, so that in the loss it only adds noise"
        fix = "actor.kl_loss_type=low_var_kl or k2, or algorithm.use_kl_in_reward=True instead of actor.use_kl_loss"
        yield Problem("actor.kl_loss_type", s.actor.kl_loss_type, why, fix, level="warning")


def sequence_ratio(s, f) -> Iterator[Problem]:
    """GSPO (arXiv:2507.18071, eq. 5) is a mean over sequences of one ratio each; verl's gspo says the same of its own default."""
    a = s.actor
    if a.policy_loss == "gspo" and a.loss_agg_mode != "seq-mean-token-mean":
        why = f"GSPO gives every sequence one ratio and the same weight; {a.loss_agg_mode} weighs long ones more"
        yield Problem("actor.loss_agg_mode", a.loss_agg_mode, why, "actor.loss_agg_mode=seq-mean-token-mean", level="warning")


def clipping(s, f) -> Iterator[Problem]:
    bound = s.actor.clip_ratio_c
    if 0 < bound <= 1:
        why = "dual clip bounds the loss at this ratio, which must be above 1: every negative advantage would lose its gradient"
        yield Problem("actor.clip_ratio_c", as_text(bound), why, "actor.clip_ratio_c=3, or 0 for none")


def filter_groups(s, f) -> Iterator[Problem]:
    extra, size = s.algorithm.filter_groups_max_batches, s.data.train_batch_size
    if not s.algorithm.filter_groups:
        return
    if extra == 0:
        why = "groups of equal rewards are left out, and no further prompts are sampled in their place"
        yield Problem("algorithm.filter_groups_max_batches", "0", why, "3, the default", level="warning")
    rows, most = train_rows(s, f), (1 + extra) * size
    if files_are_readable(s, f) and size <= rows < most:
        why = f"one step may take {1 + extra} x {size} = {most} prompts, and there are {rows}: prompts would come twice"
        yield Problem("algorithm.filter_groups_max_batches", str(extra), why, f"at most {rows // size - 1}", level="warning")


def reference(s, f) -> Iterator[Problem]:
    path, ours, theirs = s.ref.path, f.model_config or {}, f.reference_config or {}
    if path is None:
        return
    if f.reference_error:
        yield Problem("ref.path", path, f.reference_error, "give a folder with config.json and safetensors, or a hub id", code=BAD_INPUT)
        return
    if not uses_reference(s):
        why = "nothing compares with a reference: actor.use_kl_loss and algorithm.use_kl_in_reward are both off"
        yield Problem("ref.path", path, why, "leave it out, or actor.use_kl_loss=True", level="warning")
    for name in ("architectures", "vocab_size"):
        if ours and theirs and ours.get(name) != theirs.get(name):
            why = f"{name} is {as_text(theirs.get(name))} in the reference and {as_text(ours.get(name))} in the model"
            fix = "a reference of the same family, with the same vocabulary; null takes model.path"
            yield Problem("ref.path", path, why + ": both must read the same tokens in the same layout", fix, code=BAD_INPUT)


def reward(s, f) -> Iterator[Problem]:
    if s.reward.function is not None and s.reward.name != "auto":
        why = f"there would be two scorers: reward.name = {s.reward.name} and a function of one's own"
        yield Problem("reward.function", s.reward.function, why, "reward.name=auto, or leave the function out")


RULES = (
    group_size, mini_batches, update, one_full_batch, validation, lengths, sampling, one_step_ahead, kl, sequence_ratio, clipping,
    filter_groups, reference, reward,
)
