"""The transformers sampler: its log-probabilities, its distribution, and that a response depends on nothing but its own seed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from sampling import TOLERANCE, file_weights, hf_model, log_probs_alone, plain, prompts_of, sampler_of, seeds_of

from mfsdp_cli.config.schema_grpo import RolloutSettings
from mfsdp_cli.errors import BAD_INPUT, MfsdpError
from mfsdp_cli.rollout.base import make_sampler, response_seed, stop_ids
from mfsdp_cli.rollout.transfer import tensor_shapes

@pytest.fixture(scope="session", autouse=True)
def megatron():
    """Stands in for the fixture that imports Megatron, which nothing here needs."""


@pytest.fixture(scope="module")
def sampler(tiny):
    return sampler_of(tiny("qwen2"), name="hf", max_num_seqs=64)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_log_probs_are_those_of_a_plain_forward_pass(tiny, family):
    folder, prompts, sampling = tiny(family), prompts_of(), plain()
    sampler = sampler_of(folder, name="hf")
    groups = sampler.generate(prompts, sampling, seeds_of(15))
    model = hf_model(folder)
    assert [len(group) for group in groups] == [3] * 5
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            assert (response.input_ids.dtype, response.log_probs.dtype, response.weight_version) == (np.int64, np.float32, 1)
            assert np.abs(response.log_probs - log_probs_alone(model, prompt, response.input_ids, sampling)).max() < TOLERANCE


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
                                     {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}], ids=str)
def test_log_probs_are_of_the_distribution_that_was_drawn_from(tiny, sampler, options):
    prompts, sampling, model = prompts_of(), plain(**options), hf_model(tiny("qwen2"))
    for prompt, group in zip(prompts, sampler.generate(prompts, sampling, seeds_of(15)), strict=True):
        for response in group:
            assert np.abs(response.log_probs - log_probs_alone(model, prompt, response.input_ids, sampling)).max() < TOLERANCE
        if sampling.temperature == 0:
            assert len({tuple(response.input_ids) for response in group}) == 1


def test_frequencies_are_the_probabilities():
    import torch

    from mfsdp_cli.rollout.hf import draw, uniform_streams

    logits = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 0.0]).log_softmax(-1)
    count = 20_000
    uniforms = torch.from_numpy(uniform_streams(seeds_of(count), 1)[:, 0])
    token, log_prob = draw(logits.expand(count, 5), uniforms, plain())
    share = torch.bincount(token, minlength=5) / count
    assert share[3] == 0 and (share - logits.exp()).abs().max() < 4 * 0.5 / count**0.5
    assert torch.equal(log_prob, logits.log_softmax(-1)[token])
    ends, _ = draw(logits.expand(2, 5), torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64), plain())
    assert ends.tolist() == [0, 4]


def test_drawing_in_pieces_changes_nothing(monkeypatch):
    import torch

    from mfsdp_cli.rollout import hf

    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(0))
    uniforms = torch.from_numpy(hf.uniform_streams(seeds_of(11), 1)[:, 0])
    whole = hf.draw(logits, uniforms, plain(top_p=0.9))
    monkeypatch.setattr(hf, "DRAW_ELEMENTS", 150)
    assert all(torch.equal(a, b) for a, b in zip(whole, hf.draw(logits, uniforms, plain(top_p=0.9)), strict=True))


def test_weights_that_are_not_numbers_end_the_run(tiny):
    import torch

    sampler = sampler_of(tiny("qwen2"), name="hf")
    for temperature in (1.0, 0.0):
        with torch.no_grad():
            sampler._model.model.norm.weight.fill_(torch.nan)
        with pytest.raises(ArithmeticError, match="not finite"):
            sampler.generate(prompts_of(), plain(temperature=temperature), seeds_of(15))


# ---------------------------------------------------------------- seeds


def test_a_response_depends_on_its_prompt_and_seed_alone(tiny, sampler):
    prompts, sampling = prompts_of(), plain()
    groups = sampler.generate(prompts, sampling, seeds_of(15))
    tokens = [r.input_ids.tolist() for group in groups for r in group]
    assert len({tuple(t) for t in tokens}) == 15
    # one at a time
    for row in (0, 4, 8, 14):
        [[alone]] = sampler.generate([prompts[row // 3]], plain(n=1), [100 + row])
        assert alone.input_ids.tolist() == tokens[row]
        assert np.abs(alone.log_probs - groups[row // 3][row % 3].log_probs).max() < 1e-5
    # in another order, in chunks that cut through a prompt's responses, in one with two layers of padding more
    chunked = sampler_of(tiny("qwen2"), name="hf", max_num_seqs=4)
    backwards = chunked.generate(prompts[::-1], sampling, seeds_of(15)[::-1])
    assert [r.input_ids.tolist() for group in backwards[::-1] for r in group[::-1]] == tokens
    again = sampler.generate([prompts[0], prompts_of((40,))[0]], sampling, [100, 101, 102, 1, 2, 3])
    assert [r.input_ids.tolist() for r in again[0]] == tokens[:3]
    assert [r.input_ids.tolist() for r in sampler.generate(prompts[:1], sampling, [100, 7, 102])[0]][1] != tokens[1]


def test_seeds_are_stable_and_differ():
    assert response_seed(42, 1, 2, 3) == 1724463284092272408  # pinned: a resumed run draws what the first would have drawn
    assert response_seed(2**63, 1, 2, 3) == response_seed(0, 1, 2, 3)  # validation adds 1 to the seed, which may be the greatest
    seeds = {response_seed(s, step, row, i) for s in range(3) for step in range(3) for row in range(20) for i in range(8)}
    assert len(seeds) == 3 * 3 * 20 * 8 and all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------- where a response ends


def test_a_response_ends_with_a_stop_token_or_at_the_limit(sampler):
    prompts = prompts_of()
    free = sampler.generate(prompts, plain(stop_token_ids=()), seeds_of(15))
    tokens = [r.input_ids for group in free for r in group]
    assert all(len(t) == 20 for t in tokens) and all(r.is_truncated for group in free for r in group)
    stops = (int(tokens[0][4]), int(tokens[7][11]), int(tokens[3][19]))
    ended = [r for group in sampler.generate(prompts, plain(stop_token_ids=stops), seeds_of(15)) for r in group]
    for whole, response in zip(tokens, ended, strict=True):
        at = next((i for i, token in enumerate(whole) if int(token) in stops), None)
        assert response.input_ids.tolist() == whole[:20 if at is None else at + 1].tolist()
        assert response.is_truncated == (at is None)
    assert len(ended[0].input_ids) <= 5 and not ended[3].is_truncated


def test_text_is_the_response_without_special_tokens(sampler):
    [[response]] = sampler.generate(prompts_of()[:1], plain(n=1), [5])
    tokenizer = sampler._tokenizer
    assert response.text == tokenizer.decode(response.input_ids.tolist(), skip_special_tokens=True)


def test_every_end_of_turn_id_is_a_stop(tiny, tmp_path):
    from transformers import AutoTokenizer

    folder = tiny("qwen2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    assert stop_ids(tokenizer, folder, eos) == (eos,) and stop_ids(tokenizer, folder, 3) == (3, eos)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert stop_ids(tokenizer, tmp_path, None) == (9, eos)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    assert stop_ids(tokenizer, tmp_path, None) == (11, 12, eos)
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_ids(tokenizer, tmp_path, None) == (eos,)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_update_makes_it_the_other_model_and_back(tiny, tmp_path, family):
    from mfsdp_cli.rollout.transfer import write_weights

    prompts, sampling = prompts_of(), plain()
    first, second = tiny(family), tiny(family, seed=1)
    sampler = sampler_of(first, name="hf")
    before = sampler.generate(prompts, sampling, seeds_of(15))
    assert sampler.update_weights(str(write_weights(file_weights(second), tmp_path / "w", True))) == sampler.version == 2
    after, model = sampler.generate(prompts, sampling, seeds_of(15)), hf_model(second)
    for prompt, group in zip(prompts, after, strict=True):
        for response in group:
            assert response.weight_version == 2
            assert np.abs(response.log_probs - log_probs_alone(model, prompt, response.input_ids, sampling)).max() < TOLERANCE
    assert sampler.update_weights(str(first)) == 3
    back = sampler.generate(prompts, sampling, seeds_of(15))
    assert [r.input_ids.tolist() for g in back for r in g] == [r.input_ids.tolist() for g in before for r in g]


def test_weights_of_another_model_are_refused_and_change_nothing(tiny, tmp_path):
    from mfsdp_cli.rollout.transfer import write_weights

    sampler = sampler_of(tiny("qwen2"), name="hf")
    before = sampler.generate(prompts_of(), plain(), seeds_of(15))
    weights = dict(file_weights(tiny("qwen2")))
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    weights["model.layers.2.mlp.up_proj.weight"] = lost
    weights["model.norm.weight"] = lost[:3]
    with pytest.raises(MfsdpError) as caught:
        sampler.update_weights(str(write_weights(iter(weights.items()), tmp_path / "w", True)))
    why = caught.value.problems[0].why
    assert caught.value.exit_code == BAD_INPUT and "layers.1.mlp.up_proj.weight is missing" in why
    assert "layers.2.mlp.up_proj.weight is superfluous" in why and "model.norm.weight is [3, 64], not [64]" in why
    after = sampler.generate(prompts_of(), plain(), seeds_of(15))
    assert sampler.version == 1 and [r.input_ids.tolist() for g in after for r in g] == [r.input_ids.tolist() for g in before for r in g]


def test_without_weights_it_answers_nothing(tiny, tmp_path):
    """A folder with configuration and tokenizer alone, as a checkpoint has; asleep and awake again before the first update."""
    folder = tiny("qwen2")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    sampler = make_sampler(RolloutSettings(name="hf"), tmp_path, tensor_shapes(folder), "float32", "cpu", 64)
    sampler.sleep()
    sampler.wake()
    with pytest.raises(AssertionError, match="without weights"):
        sampler.generate(prompts_of(), plain(), seeds_of(15))
    assert (sampler.version, sampler.update_weights(str(folder))) == (0, 1)
    wanted = sampler_of(folder, name="hf").generate(prompts_of(), plain(), seeds_of(15))
    found = sampler.generate(prompts_of(), plain(), seeds_of(15))
    assert [r.input_ids.tolist() for g in found for r in g] == [r.input_ids.tolist() for g in wanted for r in g]


def test_asleep_it_answers_nothing(sampler):
    sampler.sleep()
    with pytest.raises(AssertionError):
        sampler.generate(prompts_of(), plain(), seeds_of(15))
    sampler.wake()
    assert sampler.generate(prompts_of(), plain(), seeds_of(15))


def test_requests_that_cannot_be_met_are_ours(sampler):
    for prompts, seeds in ((prompts_of(), seeds_of(14)), (prompts_of((45,)), seeds_of(3)), (prompts_of((0,)), seeds_of(3))):
        with pytest.raises(AssertionError):
            sampler.generate(prompts, plain(), seeds)
