"""Rules of reinforcement learning on what is computed: groups, batches, lengths, sampling, the reference, the algorithm.
See `rules`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.config.rules_files import files_are_readable, train_rows
from mfsdp_cli.config.rules_parallel import data_parallel, world_size
from mfsdp_cli.config.values import as_text, divisors, either
from mfsdp_cli.errors import BAD_INPUT, Problem

GRPO = ("grpo",)

# --- groups and batches ---------------------------------------------------------------------------------------------


@rule("group-of-two", "a group has at least two responses",
      "Shao et al., arXiv:2402.03300 (GRPO); Ahmadian et al., arXiv:2402.14740 (RLOO)",
      kinds=GRPO, training=True, fix="rollout.n of 2 or more; 8 is usual")
def group_size(s, f) -> Iterator[Problem]:
    """The advantage of a response is its reward against those of the same prompt. With one response it is 0, or divided by 0."""
    n, name = s.rollout.n, {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO"}[s.algorithm.adv_estimator]
    if n < 2:
        why = f"{name} compares responses of one prompt, so it needs at least 2."
        yield Problem("rollout.n", str(n), why, "set rollout.n to 2 or more (presets use 8)")


@rule("mini-batch-divides", "a batch of prompts is whole mini batches", "verl PR 559", kinds=GRPO, training=True,
      fix="an actor.ppo_mini_batch_size that divides data.train_batch_size")
def mini_batches(s, f) -> Iterator[Problem]:
    size, mini = s.data.train_batch_size, s.actor.ppo_mini_batch_size
    if size % mini == 0:
        return
    if mini > size:
        why = f"a mini batch of {mini} prompts is larger than the batch of {size} that is sampled"
    else:
        why = f"{size} prompts cannot be split into mini batches of {mini}: {size} mod {mini} = {size % mini}"
    fits = divisors(size)
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
        step = dp // math.gcd(n, dp)  # mini batches that do are its multiples
        minis = [str(m) for m in (mini // step * step, -(-mini // step) * step) if m > 0]
        return why, f"actor.ppo_mini_batch_size {either(list(dict.fromkeys(minis)))}"
    share = samples // dp
    if share % micro == 0:
        return None
    fits = either([str(m) for m in divisors(share)])
    below = f"below micro batch {micro}: gradients would be accumulated over nothing"
    why = f"{mini} x {n} / {dp} = {share} samples per rank per update, {below if share < micro else f'no multiple of micro batch {micro}'}"
    return why, f"actor.ppo_micro_batch_size_per_gpu {fits}, or actor.use_dynamic_bsz=True"


@rule("update-divides", "with micro batches of responses, an update is whole micro batches on every data-parallel rank",
      "verl issues 405, 2505 (accumulation over nothing: NaN), PR 1811", kinds=GRPO, training=True,
      fix="a micro batch that divides prompts x n / DP, or actor.use_dynamic_bsz=True")
def update_divides(s, f) -> Iterator[Problem]:
    dp, a, n = data_parallel(s), s.actor, s.rollout.n
    if dp is None or a.use_dynamic_bsz:
        return
    if wrong := update_problem(a.ppo_mini_batch_size, n, dp, a.ppo_micro_batch_size_per_gpu):
        uneven = a.ppo_mini_batch_size * n % dp
        key = "actor.ppo_mini_batch_size" if uneven else "actor.ppo_micro_batch_size_per_gpu"
        yield Problem(key, str(a.ppo_mini_batch_size if uneven else a.ppo_micro_batch_size_per_gpu), *wrong)


@rule("update-feeds-ranks", "with micro batches by tokens, an update has a response for each data-parallel rank", "verl issue 606",
      kinds=GRPO, training=True, fix="a larger actor.ppo_mini_batch_size or rollout.n")
def update_feeds_ranks(s, f) -> Iterator[Problem]:
    dp, a, n = data_parallel(s), s.actor, s.rollout.n
    samples = a.ppo_mini_batch_size * n
    if dp is not None and a.use_dynamic_bsz and samples < dp:
        why = (f"{a.ppo_mini_batch_size} prompts x {n} responses = {samples} samples cannot feed {dp} data-parallel ranks "
               f"({world_size(s)} ranks / TP x CP)")
        yield Problem("actor.ppo_mini_batch_size", str(a.ppo_mini_batch_size), why, f"actor.ppo_mini_batch_size={-(-dp // n)} or more")


@rule("val-has-data", "a run that only validates has something to validate on", OWN, kinds=GRPO, fix="--val-files FILE.parquet")
def validation_data(s, f) -> Iterator[Problem]:
    if s.trainer.val_only and not s.data.val_files:
        yield Problem("trainer.val_only", "True", "there is nothing to validate on", "--val-files FILE.parquet")


@rule("val-responses-differ", "several validation responses to a prompt can differ", OWN, level="warning", kinds=GRPO,
      fix="rollout.val_n=1, or a rollout.val_temperature above 0")
def validation_responses(s, f) -> Iterator[Problem]:
    r = s.rollout
    if s.data.val_files and r.val_n > 1 and r.val_temperature == 0:
        why = f"at temperature 0 the {r.val_n} responses to a prompt are the same"
        yield Problem("rollout.val_n", str(r.val_n), why, "rollout.val_n=1, or a rollout.val_temperature above 0", level="warning")


# --- lengths --------------------------------------------------------------------------------------------------------


def _total(s) -> str:
    prompt, response = s.data.max_prompt_length, s.data.max_response_length
    return f"{prompt} tokens of prompt + {response} of response = {prompt + response}"


@rule("prompt-and-response-in-positions", "the longest prompt and response together are within the model's positions",
      "the model's config.json, max_position_embeddings; vLLM refuses more", kinds=GRPO, fix="a shorter data.max_response_length")
def lengths_in_positions(s, f) -> Iterator[Problem]:
    prompt, response = s.data.max_prompt_length, s.data.max_response_length
    positions = (f.model_config or {}).get("max_position_embeddings")
    if isinstance(positions, int) and prompt + response > positions:
        why = f"{_total(s)}, and the model has {positions} positions (max_position_embeddings)"
        fix = f"data.max_response_length={positions - prompt}" if positions > prompt else f"a data.max_prompt_length below {positions}"
        yield Problem("data.max_response_length", str(response), why, fix)


@rule("prompt-and-response-in-budget", "the longest prompt and response together fit a micro batch", "verl PR 7553", kinds=GRPO,
      training=True, fix="a larger actor.ppo_max_token_len_per_gpu")
def lengths_in_budget(s, f) -> Iterator[Problem]:
    """Of the actor, and of the reference when it has a budget of its own. With sequence parallelism a micro batch is a multiple of TP."""
    prompt, response = s.data.max_prompt_length, s.data.max_response_length
    multiple = s.engine.sequence_multiple
    budgets = {"actor.ppo_max_token_len_per_gpu": s.actor.ppo_max_token_len_per_gpu}
    if uses_reference(s) and s.ref.log_prob_max_token_len_per_gpu is not None:
        budgets["ref.log_prob_max_token_len_per_gpu"] = s.ref.log_prob_max_token_len_per_gpu
    for key, budget in budgets.items():
        usable = s.engine.usable_tokens(budget)
        if prompt + response > usable:
            used = f"{budget}" if usable == budget else f"{budget}, of which {usable} are a multiple of TP {multiple}"
            need = -(-(prompt + response) // multiple) * multiple
            yield Problem(key, str(budget), f"{_total(s)} do not fit into a micro batch of {used}", f"{key}={need} or more")


@rule("overlong-buffer", "the overlong buffer is part of a response", "Yu et al., arXiv:2503.14476 (DAPO), soft overlong punishment",
      kinds=GRPO, fix="algorithm.overlong_buffer_length below data.max_response_length")
def overlong_buffer(s, f) -> Iterator[Problem]:
    buffer, response = s.algorithm.overlong_buffer_length, s.data.max_response_length
    if buffer > response:
        why = f"the buffer is longer than a response of at most {response} tokens, so every response would lose reward"
        fix = f"below data.max_response_length, for example {response // 4}"
        yield Problem("algorithm.overlong_buffer_length", str(buffer), why, fix)


# --- sampling -------------------------------------------------------------------------------------------------------


@rule("top-p-range", "top_p is above 0 and at most 1", "vLLM 0.24 sampling_params.py", kinds=GRPO, fix="rollout.top_p=1 takes all")
def top_p(s, f) -> Iterator[Problem]:
    for name in ("top_p", "val_top_p"):
        if not 0 < getattr(s.rollout, name) <= 1:
            yield Problem(f"rollout.{name}", as_text(getattr(s.rollout, name)), "no candidate would be left", f"rollout.{name}=1 takes all")


@rule("top-k-range", "top_k is -1 or at least 1", "vLLM 0.24 sampling_params.py", kinds=GRPO, training=True,
      fix="rollout.top_k=-1 takes all")
def top_k(s, f) -> Iterator[Problem]:
    if s.rollout.top_k == 0:
        yield Problem("rollout.top_k", "0", "no candidate would be left", "rollout.top_k=-1 takes all")


@rule("temperature-above-0", "training rollouts are sampled at a temperature above 0", OWN, kinds=GRPO, training=True,
      fix="rollout.temperature=1")
def temperature(s, f) -> Iterator[Problem]:
    if s.rollout.temperature == 0:
        why = "all responses to a prompt would be the same, so there is nothing to compare"
        yield Problem("rollout.temperature", "0", why, "rollout.temperature=1; for greedy validation rollout.val_temperature=0")


@rule("whole-distribution", "training rollouts are sampled from the whole distribution", "verl issue 6240; vLLM RFC 42259", level="warning",
      kinds=GRPO, training=True, fix="rollout.top_p=1 and rollout.top_k=-1")
def whole_distribution(s, f) -> Iterator[Problem]:
    """With top-p or top-k the sampler renormalises over the candidates that are left; the trainer's probabilities are over all. A token
    that the sampler gives p / kept, where the trainer gives p, differs by -ln(kept), and top_p is the least that is kept."""
    r, alarm = s.rollout, s.algorithm.mismatch_alarm
    told = "the sampler draws from a cut-off distribution, and the trainer weighs the whole one: their mismatch is part of every step"
    if 0 < r.top_p < 1:
        nats = -math.log(r.top_p)
        near = (f", by up to -ln({as_text(r.top_p)}) = {nats:.3f} nats a token, where algorithm.mismatch_alarm = {as_text(alarm)} "
                "stops the run")
        fix = f"rollout.top_p=1, or algorithm.mismatch_alarm={math.ceil((nats + 0.1) * 100) / 100:g}"
        reaches = 0 < alarm <= nats
        yield Problem("rollout.top_p", as_text(r.top_p), told + near * reaches, fix if reaches else "rollout.top_p=1", level="warning")
    if r.top_k > 0:
        near = f", and may set off algorithm.mismatch_alarm = {as_text(alarm)}" if alarm else ""
        fix = "rollout.top_k=-1" + (", or algorithm.mismatch_alarm=0" if alarm else "")
        yield Problem("rollout.top_k", str(r.top_k), told + near, fix, level="warning")


@rule("one-step-ahead-corrected", "responses of an earlier policy are corrected for", "verl PRs 2953, 3694; TRL PR 3867", level="warning",
      kinds=GRPO, training=True, fix="algorithm.rollout_correction=truncate")
def one_step_ahead_corrected(s, f) -> Iterator[Problem]:
    if s.rollout.one_step_ahead and s.algorithm.rollout_correction == "none":
        why = "responses come from the weights of one step ago, and nothing corrects for it"
        yield Problem("rollout.one_step_ahead", "True", why, "algorithm.rollout_correction=truncate", level="warning")


@rule("one-step-ahead-apart", "samplers that work while the trainer does have GPUs of their own", OWN, level="note", kinds=GRPO,
      training=True, fix="rollout.colocate=False")
def one_step_ahead_apart(s, f) -> Iterator[Problem]:
    if s.rollout.one_step_ahead and s.rollout.colocate:
        why = "the samplers share the trainer's GPUs, so that sampling and training slow each other down"
        yield Problem("rollout.one_step_ahead", "True", why, "rollout.colocate=False, with GPUs for the samplers", level="note")


@rule("one-step-ahead-awake", "samplers that work while the trainer does are not put to sleep", OWN, kinds=GRPO, training=True,
      fix="rollout.enable_sleep_mode=False")
def one_step_ahead_awake(s, f) -> Iterator[Problem]:
    if s.rollout.one_step_ahead and s.rollout.enable_sleep_mode:
        why = "samplers sleep while the trainer works, and with rollout.one_step_ahead they sample in that time"
        yield Problem("rollout.enable_sleep_mode", "True", why, "keep one of the two")


# --- the algorithm --------------------------------------------------------------------------------------------------


def uses_reference(s) -> bool:
    return s.actor.use_kl_loss or s.algorithm.use_kl_in_reward


@rule("kl-once", "the distance from the reference counts once", OWN, level="warning", kinds=GRPO, training=True,
      fix="actor.use_kl_loss or algorithm.use_kl_in_reward, not both")
def kl_once(s, f) -> Iterator[Problem]:
    if s.actor.use_kl_loss and s.algorithm.use_kl_in_reward:
        why = "the distance from the reference counts twice: in the loss (actor.use_kl_loss) and in the reward"
        yield Problem("algorithm.use_kl_in_reward", "True", why, "keep one of the two", level="warning")


@rule("kl-loss-gradient", "the KL estimator in the loss has a gradient", "Schulman, Approximating KL Divergence (2020); "
      "Tang and Munos, arXiv:2506.09477", level="warning", kinds=GRPO, training=True, fix="actor.kl_loss_type=low_var_kl or k2")
def kl_loss_gradient(s, f) -> Iterator[Problem]:
    """k1 is log p - log q. Its mean is the KL, but the mean of its gradient is that of log p over samples of p, which is 0."""
    if s.actor.use_kl_loss and s.actor.kl_loss_type in ("kl", "k1"):
        why = "the gradient of this estimator is 0 on average, so that in the loss it only adds noise"
        fix = "actor.kl_loss_type=low_var_kl or k2, or algorithm.use_kl_in_reward=True instead of actor.use_kl_loss"
        yield Problem("actor.kl_loss_type", s.actor.kl_loss_type, why, fix, level="warning")


@rule("gspo-sequence-mean", "GSPO's loss is a mean over sequences", "Zheng et al., arXiv:2507.18071 (GSPO); verl's gspo",
      level="warning", kinds=GRPO, training=True, fix="actor.loss_agg_mode=seq-mean-token-mean")
def gspo_sequence_mean(s, f) -> Iterator[Problem]:
    a = s.actor
    if a.policy_loss == "gspo" and a.loss_agg_mode != "seq-mean-token-mean":
        why = f"GSPO gives every sequence one ratio and the same weight; {a.loss_agg_mode} weighs long ones more"
        yield Problem("actor.loss_agg_mode", a.loss_agg_mode, why, "actor.loss_agg_mode=seq-mean-token-mean", level="warning")


@rule("dual-clip-above-1", "the dual clip's bound is above 1, or 0 for none", "Ye et al., arXiv:1912.09729 (dual-clip PPO)", kinds=GRPO,
      training=True, fix="actor.clip_ratio_c=3, or 0")
def clipping(s, f) -> Iterator[Problem]:
    bound = s.actor.clip_ratio_c
    if 0 < bound <= 1:
        why = "dual clip bounds the loss at this ratio, which must be above 1: every negative advantage would lose its gradient"
        yield Problem("actor.clip_ratio_c", as_text(bound), why, "actor.clip_ratio_c=3, or 0 for none")


@rule("filter-groups-refill", "groups that are left out can be replaced by others", "Yu et al., arXiv:2503.14476 (DAPO), dynamic sampling",
      level="warning", kinds=GRPO, training=True, fix="algorithm.filter_groups_max_batches=3, or more prompts")
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


# --- reference and reward -------------------------------------------------------------------------------------------


@rule("reference-exists", "ref.path is a model folder or a hub id", OWN, kinds=GRPO, training=True,
      fix="leave ref.path out: it is the model")
def reference_exists(s, f) -> Iterator[Problem]:
    if s.ref.path is not None and f.reference_error:
        fix = f.reference_fix or "give a folder with config.json and safetensors, or a hub id"
        yield Problem("ref.path", s.ref.path, f.reference_error, fix, code=BAD_INPUT)


@rule("reference-used", "a reference model is given only where something compares with it", OWN, level="warning", kinds=GRPO, training=True,
      fix="leave ref.path out, or actor.use_kl_loss=True")
def reference_used(s, f) -> Iterator[Problem]:
    if s.ref.path is not None and not f.reference_error and not uses_reference(s):
        why = "nothing compares with a reference: actor.use_kl_loss and algorithm.use_kl_in_reward are both off"
        yield Problem("ref.path", s.ref.path, why, "leave it out, or actor.use_kl_loss=True", level="warning")


@rule("reference-matches", "model and reference have the same architecture and vocabulary", OWN, kinds=GRPO, training=True,
      fix="a reference of the same family")
def reference_matches(s, f) -> Iterator[Problem]:
    """Both read the same tokens, and share engine.*: the same split must fit both."""
    path, ours, theirs = s.ref.path, f.model_config or {}, f.reference_config or {}
    if path is None or f.reference_error or not ours or not theirs:
        return
    for name in ("architectures", "vocab_size"):
        if ours.get(name) != theirs.get(name):
            why = f"{name} is {as_text(theirs.get(name))} in the reference and {as_text(ours.get(name))} in the model"
            fix = "a reference of the same family, with the same vocabulary; null takes model.path"
            yield Problem("ref.path", path, why + ": both must read the same tokens in the same layout", fix, code=BAD_INPUT)


@rule("one-scorer", "there is one scorer", OWN, kinds=GRPO, fix="reward.name=auto with reward.function, or reward.name alone")
def one_scorer(s, f) -> Iterator[Problem]:
    if s.reward.function is not None and s.reward.name != "auto":
        why = f"there would be two scorers: reward.name = {s.reward.name} and a function of one's own"
        yield Problem("reward.function", s.reward.function, why, "reward.name=auto, or leave the function out")
