import random
import string
import subprocess
import sys

import pytest
from load_for_tests import errors, load, only_error

from mfsdp_cli.config.load import ENVIRONMENT, FLAGS, PATH_KEYS, dump_yaml, infer_kind, read_resolved, suggestions, to_dict
from mfsdp_cli.config.load import load as load_kind
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.config.schema_grpo import GrpoSettings
from mfsdp_cli.config.values import SETTINGS, leaves
from mfsdp_cli.errors import CONFIG_INVALID, USAGE, MfsdpError

KINDS = ["sft", "grpo"]


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_nothing_given_is_the_defaults():
    loaded = load()
    assert loaded.settings == SftSettings() and loaded.origins == {} and loaded.problems == []


def test_each_layer_wins_over_the_one_before_it(tmp_path):
    config = write(tmp_path, "engine:\n  tensor_model_parallel_size: 3\n  pipeline_model_parallel_size: 3\n  context_parallel_size: 3\n"
                             "  expert_model_parallel_size: 3\ndata:\n  train_batch_size: 3\n")
    loaded = load(
        "engine.context_parallel_size=5", "engine.expert_model_parallel_size=5", preset="sft-gsm8k-qwen2.5-math-7b", config=config,
        environ={"PP": "4", "EP": "4", "NPROC": ""}, flags={"ep": 6},
    )
    e = loaded.settings.engine
    assert loaded.problems == []
    assert (e.tensor_model_parallel_size, e.pipeline_model_parallel_size, e.context_parallel_size, e.expert_model_parallel_size) == (3, 4,
        5, 6)
    assert loaded.settings.trainer.n_gpus_per_node == 8, "an empty variable is not given"
    assert loaded.origins["trainer.n_gpus_per_node"] == "preset sft-gsm8k-qwen2.5-math-7b"
    assert loaded.origins["engine.tensor_model_parallel_size"] == f"{config}:2"
    assert loaded.origins["data.train_batch_size"] == f"{config}:7"
    assert loaded.origins["engine.pipeline_model_parallel_size"] == "$PP"
    assert loaded.origins["engine.context_parallel_size"] == "command line"
    assert loaded.origins["engine.expert_model_parallel_size"] == "--ep"
    assert "optim.eps" not in loaded.origins


