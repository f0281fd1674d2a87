"""A model folder and chat files that satisfy every check before a launch, written in milliseconds and without torch."""

from __future__ import annotations

import json
from pathlib import Path

TINY_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}


def write_model(folder: Path) -> Path:
    """config.json, an empty tokenizer.json and a safetensors file with one float32 weight of 4 elements."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_QWEN2))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return folder


def write_checkpoint(run_dir: Path, step: int, *, contents=("model", "optimizer", "extra"), rows: int = 512, tp: int = 1, **more) -> Path:
    """RUN/checkpoints/step_N of a complete checkpoint, as the trainer's files are named; no tensor in it is real."""
    from mfsdp_cli.checkpoint.manifest import Manifest
    from mfsdp_cli.checkpoint.saving import begin, commit

    tmp = begin(run_dir / "checkpoints", step)
    (tmp / "dist_ckpt").mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (tmp / "dist_ckpt" / name).write_bytes(bytes(8))
    if "model" in contents:
        write_model(tmp / "huggingface")
        (tmp / "huggingface" / "model.safetensors").unlink()
        (tmp / "source_index.json").write_text(json.dumps({"model.norm.weight": {"shape": [4], "dtype": "float32"}}))
    (tmp / "trainer.json").write_text("{}")
    return commit(tmp, Manifest(step=step, total_steps=9, samples_consumed=8 * step, contents=list(contents), topology={"world": tp, "tp": tp},
                                dtype="float32", padded_vocab_size=rows, architecture="Qwen2ForCausalLM", source_model="tiny", num_tensors=1, **more))


def write_chats(path: Path, num_rows: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    chats = [[{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}] for i in range(num_rows)]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pq.write_table(pa.table({"messages": pa.array(chats, kind)}), path)
    return path


def write_prompts(path: Path, num_rows: int) -> Path:
    """Rows in verl's layout, as `mfsdp prep-data --for rl` writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pq.write_table(pa.table({
        "data_source": ["arithmetic"] * num_rows,
        "prompt": pa.array([[{"role": "user", "content": f"{i} + 1?"}] for i in range(num_rows)], chat),
        "reward_model": [{"style": "rule", "ground_truth": str(i + 1)} for i in range(num_rows)],
        "extra_info": [{"split": "train", "index": i} for i in range(num_rows)],
    }), path)
    return path


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below, with size and time of change: to show that something wrote nothing."""
    return {str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}
