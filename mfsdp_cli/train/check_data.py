"""The data of a run, row by row through its tokenizer, before anything is started (`--check-data`).

    python -m mfsdp_cli.train.check_data KIND --config settings.yaml --model-dir FOLDER --report report.json

Started by `launch.check_data`. Rows are judged by the code that the trainers read them with; of the models' libraries only the
tokenizer is used. Writes {"splits": one for each kind of data, "problems": what is wrong}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from mfsdp_cli.config.load import read_resolved
from mfsdp_cli.config.values import SETTINGS, validates_only
from mfsdp_cli.data.chat import ChatError, ChatTokenizer, RowFault, encode_row
from mfsdp_cli.data.loader import ChatDataset
from mfsdp_cli.data.prompts import PromptDataset
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem

SAY_EVERY_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(SETTINGS))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model-dir", required=True, help="where the tokenizer is: a folder, or a hub id")
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    splits, problems = check(args.kind, read_resolved(args.config, args.kind), args.model_dir)
    args.report.write_text(json.dumps({"splits": splits, "problems": [p.to_dict() for p in problems]}), encoding="utf-8")


def check(kind: str, settings, model_dir: str) -> tuple[list[dict], list[Problem]]:
    """Every row of the files that the run would read, up to its max_samples."""
    try:
        chat = ChatTokenizer(load_tokenizer(model_dir, settings.model.trust_remote_code))
    except MfsdpError as error:
        return [], error.problems
    data, splits, problems = settings.data, [], []
    for name, files, most in (("training", data.train_files, data.train_max_samples), ("validation", data.val_files, data.val_max_samples)):
        if not files or (name == "training" and validates_only(settings)):
            continue
        try:
            split, told, largest_id = (check_chats if kind == "sft" else check_prompts)(name, files, most, settings, chat)
        except MfsdpError as error:
            problems += error.problems
            continue
        splits.append(split)
        problems += told + embedding_problems(model_dir, largest_id)
    return splits, list(dict.fromkeys(problems))


def load_tokenizer(model_dir: str, trust_remote_code: bool):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file, an unknown class, code of the model's own: whatever the libraries raise
        why = f"its tokenizer cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise MfsdpError(Problem("model.path", model_dir, why, "copy the tokenizer files of the model into it", code=BAD_INPUT)) from error


def check_chats(name: str, files: list[str], most: int, settings, chat: ChatTokenizer) -> tuple[dict, list[Problem], int]:
    """As `train.sft` reads them: each conversation rendered, its targets found, its length against the budget of a micro batch."""
    data = settings.data
    budget = settings.engine.usable_tokens(data.max_token_len_per_gpu)
    limit = min(data.max_length or budget, budget)
    rows = ChatDataset(files, data.messages_key, chat, limit, data.truncation, most)
    lengths, num_targets, largest_id, faults, progress = [], 0, -1, [], Progress(name, len(rows))
    for row in range(len(rows)):
        progress.at(row)
        try:
            rendered = chat.render(rows.messages(row))
            lengths.append(len(rendered.input_ids))
            num_targets += int(rendered.loss_mask.sum())
            largest_id = max(largest_id, int(rendered.input_ids.max()))
            if lengths[-1] > limit:
                encode_row(chat, row, rows.messages(row), limit, data.truncation)
        except ChatError as error:
            faults.append(RowFault(row, str(error), error.fix))
    problems = rows.rows.problems(tuple(faults))
    fate = "refused" if data.truncation == "error" else "cut"
    split = summary(name, files, len(rows), len(rows) - len(faults), lengths, limit, fate)
    if split["above"] and data.truncation != "error":
        end = "beginning" if data.truncation == "left" else "end"
        why = f"{split['above']} of {len(rows)} conversations are longer and lose their {end}"
        fix = f"raise it to {max(lengths)} to keep them whole"
        problems.append(Problem("data.max_length", str(limit), why, fix, level="warning"))
    return split | {"targets": num_targets}, problems, largest_id


def check_prompts(name: str, files: list[str], most: int, settings, chat: ChatTokenizer) -> tuple[dict, list[Problem], int]:
    """As `train.grpo` reads them."""
    data = settings.data
    Progress(name, 0).say("reading …")
    rows = PromptDataset(files, data, chat, most, survey=True)
    lengths, usable, problems = list(rows.lengths.values()), len(rows), [*rows.problems, *rows.notes]
    refused = not data.filter_overlong_prompts and data.truncation == "error"
    fate = "left out" if data.filter_overlong_prompts else "refused" if refused else "cut"
    if name == "training" and fate == "left out" and 0 < usable < data.train_batch_size:
        why = f"of {len(rows.rows)} prompts {usable} are short enough, so not one full batch"
        fix = f"at most {usable}, a larger data.max_prompt_length, or more data"
        problems.append(Problem("data.train_batch_size", str(data.train_batch_size), why, fix, code=BAD_INPUT))
    return summary(name, files, len(rows.rows), usable, lengths, data.max_prompt_length, fate), problems, rows.largest_id


def summary(name: str, files: list[str], rows: int, usable: int, lengths: list[int], limit: int, fate: str) -> dict:
    """Lengths in tokens, of the rows that could be rendered; `above` are those over the limit, and `fate` what becomes of them."""
    tokens = None
    if lengths:
        median, p99 = (int(np.percentile(lengths, q, method="higher")) for q in (50, 99))
        tokens = {"total": sum(lengths), "min": min(lengths), "median": median, "p99": p99, "max": max(lengths)}
    above = sum(length > limit for length in lengths)
    return {"name": name, "files": list(files), "rows": rows, "usable": usable, "tokens": tokens, "limit": limit, "above": above,
            "above_share": above / rows if rows else 0.0, "fate": fate}


def embedding_problems(model_dir: str, largest_id: int) -> list[Problem]:
    """A token without a row in the embedding would be an error of an index on the GPU, far from its cause."""
    config = Path(model_dir) / "config.json"
    rows = json.loads(config.read_text(encoding="utf-8")).get("vocab_size") if config.is_file() else None
    if not isinstance(rows, int) or largest_id < rows:
        return []
    why = f"the tokenizer writes token {largest_id}, and the model's embedding has {rows} rows (vocab_size)"
    return [Problem("model.path", model_dir, why, "use the tokenizer that belongs to the weights", code=BAD_INPUT)]


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.last_s = name, total, time.monotonic()

    def at(self, row: int) -> None:
        if time.monotonic() - self.last_s >= SAY_EVERY_S:
            self.say(f"{row} of {self.total} rows")

    def say(self, text: str) -> None:
        print(f"{self.name} data: {text}", file=sys.stderr, flush=True)
        self.last_s = time.monotonic()


if __name__ == "__main__":
    main()