def test_flags_take_python_values_and_either_spelling():
    for flags in ({"train_files": ["a", "b"], "nproc": 2, "tp": None}, {"--train-files": ["a", "b"], "trainer.n_gpus_per_node": 2}):
        loaded = load(flags=flags)
        assert loaded.problems == [] and loaded.settings.data.train_files == ["a", "b"] and loaded.settings.trainer.n_gpus_per_node == 2
        assert loaded.origins == {"data.train_files": "--train-files", "trainer.n_gpus_per_node": "--nproc"}
    assert set(FLAGS.values()) | set(ENVIRONMENT.values()) <= set(leaves("sft")) | set(leaves("grpo"))


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("optim.lr", "1e-5", 1e-5),
        ("optim.lr", "1E-5", 1e-5),
        ("optim.lr", "1", 1.0),
        ("optim.eps", ".5", 0.5),
        ("data.train_batch_size", "1_024", 1024),
        ("data.shuffle", "FALSE", False),
        ("trainer.experiment_name", "yes", "yes"),
        ("trainer.experiment_name", "n", "n"),
        ("trainer.experiment_name", "off", "off"),
        ("trainer.experiment_name", "007", "007"),
        ("trainer.experiment_name", "1e-5", "1e-5"),
        ("trainer.experiment_name", "a: b #c", "a: b #c"),
        ("trainer.experiment_name", '"null"', "null"),
        ("trainer.output_dir", "null", None),
        ("trainer.output_dir", "None", None),
        ("trainer.output_dir", "", None),
        ("trainer.max_ckpt_to_keep", "~", None),
        ("trainer.total_training_steps", "5", 5),
        ("engine.recompute", "none", "none"),
        ("engine.sequence_parallel", "true", True),
        ("engine.sequence_parallel", "null", None),
        ("data.train_files", "a.parquet", ["a.parquet"]),
        ("data.train_files", "[a.parquet, 'b c.parquet']", ["a.parquet", "b c.parquet"]),
        ("data.val_files", "null", []),
        ("trainer.logger", '["console","file"]', ["console", "file"]),
        ("optim.betas", "[0.9,1e-1]", [0.9, 0.1]),
        ("checkpoint.load_contents", "null", None),
        ("checkpoint.load_contents", "[model]", ["model"]),
        ("trainer.startup_timeout_s", "90", 90),
        ("trainer.startup_timeout_s", "90s", 90),
        ("trainer.startup_timeout_s", "30m", 1800),
        ("trainer.startup_timeout_s", "1h30m", 5400),
        ("trainer.startup_timeout_s", "1h 30m", 5400),
        ("trainer.startup_timeout_s", "1d2h3m4s", 93784),
        ("trainer.startup_timeout_s", "90m", 5400),
        ("trainer.startup_timeout_s", "12000ms", 12),
        ("trainer.startup_timeout_s", "0h15s", 15),
        ("trainer.startup_timeout_s", "12.0s", 12),
    ],
)
def test_values(key, text, value):
    loaded = load(f"{key}={text}")
    assert loaded.problems == []
    section, name = key.split(".")
    got = getattr(getattr(loaded.settings, section), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "key, text, why, fix",
    [
        ("optim.lr", "fast", "expected a number, found the text 'fast'", "1e-05"),
        ("optim.lr", "nan", "expected a number", "1e-05"),
        ("optim.lr", "-1", "below the least value, 0.0", "0.0 or more"),
        ("optim.lr_warmup_steps_ratio", "1.5", "above the greatest value, 1.0", "1.0 or less"),
        ("data.train_batch_size", "8.0", "expected an integer (rows)", "write 8"),
        ("data.train_batch_size", "1e3", "expected an integer (rows)", "write 1000"),
        ("data.train_batch_size", "null", "null is no value", "8"),
        ("data.train_batch_size", "0", "below the least value, 1 rows", "1 or more"),
        ("data.train_batch_size", "[8]", "found a list", "8"),
        ("data.shuffle", "yes", "expected True or False, found the text 'yes'", "True or False"),
        ("data.shuffle", "1", "expected True or False, found an integer", "True or False"),
        ("data.truncation", "rigth", "not one of: error, left, right", "did you mean right?"),
        ("data.truncation", "xyzzy", "not one of: error, left, right", "error, left, right"),
        ("engine.dtype", "float16", "not one of: bfloat16, float32", "write one of: bfloat16, float32"),
        ("trainer.logger", "[console, swanlab]", "swanlab is not one of: console, file, tensorboard, wandb", "did you mean wandb?"),
        ("optim.betas", "[0.9, x]", "expected a list of numbers, found the text 'x'", "[0.9, 0.95]"),
        ("engine.override_transformer_config", "3", "expected a mapping", "leave it out"),
        ("trainer.output_dir", "${trainer.project_name}/x", "OmegaConf reference", "the value itself"),
        ("trainer.experiment_name", "null", "null is no value", "sft"),
        ("trainer.startup_timeout_s", "soon", "expected an integer (s), found the text 'soon'", "a duration as 90s, 30m, 1h30m"),
        ("trainer.startup_timeout_s", "5s", "5 is below the least value, 10 s", "10 or more"),
        ("trainer.startup_timeout_s", "10.5s", "10.5s is 10.5 s, and this setting takes whole seconds", "write 11"),
        ("trainer.startup_timeout_s", "30m1h", "found the text '30m1h'", "seconds, or a duration"),
        ("trainer.startup_timeout_s", "1h1h", "found the text '1h1h'", "seconds, or a duration"),
        ("trainer.startup_timeout_s", "1.5h", "found the text '1.5h'", "seconds, or a duration"),
        ("trainer.startup_timeout_s", "-30s", "found the text '-30s'", "seconds, or a duration"),
        ("trainer.startup_timeout_s", "30M", "found the text '30M'", "seconds, or a duration"),
        ("trainer.startup_timeout_s", "30min", "found the text '30min'", "seconds, or a duration"),
        ("data.max_token_len_per_gpu", "30m", "expected an integer (tokens), found the text '30m'", "1024"),
    ],
)
def test_wrong_values_say_what_was_found_and_what_is_right(key, text, why, fix):
    loaded = load(f"{key}={text}")
    problem = only_error(loaded)
    assert problem.key == key and why in problem.why and fix in problem.fix
    assert (problem.where, problem.code) == ("command line", CONFIG_INVALID)
    assert loaded.settings == SftSettings(), "a wrong value changes nothing"


def test_all_problems_at_once_with_their_lines(tmp_path):
    config = write(tmp_path, "optim:\n  lr: fast\n  lrr: 1\n# comment\ndata:\n  train_batch_size: []\n  shuffle: on\n")
    found = errors(load(config=config))
    assert [(p.key, p.where) for p in found] == [
        ("optim.lr", f"{config}:2"), ("optim.lrr", f"{config}:3"), ("data.train_batch_size", f"{config}:6"),
        ("data.shuffle", f"{config}:7"),
    ]


