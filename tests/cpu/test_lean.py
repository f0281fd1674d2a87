"""What is not imported until it is needed: TorchInductor, and all families of models but the one in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mfsdp_cli.config.rules_model import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
# Both in processes of their own, where nothing is imported and torch may compile.
OPEN = """
import json, sys
from mfsdp_cli.engine import bridge

def families():
    parts = [name.split(".") for name in sys.modules if name.startswith("megatron.bridge.models.") and name.endswith("_bridge")]
    return len({part[3] for part in parts} - {"conversion"})

def opened(folder):
    return type(bridge.open_model(folder, with_weights=False)._model_bridge).__name__, families()

qwen3, llama, mistral, qwen2 = sys.argv[1:]
found = {"first": families(), "ours": [opened(qwen3), opened(llama)], "inductor": "torch._inductor.compile_fx" in sys.modules}
print(json.dumps(found | {"other": opened(mistral), "again": opened(qwen2)}))
"""
COMPILE = """
import json
import torch
from mfsdp_cli.engine import lean

graphs = []
def backend(graph, _):
    graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
    return graph

with lean.compiled_when_called():
    @torch.compile(backend=backend)
    def twice(x):
        return x * 2

    @torch.compile(backend=backend, fullgraph=True)
    def and_one(x):
        return twice(x) + 1

made = list(graphs)
results = [float(and_one(torch.tensor(x))) for x in (3.0, 4.0)]
print(json.dumps([and_one.__name__, made, results, graphs]))
"""


def result_of(program: str, *args):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_family_is_imported_when_it_is_opened_and_others_still_can_be(tiny, tmp_path):
    from transformers import MistralConfig

    MistralConfig(architectures=["MistralForCausalLM"], hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                  vocab_size=100, intermediate_size=64).save_pretrained(tmp_path)  # not one of ours; export knows what Bridge knows
    found = result_of(OPEN, tiny("qwen3"), tiny("llama"), tmp_path, tiny("qwen2"))
    assert found["first"] == 0 and found["ours"] == [["Qwen3Bridge", 1], ["LlamaBridge", 2]] and not found["inductor"]
    (name, number), again = found["other"], found["again"]
    assert name == "MistralBridge" and number > 20 and again == ["Qwen2Bridge", number]


def test_a_function_is_compiled_at_its_first_call_once_with_those_that_it_calls():
    assert result_of(COMPILE) == ["and_one", [], [7.0, 9.0], [["mul", "add"]]]


def test_the_families_of_the_rules_are_those_of_the_engine():
    from mfsdp_cli.engine import lean

    assert set(lean.FAMILIES) == set(ARCHITECTURES)
