"""Checkpoints as verl's Megatron-FSDP path saves them, by the same calls of Megatron-Bridge, become Hugging Face folders."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from exports import exported, read
from models import Layout, build, conversations, largest_difference, step
from ranks import run_ranks
from runs import stored

from mfsdp_cli.checkpoint.inspect import inspect
from mfsdp_cli.errors import BAD_INPUT, MISMATCH, MfsdpError

MODEL, OLD = "model/dist_ckpt", "dist_ckpt"


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


def bridge_functions() -> dict:
    """Megatron-Bridge's training/checkpointing.py, of which only the DTensor functions are run: the module imports packages that
    are not here (modelopt, energon, datasets)."""
    import ast

    import megatron.bridge
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    source = Path(megatron.bridge.__path__[0]) / "training" / "checkpointing.py"
    wanted = ("preprocess_fsdp_dtensor_state_dict", "save_fsdp_dtensor_checkpoint", "_create_fsdp_dtensor_storage_writer")
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    future = ast.parse("from __future__ import annotations").body
    names = {"torch": torch, "F": torch.nn.functional, "HAVE_MEGATRON_FSDP": True, "MultiStorageClientFeature": SimpleNamespace(is_enabled=bool),
             **vars(fsdp_dtensor_checkpoint), **vars(uneven_dtensor)}
    exec(compile(ast.Module([*future, *functions], []), str(source), "exec"), names)
    return names


def save_as_verl(model: Path, layout: Layout, role: Path, trap: Path):
    """verl's megatron_checkpoint_manager.py, save_checkpoint with save_contents [model, optimizer, extra] and use_megatron_fsdp.
    Returns the weights as the engine gives them."""
    import torch.distributed as dist
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    engine = build(model, layout)
    step(engine, conversations(seed=31), 1e-3)
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor", "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    engine.module.synchronize_param_gather()  # a save right after a step, as verl's, finds the parameters sharded
    weights = engine.module.state_dict_for_save_checkpoint()
    state = {"model": weights, "optimizer": engine.optimizer.sharded_state_dict({"model": weights}, is_loading=False, metadata=metadata),
             "lr_scheduler": {"max_lr": 1e-3, "num_steps": 7}, "rng_state": {"(0, 0)": [{"random_rng_state": Trap(trap)}]}}
    bridge_functions()["save_fsdp_dtensor_checkpoint"](str(role / MODEL), state, cfg=None, model=engine.module.module)
    hf = role / "model" / "huggingface"
    names = ("modelopt", "modelopt.torch", "modelopt.torch.quantization", "modelopt.torch.quantization.utils")
    sys.modules.update(dict.fromkeys(names, SimpleNamespace(is_quantized=lambda model: False)))  # what Bridge asks of it here
    engine.bridge.save_hf_weights(engine.model, str(hf), show_progress=False)
    if dist.get_rank() == 0:
        for saved in (AutoConfig, AutoTokenizer, GenerationConfig):
            saved.from_pretrained(model).save_pretrained(hf)
        places = {"model": {"path": MODEL}, "optimizer": {"path": MODEL}, "hf_config": {"path": "model/huggingface"}}
        contents = {"schema_version": 2, "arch": "Qwen2ForCausalLM", "global_step": 7, "world_size": layout.ranks,
                    "save_contents": ["model", "optimizer", "extra"], "contents": places}
        (role / "ckpt_contents.json").write_text(json.dumps(contents))
    return dict(engine.named_weights())


CASES = {"dense": ("qwen2", Layout(ranks=2, tp=2, dtype="bfloat16")), "mixture": ("qwen3_moe", Layout(ranks=2, ep=2, dtype="bfloat16"))}


@pytest.fixture(scope="module", params=CASES)
def saved(request, tiny, tmp_path_factory):
    """(model, verl's folder of the role, the engine's weights, the trap's file)"""
    name, layout = CASES[request.param]
    model, folder = tiny(name, dtype="bfloat16"), tmp_path_factory.mktemp("verl")
    weights = run_ranks(layout.ranks, save_as_verl, model, layout, folder / "global_step_7" / "actor", folder / "trap")[0]
    return model, folder / "global_step_7" / "actor", weights, folder / "trap"


def test_the_exported_folder_holds_the_engine_s_weights(saved, tmp_path):
    model, role, weights, trap = saved
    report = inspect(role.parent)
    assert report["exit_code"] == 0 and report["num_objects"] > 0
    assert report["export"] == {"possible": True, "why": f"mfsdp ckpt export-hf {role} -o DIR"}
    report = exported(role.parent, tmp_path / "out")  # verl wrote its own in float32; the configuration says bfloat16
    tensors = read(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in tensors.items()} == {n: (t.dtype, t.shape) for n, t in read(model).items()}
    assert largest_difference(tensors, weights) == 0.0 and largest_difference(tensors, read(model)) > 1e-4
    assert report["step"] == 7 and report["forward_check_difference"] < 5e-2
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).is_file()
    assert not trap.exists()  # pickled objects are passed over


