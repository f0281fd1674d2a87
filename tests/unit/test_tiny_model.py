"""The tiny models of the tests: loadable, reproducible, and with nothing left at a neutral value."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_model import FAMILIES, make_tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_with_random_weights_throughout(tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tied = family != "llama"
    folder = make_tiny_model(tmp_path / "m", family, tied=tied, seed=3)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 + 1?"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"  # no system prompt of its own
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "|".join(tokenizer.decode([i]) for i in ids[3:11]) == "What| is| |1| +| |1|?" and len(ids) == 16
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>") and max(ids) < len(tokenizer) < 512
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32 and weight.std() > 0.02, name  # neither zeros nor ones
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert model.get_input_embeddings().weight.shape == (512, 64)
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()


def test_the_same_seed_gives_the_same_folder(tmp_path):
    first, again, other = (make_tiny_model(tmp_path / name, "qwen3", seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_a_vocabulary_too_small_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="259"):
        make_tiny_model(tmp_path, vocab_size=260)
