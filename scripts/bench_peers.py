"""What a user would pick instead of mfsdp's SFT, on the same weights and tokens: transformers, the same with liger-kernel, TRL.

All with float32 weights, gradients and moments, and bfloat16 autocast (but `hf_bf16`), as mfsdp has float32 main weights. TRL's SFTTrainer packs with
strategy "wrapped": samples as long as a sequence stay rows of a batch, which SDPA handles by its causal kernel; "bfd" makes one
long row and, without the package flash-attn, a mask of all tokens by all tokens. What its trainer waits for in each step (it counts
tokens and looks for losses that are NaN) is its own; it logs nothing here.
"""

from __future__ import annotations

import tempfile
from itertools import count

from bench_common import LEARNING_RATE, Clock, Timed, token_rows
from shapes import SHAPES

from mfsdp_cli.config.schema import OptimSettings

OPTIM = OptimSettings()  # mfsdp's own defaults on all sides


def transformers_model(args):
    """The weights in --folder, as float32."""
    import torch
    from transformers import Qwen2ForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Qwen2ForCausalLM.from_pretrained(args.folder, dtype=torch.float32, attn_implementation="sdpa").to(device).train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable()
    return model, device


def hf(args, liger: bool = False):
    """(step, device): a plain loop with fused AdamW; step() -> (tokens, loss)."""
    import torch

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2()  # rotary, norms, SwiGLU, and the output layer fused with its cross entropy
    model, device = transformers_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, tuple(OPTIM.betas), OPTIM.eps, OPTIM.weight_decay, fused=True)
    ids = torch.from_numpy(token_rows(args.shape, args.tokens, args.seq)).to(device)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return ids.numel(), loss.detach()

    return step, device


def hf_liger(args):
    return hf(args, liger=True)


def hf_bf16(args):
    """(step, device) as `hf`, with mfsdp's rounding instead of autocast's: bfloat16 weights and activations, float32 copies of the weights
    that AdamW updates and rounds back. What their losses differ by is not rounding."""
    import torch

    model, device = transformers_model(args)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(copies, LEARNING_RATE, tuple(OPTIM.betas), OPTIM.eps, OPTIM.weight_decay, fused=True)
    ids = torch.from_numpy(token_rows(args.shape, args.tokens, args.seq)).to(device)

    def step():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for copy, weight in zip(copies, model.parameters()):
            copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(copies, OPTIM.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), copies)
        return ids.numel(), loss.detach()

    return step, device


def trl(args) -> Timed:
    """Its own trainer and loop, from one end of a step to the next, with the same rows in every step."""
    from datasets import Dataset
    from make_tiny_model import make_tokenizer
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    model, device = transformers_model(args)
    ids, steps = token_rows(args.shape, args.tokens, args.seq), args.warmup + args.steps
    clock, made = Clock(device), count(1)

    class AtEnds(TrainerCallback):
        def on_step_end(self, *_, **__):
            number = next(made)
            if number == args.warmup:
                clock.start()
            elif number > args.warmup:
                clock.step_ended()

    class Trainer(SFTTrainer):
        def training_step(self, *given, **named):
            self.last_loss = super().training_step(*given, **named)
            return self.last_loss

    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, per_device_train_batch_size=len(ids), max_steps=steps, max_length=args.seq, packing=True,
            packing_strategy="wrapped", gradient_checkpointing=args.recompute == "full", bf16=True, use_cpu=device.type == "cpu",
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta1=OPTIM.betas[0], adam_beta2=OPTIM.betas[1],
            adam_epsilon=OPTIM.eps, weight_decay=OPTIM.weight_decay, max_grad_norm=OPTIM.clip_grad, train_sampling_strategy="sequential",
            logging_strategy="no", report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
        )
        trainer = Trainer(model, config, train_dataset=Dataset.from_dict({"input_ids": ids.tolist() * steps}), callbacks=[AtEnds()],
                          processing_class=make_tokenizer(min(2048, SHAPES[args.shape]["vocab_size"] - 9)))
        trainer.train()
        seconds, each = clock.stop()
    return Timed([ids.size] * args.steps, seconds, each, float(trainer.last_loss))