@pytest.mark.parametrize(
    "text, line, why",
    [
        ("optim:\n  lr: 1\n  lr: 2\n", 3, "stands twice in the same mapping, first in line 2"),
        ("data: {}\noptim:\n  lr: 1\ndata: {}\n", 4, "first in line 1"),
        ("optim:\n  lr: 1\noptim.lr: 2\n", 3, "same setting with another value"),
        ("optim:\n  lr: [1\n", 3, "not valid YAML"),
        ("- a\n", 1, "must hold sections"),
        ("optim:\n  lr: !!float 1\n", 2, "tags are not used"),
        ("optim: 3\n", 1, None),
        ("data: 3\n", 1, "a section of settings"),
        ("? [a]\n: 1\n", 1, "a key must be text"),
    ],
)
def test_yaml_faults(tmp_path, text, line, why):
    config = write(tmp_path, text)
    problem = only_error(load(config=config))
    assert problem.where == f"{config}:{line}"
    assert why is None or why in problem.why


def test_unreadable_files(tmp_path):
    assert "cannot be read: No such file" in only_error(load(config=str(tmp_path / "none.yaml"))).why
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: \xe9}")
    assert "not UTF-8" in only_error(load(config=str(tmp_path / "latin.yaml"))).why
    problem = only_error(load(preset="sft-tiny-gpu"))
    assert problem.key == "--preset" and problem.fix == "did you mean sft-tiny-cpu?"
    assert load(config=write(tmp_path, "")).problems == []


def test_empty_sections_are_nothing(tmp_path):
    assert load(config=write(tmp_path, "data:\n  # shuffle: False\nmodel: {}\n")).problems == []


def test_a_preset_may_be_a_path(tmp_path):
    path = write(tmp_path, "optim:\n  lr: 1e-4\n")
    loaded = load(preset=path)
    assert loaded.settings.optim.lr == 1e-4 and loaded.origins == {"optim.lr": f"{path}:2"}