def test_the_old_layout_and_a_folder_without_weights(saved, tmp_path):
    model, role, weights, _ = saved
    old = tmp_path / "global_step_7" / "actor"
    shutil.copytree(role / MODEL, old / OLD)
    shutil.copytree(role / "model" / "huggingface", old / "huggingface", ignore=shutil.ignore_patterns("*.safetensors*"))
    with pytest.raises(MfsdpError) as caught:
        exported(old, tmp_path / "out")
    assert caught.value.exit_code == BAD_INPUT and "--source" in caught.value.problems[0].fix
    assert exported(old, tmp_path / "out", source=model, dtype="float32")["step"] == 7
    assert largest_difference(read(tmp_path / "out"), read(role / "model" / "huggingface")) == 0.0  # float32 main weights, both


FUSED = ((r"(layers\.\d+\.)input_layernorm\.", r"\1self_attention.linear_qkv.layer_norm_"),
         (r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"mlp.experts.\2.weight\1"))
FUSED_DENSE = ((r"(layers\.\d+\.)pre_mlp_layernorm\.", r"\1mlp.linear_fc1.layer_norm_"),)


def test_names_of_transformer_engine_s_layers(saved, tmp_path):
    """On GPUs norms and experts are parts of fused layers, and layers have a state of their own."""
    import torch
    import torch.distributed.checkpoint as dcp

    model, role, weights, _ = saved
    parameters = {name: tensor for name, tensor in stored(role / MODEL, beside_objects=True).items() if name.startswith("model.")}
    state = {}
    is_mixture = any(".experts." in name for name in parameters)
    for name, tensor in parameters.items():
        for pattern, fused in FUSED if is_mixture else FUSED + FUSED_DENSE:
            name = re.sub(pattern, fused, name)
        state[name] = tensor
    assert sum("layer_norm_weight" in name for name in state) >= 2
    state["model.module.decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    old = tmp_path / "global_step_7" / "actor"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(old / OLD), no_dist=True)
    exported(old, tmp_path / "out", source=model)
    assert largest_difference(read(tmp_path / "out"), weights) == 0.0


def test_weights_beside_the_shards_that_are_another_model_s(saved, tmp_path):
    from safetensors.torch import save_file

    _, role, _, _ = saved
    copy = shutil.copytree(role, tmp_path / "actor")
    tensors = read(copy / "model" / "huggingface")
    for file in (copy / "model" / "huggingface").glob("*.safetensors*"):
        file.unlink()
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, copy / "model" / "huggingface" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MfsdpError, match="model.norm.weight = other than in") as caught:
        exported(copy, tmp_path / "out")
    assert caught.value.exit_code == MISMATCH and not (tmp_path / "out").exists()


def test_metadata_that_would_run_code_is_refused(saved, tmp_path):
    _, role, _, _ = saved
    copy = shutil.copytree(role, tmp_path / "actor")
    (copy / MODEL / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "trap")))
    with pytest.raises(MfsdpError, match="may be an attack") as caught:
        exported(copy, tmp_path / "out")
    assert caught.value.exit_code == BAD_INPUT and not (tmp_path / "trap").exists()


def test_a_save_that_was_interrupted_or_is_no_fsdp_checkpoint(saved, tmp_path):
    _, role, _, _ = saved
    copy = shutil.copytree(role, tmp_path / "actor")
    (copy / MODEL / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(MfsdpError, match="without Megatron-FSDP"):
        exported(copy, tmp_path / "out")
    (copy / "ckpt_contents.json").unlink()
    with pytest.raises(MfsdpError, match="this save was interrupted"):
        exported(copy, tmp_path / "out")
