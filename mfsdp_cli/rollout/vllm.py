"""vLLM (0.24) as a sampler, on GPU and on CPU.

The engine is vLLM's synchronous `LLM`. What verl calls rollout mode "async" is here the actor around the sampler: the driver hands it
a whole batch and waits for it when it pleases, so that an AsyncLLM would add a process or two and 30 to 60 s of start-up, for the single
requests, pauses and aborts that nobody asks for. Weights come as a folder (`update_weights`: any device) or by vLLM's own transfer from
GPU to GPU (`begin_update`, `receive`, `end_update`).

`launch.command` sets what vLLM reads from the environment at import, above all VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine in this
process. By hand on CPU, TORCH_COMPILE_DISABLE=1 (start-up of 2 s instead of 11 to 17) and OMP_NUM_THREADS=1 (threads that wait by
spinning cost up to five times the time on a busy machine) are worth their while.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mfsdp_cli.errors import MACHINE_UNFIT, MfsdpError, Problem
from mfsdp_cli.rollout.base import Sampling, check_request, respond
from mfsdp_cli.rollout.transfer import check_same_tensors, tensor_shapes
from mfsdp_cli.types import Response

if TYPE_CHECKING:
    from mfsdp_cli.config.schema_grpo import RolloutSettings

CPU_BLOCK = 128  # tokens of a cache block of vLLM's on CPU
CPU_CACHE_BYTES = 2 << 30


class VllmSampler:
    """See `base.Sampler`. Raises MfsdpError if the installed vLLM is built for another device."""

    def __init__(self, settings: RolloutSettings, model_dir, shapes: dict, dtype: str, device: str, max_model_len: int,
                 trust_remote_code: bool = False):
        from transformers import AutoConfig, AutoTokenizer
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu() != (device == "cpu"):
            why = f"the installed vLLM runs on {current_platform.device_type}, the run on {device}"
            fix = "install the other build of vLLM, or set rollout.name=hf"
            raise MfsdpError(Problem("rollout.name", "vllm", why, fix, code=MACHINE_UNFIT))
        self.version = 0
        self.max_model_len = max_model_len
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        self._config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code).get_text_config()
        self._shapes = shapes
        self._received: dict[str, tuple[int, ...]] = {}
        self._can_sleep, self._awake = settings.enable_sleep_mode and device == "cuda", True
        self._llm = LLM(
            str(model_dir), skip_tokenizer_init=True, trust_remote_code=trust_remote_code, dtype=dtype, seed=0, load_format="dummy",
            tensor_parallel_size=settings.tensor_model_parallel_size, max_model_len=max_model_len, max_num_seqs=settings.max_num_seqs,
            # never Ray's own executor, which vLLM picks by itself inside a Ray actor
            distributed_executor_backend="mp" if settings.tensor_model_parallel_size > 1 else "uni",
            logprobs_mode="processed_logprobs", use_tqdm_on_load=False,
            **(self._on_cpu(settings, dtype) if device == "cpu" else self._on_gpu(settings)),
        )
        # An update goes through the same loader, and the dummy one would load nothing.
        self._llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))

    @staticmethod
    def _on_gpu(settings: RolloutSettings) -> dict:
        from vllm.config import WeightTransferConfig

        return {"gpu_memory_utilization": settings.gpu_memory_utilization, "enforce_eager": settings.enforce_eager,
                "enable_sleep_mode": settings.enable_sleep_mode,
                "weight_transfer_config": WeightTransferConfig(backend="ipc" if settings.colocate else "nccl")}

    def _on_cpu(self, settings: RolloutSettings, dtype: str) -> dict:
        """A prompt split over steps would end the engine: "CPU Generator does not use offset" (gpu_model_runner.py, a seeded request whose
        token is discarded). Without chunks a step must have room for the longest prompt. The cache is asked for in bytes, since vLLM
        otherwise takes gpu_memory_utilization of the machine's memory."""
        return {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": max(self.max_model_len, 2048),
                "kv_cache_memory_bytes": cache_bytes(self._config, dtype, self.max_model_len, settings.max_num_seqs)}

    def generate(self, prompts: list[np.ndarray], sampling: Sampling, seeds: list[int]) -> list[list[Response]]:
        """Each response is a request of its own, with its own seed: vLLM derives the seeds of one request's n > 1 by itself."""
        from vllm import SamplingParams

        assert self._awake, "an engine that sleeps would wait for ever"
        assert self.version, "an engine without weights"
        check_request(prompts, sampling, seeds, self.max_model_len)
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts for _ in range(sampling.n)]
        params = [SamplingParams(
            seed=seed, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
        ) for seed in seeds]
        outputs = [request.outputs[0] for request in self._llm.generate(requests, params, use_tqdm=False)]
        responses = [self._response(output, sampling) for output in outputs]
        return [responses[i:i + sampling.n] for i in range(0, len(responses), sampling.n)]

    def _response(self, output, sampling: Sampling) -> Response:
        drawn = output.logprobs  # flat: the sampled token alone, at each position
        assert output.finish_reason in ("stop", "length"), output.finish_reason
        assert drawn.token_ids == list(output.token_ids), "a log-probability of another token than the sampled one"
        return respond(self._tokenizer, output.token_ids, drawn.logprobs, sampling, self.version)

    def update_weights(self, path: str) -> int:
        assert self._awake
        if not Path(path).is_dir():
            raise FileNotFoundError(f"{path} is no folder on this host: vLLM would look for a model of that name on the hub")
        check_same_tensors(path, tensor_shapes(path), self._shapes, self._is_tied())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        return self._updated()

    # vLLM's own transfer, GPU to GPU; the trainer's side is `native`

    def open_transfer(self, init_info: dict) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def begin_update(self) -> None:
        assert self._awake
        self._received = {}
        self._llm.start_weight_update()

    def receive(self, update_info: dict) -> None:
        """Some of the weights: their names, shapes and where they lie; all of them with NCCL. Returns when they are taken in."""
        self._received |= {name: tuple(shape) for name, shape in zip(update_info["names"], update_info["shapes"], strict=True)}
        self._llm.update_weights({"update_info": update_info})

    def end_update(self) -> int:
        check_same_tensors("the weights that were handed over", self._received, self._shapes, self._is_tied())
        self._llm.finish_weight_update()
        return self._updated()

    def _is_tied(self) -> bool:
        return bool(getattr(self._config, "tie_word_embeddings", False))

    def _updated(self) -> int:
        """Nothing in vLLM drops cached prompts by itself: they would go on with the keys and values of the old weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache: requests are still running")
        self.version += 1
        return self.version

    def sleep(self) -> None:
        """Level 1: the cache is dropped and the weights go to the host's memory: an update may fail, or be left out, without harm."""
        if self._can_sleep:
            self._llm.sleep(level=1)
        self._awake = False

    def wake(self) -> None:
        if self._can_sleep:
            self._llm.wake_up()
        self._awake = True

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._awake = False


def cache_bytes(config, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """Room for max_num_seqs responses of full length, at most 2 GiB, and for one in any case; in whole blocks."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * kv_heads * head_dim * {"float32": 4, "bfloat16": 2}[dtype]
    one = -(-max_model_len // CPU_BLOCK) * CPU_BLOCK * bytes_per_token
    spare = CPU_BLOCK * bytes_per_token  # vLLM keeps one block for itself
    return max(one, min(one * max_num_seqs, CPU_CACHE_BYTES)) + spare
