"""Ray: the cluster, the trainer ranks and the samplers as actors, and waits that end.

    one bundle {CPU: 1, GPU: 1} a trainer rank (no GPU on CPU); a colocated sampler shares the GPUs of the bundles it lies in,
    one that is apart has bundles of its own. Which GPUs an actor sees is written into its environment here.

A request that is larger than the cluster is refused before anything starts; every other wait has a limit and says what
it waits for.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mfsdp_cli.config.rules_rollout import num_engines
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.rollout.base import Sampling
from mfsdp_cli.train.process import RankProcess
from mfsdp_cli.train.ranks import TrainerRank
from mfsdp_cli.types import Response

POLL_S = 2.0
FORWARDED = ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "TOKENIZERS_PARALLELISM", "VLLM_")


class _Actor:
    """What every actor of ours is made of: its own log, and a last word when it fails."""

    def __init__(self, attempt_dir: str, name: str):
        self.process = RankProcess(Path(attempt_dir), rank=-1, local_rank=-1, name=name)

    def node(self) -> tuple[str, list]:
        """(address of this node, ids of the GPUs that Ray gave this actor)."""
        return ray.util.get_node_ip_address(), ray.get_gpu_ids()

    def call(self, method: str, *args):
        with self.process.last_word():
            return getattr(self.target, method)(*args)


@ray.remote(max_restarts=0, max_task_retries=0)
class TrainerActor(_Actor):
    def __init__(self, attempt_dir: str, settings: GrpoSettings, run_dir: str, rank: int, world_size: int):
        super().__init__(attempt_dir, f"trainer{rank}")
        self.target = TrainerRank(settings, Path(run_dir), rank, world_size, local_rank=0)  # it sees one GPU

    def hand_over_weights(self, samplers: list, limit_s: float) -> None:
        def send(info: dict) -> None:
            wait([s.call.remote("receive", info) for s in samplers], "the samplers to take in weights", limit_s)

        self.call("hand_over_weights", send)

    def free_port(self) -> int:
        with socket.socket() as s:
            s.bind(("", 0))
            return s.getsockname()[1]


@ray.remote(max_restarts=0, max_task_retries=0)
class SamplerActor(_Actor):
    def __init__(self, attempt_dir: str, settings: GrpoSettings, number: int):
        super().__init__(attempt_dir, f"sampler{number}")
        self.settings = settings

    def prepare(self) -> None:
        """All imports, while the trainers load the model; what they leave on a shared GPU is known only to `start`."""
        with self.process.last_word():
            from mfsdp_cli.rollout.base import sampler_class

            sampler_class(self.settings.rollout.name)

    def start(self, model_dir: str, shapes: dict, max_model_len: int) -> None:
        with self.process.last_word():
            import torch

            from mfsdp_cli.rollout.base import make_sampler

            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.target = make_sampler(self.settings.rollout, model_dir, shapes, self.settings.engine.dtype, device, max_model_len,
                                       self.settings.model.trust_remote_code)


class Cluster:
    """Connection to Ray, and the actors of one run. Use as a context manager: what was started is ended."""

    def __init__(self, settings: GrpoSettings, run_dir: Path, attempt_dir: Path, on_gpu: bool):
        self.settings, self.run_dir, self.attempt_dir, self.on_gpu = settings, run_dir, attempt_dir, on_gpu
        self.limit_s = settings.trainer.startup_timeout_s
        self.num_ranks = settings.trainer.nnodes * settings.trainer.n_gpus_per_node
        self.num_samplers = num_engines(settings, on_gpu)
        self.groups: list = []
        self.trainers: list = []
        self.samplers: list = []

    def __enter__(self) -> Cluster:
        address = self.settings.trainer.ray_address
        common = {"logging_level": "ERROR", "log_to_driver": False, "namespace": f"mfsdp-{os.getpid()}"}
        if address:
            # its workers do not have the driver's environment
            inherited = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
            # As `ray start` does: with a token in its place (~/.ray/auth_token), a cluster asks for it. ray.init by itself does not look.
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            try:
                ray.init(address=address, runtime_env={"env_vars": inherited}, **common)
            except ConnectionError as error:
                raise MfsdpError(Problem("trainer.ray_address", address, f"no Ray cluster answers there: {error}",
                                         "start one with ray start --head, or leave the address out for a local one", code=MACHINE_UNFIT)) from error
        else:
            # "local": neither another run's Ray nor the address that a killed one left in /tmp/ray. It is ours alone: the processes
            # share the cores, whatever their number.
            start_local(address="local", num_cpus=max(os.cpu_count() or 1, self.num_ranks + self.num_samplers), include_dashboard=False, **common)
        try:
            self._start_actors()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for actor in self.trainers + self.samplers:
            ray.kill(actor)
        for group in self.groups:
            remove_placement_group(group)
        ray.shutdown()

    def _start_actors(self) -> None:
        gpu = {"GPU": 1} if self.on_gpu else {}
        apart = not self.settings.rollout.colocate and self.on_gpu
        sampler_cpus = 0 if self.on_gpu and not apart else 1
        bundles = [{"CPU": 1, **gpu} for _ in range(self.num_ranks)]
        sampler_bundle = {"CPU": 1, **({"GPU": self.settings.rollout.tensor_model_parallel_size} if apart else {})}
        if apart or not self.on_gpu:
            bundles += [sampler_bundle] * self.num_samplers
        require_resources(bundles, ray.cluster_resources(), {n["NodeManagerAddress"]: n["Resources"] for n in ray.nodes() if n["Alive"]})
        group = placement_group(bundles, strategy="PACK")
        self.groups.append(group)
        free = ", ".join(f"{ray.available_resources().get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        wait([group.ready()], f"Ray to reserve {describe(bundles)}; free when asked: {free}", self.limit_s,
             "end the jobs that hold the rest (`ray list jobs`, `ray status`), or ask for less")

        attempt = str(self.attempt_dir)
        for rank in range(self.num_ranks):
            strategy = PlacementGroupSchedulingStrategy(group, rank)
            actor = TrainerActor.options(num_cpus=1, num_gpus=1 if self.on_gpu else 0, scheduling_strategy=strategy)
            self.trainers.append(actor.remote(attempt, self.settings, str(self.run_dir), rank, self.num_ranks))
        places = wait([t.node.remote() for t in self.trainers], f"{self.num_ranks} trainer processes to start", self.limit_s)
        nodes = [node for node, _ in places]
        self.writers = [nodes.index(node) for node in dict.fromkeys(nodes)]  # one rank of each host hands on the weights
        for number in range(self.num_samplers):
            options, tp = {"num_cpus": sampler_cpus, "num_gpus": 0}, self.settings.rollout.tensor_model_parallel_size
            if self.on_gpu and not apart:
                first = number * tp
                mine = places[first : first + tp]
                if len({node for node, _ in mine}) > 1:
                    raise MfsdpError(Problem("rollout.tensor_model_parallel_size", str(tp), f"engine {number} would span nodes {mine}",
                                             "use a value that divides trainer.n_gpus_per_node", code=MACHINE_UNFIT))
                bundle = first
                gpus = ",".join(str(g) for _, ids in mine for g in ids)
                options["runtime_env"] = {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
            else:
                bundle = self.num_ranks + number
                options["num_gpus"] = tp if apart else 0
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
            self.samplers.append(SamplerActor.options(**options).remote(attempt, self.settings, number))
        self.preparing = [s.prepare.remote() for s in self.samplers]
        self.head = nodes[0]

    # --- the trainer ranks ----------------------------------------------------------------------------------------

    def start_trainers(self) -> dict:
        """Where the run stands, from rank 0. The samplers import meanwhile; what they cannot import is told at once."""
        address, port = self.free_address()
        refs = [t.call.remote("start", f"tcp://{address}:{port}") for t in self.trainers]
        what = f"the trainer ranks to load the model, and the samplers to import {self.settings.rollout.name}"
        return wait(refs + self.preparing, what, self.limit_s)[0]

    def on_ranks(self, method: str, *args, what: str = "", limit_s: float | None = None) -> list:
        """Call a method of `TrainerRank` on all ranks; their results in order."""
        refs = [t.call.remote(method, *args) for t in self.trainers]
        return wait(refs, what or f"the trainer ranks: {method}", limit_s or self.limit_s)

    def free_address(self) -> tuple[str, int]:
        """Where the trainer's rank 0 may listen."""
        return self.head, wait([self.trainers[0].free_port.remote()], "a free port", self.limit_s)[0]

    def hand_over_weights(self) -> None:
        """The trainer ranks call the samplers themselves, buffer by buffer."""
        wait([t.hand_over_weights.remote(self.samplers, self.limit_s) for t in self.trainers], "the weights to be handed over", self.limit_s)

    def on_both(self, of_ranks: str, rank_args: tuple, of_samplers: str, sampler_args: list[tuple]) -> None:
        """A method of all ranks and one of all samplers at once, since each side waits for the other."""
        refs = [t.call.remote(of_ranks, *rank_args) for t in self.trainers]
        refs += [s.call.remote(of_samplers, *args) for s, args in zip(self.samplers, sampler_args, strict=True)]
        wait(refs, f"trainer ranks and samplers: {of_ranks}, {of_samplers}", self.limit_s)

    def put(self, value):
        """An argument of several calls, handed over once."""
        return ray.put(value)

    # --- the samplers ---------------------------------------------------------------------------------------------

    def start_samplers(self, model_dir: str, shapes: dict) -> None:
        """Once the trainers have what they need of the GPUs; `samplers_started` waits. They have no weights yet; see `make_sampler`."""
        data = self.settings.data
        length = data.max_prompt_length + data.max_response_length
        self.starting = [s.start.remote(model_dir, shapes, length) for s in self.samplers]

    def samplers_started(self) -> None:
        wait(self.starting, f"{self.num_samplers} samplers to start", self.limit_s)

    def begin_sampling(self, prompts: list, sampling: Sampling, seeds: list[int]) -> list:
        """Start to sample, prompts dealt to the samplers in order; `finish_sampling` waits. seeds: n a prompt, row by row."""
        count, samplers = len(prompts), self.samplers[: max(1, min(len(self.samplers), len(prompts)))]
        bounds = [count * i // len(samplers) for i in range(len(samplers) + 1)]
        return [s.call.remote("generate", prompts[a:b], sampling, seeds[a * sampling.n : b * sampling.n])
                for s, a, b in zip(samplers, bounds, bounds[1:])]

    def finish_sampling(self, handles: list) -> list[list[Response]]:
        parts = wait(handles, "responses", self.settings.rollout.timeout_s)
        return [responses for part in parts for responses in part]

    def on_samplers(self, method: str, *args) -> list:
        return wait([s.call.remote(method, *args) for s in self.samplers], f"the samplers: {method}", self.limit_s)


def start_local(**options) -> None:
    """Start Ray here. Twice at most: it gives its own processes 30 s, which is not to be changed, and a busy machine may take longer."""
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises a bare Exception for this
        print(f"Ray did not start, trying once more: {error}", flush=True)
        ray.shutdown()
        ray.init(**options)


def require_resources(bundles: list[dict], available: dict, by_node: dict[str, dict]) -> None:
    """Raise when the cluster could never hold the bundles: Ray would wait for ever."""
    for kind in ("GPU", "CPU"):
        needed, there = sum(b.get(kind, 0) for b in bundles), available.get(kind, 0)
        if needed > there:
            nodes = "; ".join(f"{node} {resources.get(kind, 0):g}" for node, resources in by_node.items())
            raise MfsdpError(Problem(f"Ray's {kind}s", f"{there:g}", f"this run needs {needed:g}; by node: {nodes}",
                                     "use fewer ranks or samplers, or a larger cluster (trainer.ray_address)", code=MACHINE_UNFIT))
    for size in sorted({b["GPU"] for b in bundles if b.get("GPU", 0) > 1}):
        wanted, fit = sum(b.get("GPU", 0) == size for b in bundles), sum(int(r.get("GPU", 0) // size) for r in by_node.values())
        if wanted > fit:
            nodes = "; ".join(f"{node} {r.get('GPU', 0):g}" for node, r in by_node.items())
            why = f"{wanted} engines need {size:g} GPUs of one node each, and there is room for {fit}; GPUs by node: {nodes}"
            raise MfsdpError(Problem("rollout.tensor_model_parallel_size", f"{size:g}", why, "a smaller --gen-tp, fewer rollout.num_engines, or "
                                     "larger nodes", code=MACHINE_UNFIT))


def describe(bundles: list[dict]) -> str:
    return f"{len(bundles)} places: {sum(b.get('CPU', 0) for b in bundles):g} CPUs, {sum(b.get('GPU', 0) for b in bundles):g} GPUs"


def wait(refs: list, what: str, limit_s: float, fix: str = "see the logs of trainer*.log and sampler*.log in the attempt's folder") -> list:
    """Results of all, in order. Raises MfsdpError when the limit is over, saying how many were still out; an actor's own
    failure is raised as it comes, and its last word is in the attempt's folder."""
    started = time.monotonic()
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(POLL_S, max(0.0, limit_s - (time.monotonic() - started))))
        ray.get(done)  # a failure is told at once, not after the limit
        if pending and time.monotonic() - started >= limit_s:
            raise MfsdpError(Problem("waiting", what, f"{len(pending)} of {len(refs)} not there after {limit_s:g} s", fix, code=MACHINE_UNFIT))
    return ray.get(refs)
