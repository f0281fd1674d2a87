#!/usr/bin/env python
"""Write a tiny Hugging Face model folder with random weights and a tokenizer trained on the spot: nothing is downloaded.

Every weight, bias and norm is random and follows from the seed, so that a test of parity cannot pass by ignoring one.

    scripts/make_tiny_model.py --out tiny --family qwen3 --untied --hidden 128
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works too

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PADDED_ROWS = 9  # rows of the embedding beyond the tokenizer's vocabulary, as Qwen's checkpoints have them
# Qwen2.5's template without its default system prompt and tools.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Qwen2's split into words: contractions, letters with one leading character, single digits, punctuation, line ends, spaces.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXT = """What is the sum of two numbers? Let's think step by step and output the final answer after "####".
system
user
assistant
tool
You are a helpful assistant. The answer is the number that follows the marks.
First add the tens, then add the ones. So the total is what we need. If there are more, carry one and go on.
She has some apples and he has twice as many; how many do they have together? They have that many in all."""


def make_tokenizer(vocab_size: int):
    """Byte-level BPE of at most `vocab_size` tokens with ChatML's special tokens last; eos <|im_end|>, pad <|endoftext|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from mfsdp_cli.data.prepare import arithmetic_records

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise SystemExit(f"a byte-level tokenizer needs {smallest} tokens, and only {vocab_size} are left for it")
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    backend.decoder = decoders.ByteLevel()
    sums = [f"{r.value['question']}\n{r.value['answer']}\n" for r in arithmetic_records({"train": 500, "test": 0}, seed=0)["train"]]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    paragraphs = "one\n\ntwo\n\nthree"  # line ends merge, as in real vocabularies
    backend.train_from_iterator([*sums, *TEXT.splitlines(keepends=True), paragraphs], trainer)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        extra_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False, model_max_length=4096)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(family: str, num_experts: int, **sizes):
    import transformers

    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    if family == "qwen2":
        return transformers.Qwen2Config(**sizes)
    if family == "llama":
        return transformers.LlamaConfig(**sizes)
    if family == "qwen3":
        return transformers.Qwen3Config(head_dim=head_dim, **sizes)
    assert family == "qwen3_moe", family
    moe = dict(num_experts=num_experts, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=sizes["intermediate_size"])
    return transformers.Qwen3MoeConfig(head_dim=head_dim, **moe, **sizes)


def randomize(model, seed: int) -> None:
    """Matrices and biases normal(0, 0.05), norms normal(1, 0.1), drawn in the order of the parameters' names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            mean, std = (1.0, 0.1) if "norm" in name else (0.0, 0.05)
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + mean)


def make_tiny_model(out, family: str = "qwen2", tied: bool = True, vocab_size: int = 512, hidden_size: int = 64, num_layers: int = 2,
                    num_heads: int = 4, num_kv_heads: int = 2, intermediate_size: int = 128, num_experts: int = 4, dtype: str = "float32",
                    seed: int = 0) -> Path:
    """Write config, weights, generation config and tokenizer to the folder `out`; returns it.

    vocab_size  rows of the embedding; the tokenizer has at least 9 tokens fewer, and no more than its small corpus gives
    intermediate_size  width of the MLP, or of each expert
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer(vocab_size - PADDED_ROWS)
    sizes = dict(vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=num_layers,
                 num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, max_position_embeddings=4096, tie_word_embeddings=tied,
                 bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = make_config(family, num_experts, dtype=dtype, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, seed)
    model = model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True, help="output layer shares the embedding")
    parser.add_argument("--untied", dest="tied", action="store_false")
    parser.add_argument("--vocab", type=int, default=512, help="rows of the embedding")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    sizes = dict(vocab_size=a.vocab, hidden_size=a.hidden, num_layers=a.layers, num_heads=a.heads, num_kv_heads=a.kv_heads,
                 intermediate_size=a.intermediate, num_experts=a.experts)
    print(make_tiny_model(a.out, a.family, a.tied, dtype=a.dtype, seed=a.seed, **sizes))


if __name__ == "__main__":
    main()
