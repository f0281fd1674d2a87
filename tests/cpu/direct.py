"""The loop of `mfsdp grpo` in one forked process: a trainer rank and a sampler called directly, without Ray and its start-up."""

from __future__ import annotations

from pathlib import Path

from ranks import free_port, run_ranks

from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.rewards.base import RewardResult
from mfsdp_cli.train.process import RankProcess


class Direct:
    """What `grpo.Run` needs of `ray_group.Cluster`."""

    num_ranks, num_samplers, writers, on_gpu = 1, 1, [0], False

    def __init__(self, settings: GrpoSettings, run_dir: Path):
        from mfsdp_cli.train.ranks import TrainerRank

        self.settings, self.rank = settings, TrainerRank(settings, run_dir, 0, 1, 0)

    def put(self, value):
        return value

    def start_trainers(self) -> dict:
        return self.rank.start(f"tcp://127.0.0.1:{free_port()}")

    def on_ranks(self, method: str, *args, **_) -> list:
        return [getattr(self.rank, method)(*args)]

    def start_samplers(self, *args) -> None:
        from mfsdp_cli.rollout.base import make_sampler

        data = self.settings.data
        self.sampler = make_sampler(self.settings.rollout, *args, self.settings.engine.dtype, "cpu", data.max_prompt_length + data.max_response_length)

    def samplers_started(self) -> None:
        """`start_samplers` waits."""

    def begin_sampling(self, prompts, sampling, seeds) -> list:
        return self.sampler.generate(prompts, sampling, seeds)  # at once: an actor, too, does so before a later update of its weights

    def finish_sampling(self, handles: list) -> list:
        return handles

    def on_samplers(self, method: str, *args) -> list:
        return [getattr(self.sampler, method)(*args)]


def _run(settings: GrpoSettings, run_dir: Path, make_cluster, score):
    from mfsdp_cli.config.load import to_dict
    from mfsdp_cli.train.grpo import Run, loop
    from mfsdp_cli.train.metrics import EtaMeter, MetricsLog

    process = RankProcess(run_dir / "attempts" / "001", 0, 0, name="direct")

    class Pool:
        def score(self, items):
            return [score(*item) for item in items]

    trainer = settings.trainer
    run = Run(settings, run_dir, process, make_cluster(settings, run_dir), Pool())
    run.sync_weights()
    with MetricsLog(run_dir, ["file"], trainer.project_name, trainer.experiment_name, to_dict(settings), True, run.step) as log:
        loop(run, log, EtaMeter(run.total_steps))


def run_loop(settings: GrpoSettings, run_dir: Path, score, make_cluster=Direct, timeout_s: float = 180) -> list[dict]:
    """Records of metrics.jsonl. Raises RuntimeError with the failure's traceback.

    score  (data_source, solution, ground_truth, extra_info) -> RewardResult, called in the process itself
    """
    from mfsdp_cli.train.metrics import read_metrics

    run_ranks(1, _run, settings, run_dir, make_cluster, score, timeout_s=timeout_s)
    return list(read_metrics(run_dir))


def settings_for(tiny, prompts: Path, run_dir, **overrides) -> GrpoSettings:
    settings = GrpoSettings()
    settings.model.path = str(tiny("qwen2"))
    settings.data.train_files, settings.data.val_files = [str(prompts / "train.parquet")], [str(prompts / "test.parquet")]
    settings.data.train_batch_size, settings.actor.ppo_mini_batch_size = 4, 4
    settings.data.max_prompt_length, settings.data.max_response_length = 64, 12
    settings.engine.device, settings.engine.dtype = "cpu", "float32"
    settings.optim.lr, settings.actor.use_kl_loss, settings.rollout.name, settings.rollout.n = 3e-3, False, "hf", 4
    settings.trainer.total_training_steps, settings.trainer.save_freq, settings.trainer.test_freq = 3, -1, -1
    settings.trainer.val_before_train, settings.trainer.output_dir = False, str(run_dir)
    for name, value in overrides.items():
        section, _, field = name.partition("__")
        assert hasattr(getattr(settings, section), field), name
        setattr(getattr(settings, section), field, value)
    return settings


def by_letters(data_source, solution, ground_truth, extra_info) -> RewardResult:
    """The share of letters: differs within every group of a random model, and can be learned."""
    return RewardResult(sum(c.isascii() and c.isalpha() for c in solution) / max(1, len(solution)), solution[:3], "wrong")


def steps(records) -> list[dict]:
    return [r for r in records if "loss" in r]
