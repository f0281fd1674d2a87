"""What a user would pick instead of mfsdp's SFT, on the same shape and tokens: transformers, the same with liger-kernel, TRL.

All with float32 weights, gradients and moments, and bfloat16 autocast, as mfsdp has float32 main weights. TRL's SFTTrainer packs with
strategy "wrapped": samples as long as a sequence stay rows of a batch, which SDPA handles by its causal kernel; "bfd" makes one
long row and, without the package flash-attn, a mask of all tokens by all tokens.
"""

from __future__ import annotations

import tempfile
import time

from shapes import SHAPES


def transformers_model(shape: str, recompute: str):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**SHAPES[shape]), dtype=torch.float32, attn_implementation="sdpa").train()
    if recompute == "full":
        model.gradient_checkpointing_enable()
    return model, device


def hf(args, liger: bool = False):
    """(step, device): a plain loop with fused AdamW; step() -> (tokens, loss)."""
    import torch

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()  # rotary, norms, SwiGLU, and the output layer fused with its cross entropy
    model, device = transformers_model(args.shape, args.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, SHAPES[args.shape]["vocab_size"], (args.tokens // args.seq, args.seq), device=device)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ids.numel(), loss.item()

    return step, device


def hf_liger(args):
    return hf(args, liger=True)


def trl(args) -> tuple[list[float], float, object]:
    """(seconds of each timed step, last loss, device): its own trainer and loop, from one end of a step to the next."""
    import numpy as np
    from datasets import Dataset
    from make_tiny_model import make_tokenizer
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    model, device = transformers_model(args.shape, "none")
    rows, steps = args.tokens // args.seq, args.warmup + args.steps
    vocab_size = SHAPES[args.shape]["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab_size, (rows * steps, args.seq))
    tokenizer = make_tokenizer(min(2048, vocab_size - 9))
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            if device.type == "cuda":
                import torch

                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=rows, max_steps=steps, max_length=args.seq, packing=True,
            packing_strategy="wrapped", gradient_checkpointing=args.recompute == "full", bf16=True, use_cpu=device.type == "cpu",
            learning_rate=1e-5, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
        )
        rows_of_ids = Dataset.from_dict({"input_ids": ids.tolist()})
        trainer = SFTTrainer(model, config, train_dataset=rows_of_ids, processing_class=tokenizer, callbacks=[Clock()])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [b - a for a, b in zip(ends[args.warmup - 1 :], ends[args.warmup :])], float(losses[-1]), device
