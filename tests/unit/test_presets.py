import pytest
from facts_for_tests import LLAMA, make_facts

from mfsdp_cli.config.load import load_sft, preset_files
from mfsdp_cli.config.rules import check
from mfsdp_cli.config.show import presets
from mfsdp_cli.launch.facts import ParquetFacts

CHAT = "list<element: struct<role: string, content: string>>"
NAMES = ["sft-gsm8k-qwen2.5-math-7b", "sft-tiny-cpu"]


def test_shipped_presets():
    assert [row["name"] for row in presets()] == list(preset_files()) == NAMES
    assert all(len(row["about"]) > 20 and not row["about"].startswith("#") for row in presets())


@pytest.mark.parametrize("name", NAMES)
def test_every_line_has_a_comment(name):
    for number, line in enumerate(preset_files()[name].read_text(encoding="utf-8").splitlines(), start=1):
        assert "# " in line, f"{name}:{number}"


@pytest.mark.parametrize("name", NAMES)
def test_presets_load_without_a_word(name):
    assert load_sft(preset=name, environ={}).problems == []


def test_gsm8k_preset_is_the_specification():
    s = load_sft(preset=NAMES[0], environ={}).settings
    assert s.model.path == "Qwen/Qwen2.5-Math-7B"
    d, e, o, t = s.data, s.engine, s.optim, s.trainer
    assert (t.n_gpus_per_node, e.tensor_model_parallel_size, e.pipeline_model_parallel_size, e.expert_model_parallel_size) == (8, 4, 1, 1)
    assert (d.train_batch_size, d.use_dynamic_bsz, d.max_token_len_per_gpu, d.pad_mode, d.truncation) == (8, True, 1024, "no_padding",
        "error")
    assert (o.lr, o.lr_warmup_steps_ratio, o.lr_warmup_init, o.weight_decay, o.betas, o.clip_grad) == (1e-5, 0.2, 0.0, 0.1, [0.9, 0.95],
        1.0)
    assert (o.lr_decay_style, o.min_lr) == ("cosine", 1e-6)
    assert (t.total_epochs, t.project_name, t.experiment_name) == (4, "gsm8k-sft", "SFT-qwen2.5-7b-mfsdp")
    assert (e.use_mbridge, e.vanilla_mbridge, e.use_megatron_fsdp, e.dtype, e.sequence_parallel) == (True, False, True, "bfloat16", None)


def test_gsm8k_preset_passes_every_rule_on_8_gpus():
    loaded = load_sft(preset=NAMES[0], environ={})
    parquet = {p: ParquetFacts(p, rows, {"messages": CHAT}) for p,
        rows in (("data/gsm8k/train.parquet", 7473), ("data/gsm8k/test.parquet", 1319))}
    assert check(loaded.settings, loaded.origins, make_facts(parquet=parquet)) == []


def test_tiny_preset_passes_every_rule_on_two_cores():
    loaded = load_sft(preset=NAMES[1], environ={}, flags={"model": "tiny", "train_files": ["a.parquet"]})
    tiny = LLAMA | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000}
    facts = make_facts(num_gpus=0, num_cpus=2, model_config=tiny,
        parquet={"a.parquet": ParquetFacts("a.parquet", 2000, {"messages": CHAT})})
    assert check(loaded.settings, loaded.origins, facts) == []