@pytest.mark.parametrize(
    "key, meant",
    [
        ("parallel.tensor_parallel_szie", "engine.tensor_model_parallel_size"),
        ("engine.tensor_model_paralel_size", "engine.tensor_model_parallel_size"),
        ("train_batch_size", "data.train_batch_size"),
        ("optim.train_batch_size", "data.train_batch_size"),
        ("lr", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("training.max_steps", "trainer.total_training_steps"),
        ("trainer.default_local_dirr", "trainer.output_dir"),
    ],
)
def test_did_you_mean(key, meant):
    problem = only_error(load(f"{key}=1"))
    assert problem.why == "no such key" and meant in problem.fix


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_letter_always_finds_the_key(kind):
    rng = random.Random(0)
    for key in leaves(kind):
        at = rng.randrange(key.index(".") + 1, len(key))
        if len(key.partition(".")[2]) < 4:
            continue
        assert key in suggestions(key[:at] + key[at + 1:], kind), key
        assert key in suggestions(key[:at] + rng.choice(string.ascii_lowercase) + key[at:], kind), key


def test_an_unknown_key_without_a_likeness():
    assert only_error(load("zzz.qqq=1")).fix == "mfsdp config schema --kind sft lists every key"


def test_arguments_that_are_no_assignments():
    found = errors(load("optim.lr", "=3", "~optim.lr", "trainer.logger=[console"))
    assert [p.code for p in found] == [USAGE, USAGE, USAGE, CONFIG_INVALID]
    assert "deleted" in found[2].why and "not valid YAML" in found[3].why


def test_plus_prefixes_and_repetition():
    loaded = load("+optim.lr=1e-4", "++data.shuffle=False", "trainer.total_epochs=4", "trainer.total_epochs=2")
    assert loaded.problems == [] and loaded.settings.optim.lr == 1e-4 and loaded.settings.data.shuffle is False
    assert loaded.settings.trainer.total_epochs == 2, "the last wins, so that a script may end in \"$@\""
    assert only_error(load("+optim.lrr=1")).key == "optim.lrr"


def test_home_is_expanded_in_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    loaded = load("model.path=~/m", "data.train_files=[~/a, b]", "trainer.output_dir=~/o", "trainer.experiment_name=~x")
    s = loaded.settings
    assert (s.model.path, s.data.train_files, s.trainer.output_dir, s.trainer.experiment_name) == ("/h/m", ["/h/a", "b"], "/h/o", "~x")


def test_mappings_grow_over_the_layers(tmp_path):
    config = write(tmp_path, "engine:\n  override_transformer_config:\n    a: 1\n    b: {c: no, d: true}\n")
    loaded = load("++engine.override_transformer_config.b.c=none", "engine.override_transformer_config={e: [1e-3, null]}",
                  "engine.override_transformer_config={}", "checkpoint.mbridge_config.distributed_filesystem=true", config=config)
    assert loaded.problems == []
    assert loaded.settings.engine.override_transformer_config == {"a": 1, "b": {"c": "none", "d": True}, "e": [1e-3, None]}
    assert loaded.settings.checkpoint.mbridge_config == {"distributed_filesystem": True}
    assert loaded.origins["engine.override_transformer_config.a"] == f"{config}:3"
    assert loaded.origins["engine.override_transformer_config.b.c"] == "command line"
    assert SftSettings().engine.override_transformer_config == {}, "defaults are not shared"


def test_words_that_yaml_1_1_takes_for_truth_values_are_texts(tmp_path):
    config = write(tmp_path, "rollout: {n: 4}\ntrainer:\n  experiment_name: on\n  project_name: n\n"
                             "engine:\n  override_transformer_config:\n    y: no\n    on: off\n    'off': Y\n")
    loaded = load(kind="grpo", config=config)
    assert loaded.problems == [] and loaded.settings.rollout.n == 4
    assert (loaded.settings.trainer.experiment_name, loaded.settings.trainer.project_name) == ("on", "n")
    assert loaded.settings.engine.override_transformer_config == {"y": "no", "on": "off", "off": "Y"}
    again = load(kind="grpo", config=write(tmp_path, dump_yaml(loaded.settings), "again.yaml"))
    assert again.settings == loaded.settings and again.problems == []
    assert load("rollout={n: 3}", kind="grpo").settings.rollout.n == 3
    verls = write(tmp_path, "actor_rollout_ref:\n  rollout:\n    n: 5\n    val_kwargs:\n      n: 2\n", "verl.yaml")
    nested = load(kind="grpo", config=verls)
    assert (nested.settings.rollout.n, nested.settings.rollout.val_n) == (5, 2)
    unknown = only_error(load(kind="grpo", config=write(tmp_path, "rollout: {y: 4}", "y.yaml")))
    assert unknown.key == "rollout.y"


def test_durations_of_a_fraction():
    assert load("reward.timeout_s=1m500ms", kind="grpo").settings.reward.timeout_s == 60.5
    assert load("reward.timeout_s=2.5s", kind="grpo").settings.reward.timeout_s == 2.5
    assert load("rollout.timeout_s=1h", kind="grpo").settings.rollout.timeout_s == 3600
    assert load("trainer.startup_timeout_s=\"2m\"").settings.trainer.startup_timeout_s == 120


# --- two kinds of run -----------------------------------------------------------------------------------------------


def test_each_kind_has_its_own_defaults_variables_and_flags():
    environ = {"TP": "2", "GEN_TP": "4"}
    sft, grpo = load(environ=environ), load(environ=environ, kind="grpo", flags={"gen-tp": 8, "val-only": True, "reward-fn": "~/r.py:f"})
    assert sft.origins == {"engine.tensor_model_parallel_size": "$TP"} and sft.settings.optim.lr == 1e-5
    assert grpo.settings.rollout.tensor_model_parallel_size == 8 and grpo.origins["rollout.tensor_model_parallel_size"] == "--gen-tp"
    assert grpo.settings.trainer.val_only and grpo.settings.reward.function.endswith("/r.py:f") and "~" not in grpo.settings.reward.function
    assert (grpo.settings.optim.lr, grpo.settings.optim.lr_decay_style, grpo.settings.trainer.total_epochs) == (1e-6, "constant", 15)
    assert load(kind="grpo").settings == GrpoSettings() and load(kind="grpo").problems == []


def test_a_setting_of_the_other_kind_is_told_as_such():
    problem = only_error(load("rollout.n=4"))
    assert problem.why == "this is a setting of mfsdp grpo, not of mfsdp sft"
    problem = only_error(load("data.max_token_len_per_gpu=4", kind="grpo"))
    assert problem.why == "this is a setting of mfsdp sft, not of mfsdp grpo" and "actor.ppo_max_token_len_per_gpu" in problem.fix


def test_a_preset_belongs_to_its_command(tmp_path):
    problem = only_error(load(preset="grpo-tiny-cpu"))
    assert problem.code == USAGE and problem.why == "this preset is for mfsdp grpo"
    assert problem.fix.startswith("mfsdp grpo --preset grpo-tiny-cpu, or one of: sft-")
    own = write(tmp_path, "optim: {lr: 1.0}\n", "sft-mine.yaml")
    assert "for mfsdp sft" in only_error(load(preset=own, kind="grpo")).why and load(preset=own).problems == []
    assert load(preset=write(tmp_path, "optim: {lr: 1.0}\n", "mine.yaml"), kind="grpo").settings.optim.lr == 1.0
    assert only_error(load(preset="grpo-tiny-gpu", kind="grpo")).fix == "did you mean grpo-tiny-cpu?"


def test_the_kind_is_inferred(tmp_path):
    assert infer_kind(preset="grpo-tiny-cpu") == "grpo" and infer_kind(preset="sft-tiny-cpu") == "sft" and infer_kind() == "sft"
    assert infer_kind(assignments=["actor_rollout_ref.rollout.n=2"]) == "grpo" and infer_kind(assignments=["optim.lr=1"]) == "sft"
    for kind in KINDS:
        assert infer_kind(config=write(tmp_path, dump_yaml(SETTINGS[kind]()))) == kind


# --- there and back -------------------------------------------------------------------------------------------------


def random_value(leaf, rng):
    words = ["yes", "no", "null", "None", "~", "1e-5", "1", "true", "", "a: b", "# x", "[x]", "über", "x'y\"z", "- a", "x\ny", " pad ",
             "x\x85\x85y", "a\u2028b", "\ufeff"]
    kind = leaf.kind.removeprefix("list[").removesuffix("]")
    if leaf.optional and rng.random() < 0.3:
        return None
    low, high = leaf.low if leaf.low is not None else 0, leaf.high if leaf.high is not None else 10**6
    one = {
        "str": lambda: rng.choice(leaf.choices or words), "int": lambda: rng.randint(int(low), int(high)),
        "bool": lambda: rng.random() < 0.5,
        "float": lambda: max(low, rng.uniform(low, high) * 10.0 ** -rng.randint(0, 12)),
        "dict": lambda: {"a": rng.choice(words), "b": {"c": [1, "2", None, 1e-7]}},
    }[kind]
    return [one() for _ in range(rng.randint(0, 3))] if leaf.kind.startswith("list") else one()


@pytest.mark.parametrize("kind", KINDS)
def test_dumped_settings_come_back_equal(tmp_path, kind):
    rng = random.Random(1)
    for trial in range(40):
        settings = SETTINGS[kind]()
        for key, leaf in leaves(kind).items():
            section, name = key.split(".")
            setattr(getattr(settings, section), name, random_value(leaf, rng))
        again = read_resolved(write(tmp_path, dump_yaml(settings)), kind)
        expected = to_dict(settings)
        for section, name in (key.split(".") for key in PATH_KEYS if leaves(kind).get(key) and not key.endswith("_files")):
            if expected[section][name] == "~":
                expected[section][name] = to_dict(again)[section][name]  # a path ~ is the home folder
        for name in ("train_files", "val_files"):
            expected["data"][name] = [a if e == "~" else e for e,
                a in zip(expected["data"][name], to_dict(again)["data"][name], strict=True)]
        assert to_dict(again) == expected, trial


def test_read_resolved_raises_everything_at_once(tmp_path):
    with pytest.raises(MfsdpError) as e:
        read_resolved(write(tmp_path, "optim:\n  lr: x\n  lrr: 1\n"))
    assert len(e.value.problems) == 2 and e.value.exit_code == CONFIG_INVALID


def test_the_environment_does_not_reach_read_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("TP", "7")
    assert read_resolved(write(tmp_path, dump_yaml(SftSettings()))) == SftSettings()
    assert load_kind("sft").settings.engine.tensor_model_parallel_size == 7


def test_heavy_modules_stay_out():
    code = (
        "import sys, mfsdp_cli.config.load, mfsdp_cli.config.rules, mfsdp_cli.config.show\n"
        "print([m for m in ('yaml', 'rich', 'pyarrow', 'numpy', 'torch', 'pydantic', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("kind, text, reason", [
    ("sft", "engine.dtype=float16", "loss scaling of float16 fails"), ("sft", "optim.optimizer=sgd", "takes Adam only"),
    ("sft", "checkpoint.save_contents=[model,hf_model]", "mfsdp ckpt export-hf"), ("grpo", "algorithm.adv_estimator=gae", "there is no critic"),
])
def test_a_value_that_others_have_is_refused_with_the_reason(kind, text, reason):
    problem = only_error(load(text, kind=kind))
    assert "is not one of" in problem.why and reason in problem.why and problem.fix.startswith("write one of: ")
