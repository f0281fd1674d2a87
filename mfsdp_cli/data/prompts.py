"""Prompts for reinforcement learning, out of parquet files in verl's layout, rendered up to where the assistant is to speak.

    prompt: list<struct<role, content>> (data.prompt_key) · data_source: string · reward_model: struct<ground_truth, …> · extra_info: struct

All rows are rendered when the data set is made: which prompts are too long is known before the first step, and told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mfsdp_cli.data.chat import ROLES, ChatError, ChatTokenizer, RowFault
from mfsdp_cli.data.rows import ParquetRows, check_chats
from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.types import Prompt

if TYPE_CHECKING:
    from mfsdp_cli.config.schema_grpo import RlDataSettings

FIRST_ROWS = 5
TOKENIZED_AT_ONCE = 1000


class PromptDataset:
    """Usable prompts, in the files' order; as `loader.BatchStream` wants a data set. `Prompt.row` counts all rows of all files.

    max_samples    only the first N rows; -1: all
    summary        one line: rows, tokens, what was left out or cut
    notes          what the user should know, as problems of level warning and note
    num_overlong   prompts above data.max_prompt_length: left out (filter_overlong_prompts), else cut (truncation left | right)
    lengths        tokens of every prompt that can be rendered, by row, before any is left out or cut; largest_id: the largest of them
    problems       every row that cannot be used, or that no prompt is left. Raised as MfsdpError, unless it is a `survey`
    Raises MfsdpError with every file that cannot be read.
    """

    def __init__(self, files: list[str], settings: RlDataSettings, chat: ChatTokenizer, max_samples: int = -1, survey: bool = False):
        self.settings, self._tokenizer, self._name = settings, chat.tokenizer, chat.name
        columns = {settings.prompt_key: check_chats, "data_source": check_text, "reward_model": check_gold, "extra_info": check_struct}
        self.rows = ParquetRows(files, columns, "data.prompt_key", max_samples, optional=("extra_info",))
        self._input_ids: dict[int, np.ndarray] = {}  # int32 [P]
        self.lengths: dict[int, int] = {}
        self.largest_id = -1
        faults, overlong = [], {}
        for start in range(0, len(self.rows), TOKENIZED_AT_ONCE):
            for row, input_ids in self._render_rows(range(start, min(start + TOKENIZED_AT_ONCE, len(self.rows))), faults):
                self.lengths[row], self.largest_id = len(input_ids), max(self.largest_id, int(input_ids.max(initial=-1)))
                if len(input_ids) <= settings.max_prompt_length:
                    self._input_ids[row] = input_ids
                    continue
                overlong[row] = len(input_ids)
                if not settings.filter_overlong_prompts and settings.truncation == "error":
                    faults.append(self._too_long(row, len(input_ids)))
                elif not settings.filter_overlong_prompts:
                    cut = slice(-settings.max_prompt_length, None) if settings.truncation == "left" else slice(settings.max_prompt_length)
                    self._input_ids[row] = input_ids[cut]
        self._order = list(self._input_ids)
        self.num_overlong = len(overlong)
        self.problems = self.rows.problems(tuple(sorted(faults, key=lambda fault: fault.row))) or self._none_left()
        if self.problems and not survey:
            raise MfsdpError(self.problems)
        self.notes = [] if self.problems else self._schema_notes() + self._overlong_notes(overlong) + self._template_notes()

    def __len__(self) -> int:
        return len(self._order)

    def prompt(self, at: int) -> Prompt:
        """The prompt at position `at` of those that are used."""
        row = self._order[at]
        return Prompt(row=row, input_ids=self._input_ids[row].astype(np.int64), **self._fields(self.rows[row]))

    sample = prompt

    @property
    def summary(self) -> str:
        lengths = [len(ids) for ids in self._input_ids.values()]
        fate = "left out" if self.settings.filter_overlong_prompts else f"cut ({self.settings.truncation})"
        return (f"{len(self)} prompts of {len(self.rows)} rows, {sum(lengths)} tokens, longest {max(lengths)}, {self.num_overlong} above "
                f"{self.settings.max_prompt_length} tokens {fate}")

    def _fields(self, row: dict) -> dict:
        """Everything of a Prompt but its tokens and place. Raises ChatError."""
        data_source, gold = row["data_source"], (row["reward_model"] or {}).get("ground_truth")
        if not data_source:
            raise ChatError("its data_source is empty: it says which scorer grades the answer", "fill it in, for example openai/gsm8k")
        if gold is None or gold != gold or not str(gold).strip():
            raise ChatError("its reward_model.ground_truth is empty: no answer could be graded")
        return {"messages": check_prompt(row[self.settings.prompt_key]), "data_source": data_source, "ground_truth": str(gold),
                "extra_info": row.get("extra_info") or {}}

    def _render_rows(self, rows: range, faults: list[RowFault]) -> list[tuple[int, np.ndarray]]:
        """(row, int32 tokens) of the good ones; the others are added to faults. Tokenized together: a third less time than one by one."""
        texts = {}
        for row in rows:
            try:
                texts[row] = self._text(self._fields(self.rows[row])["messages"])
            except ChatError as error:
                faults.append(RowFault(row, str(error), error.fix))
        if not texts:
            return []
        tokens = self._tokenizer(list(texts.values()), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [(row, np.array(ids, dtype=np.int32)) for row, ids in zip(texts, tokens, strict=True)]

    def _text(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template raises whatever it likes: jinja's errors, or Python's
            raise ChatError(f"the chat template refuses it: {error}") from error

    def _too_long(self, row: int, length: int) -> RowFault:
        return RowFault(row, f"its prompt is {length} tokens long, above data.max_prompt_length={self.settings.max_prompt_length}",
                        f"raise data.max_prompt_length to {length}, or set data.filter_overlong_prompts=True")

    def _none_left(self) -> list[Problem]:
        if self._order:
            return []
        why = f"all {len(self.rows)} prompts are longer: none is left" if len(self.rows) else "the files hold no rows"
        limit = str(self.settings.max_prompt_length)
        return [Problem("data.max_prompt_length", limit, why, "raise it, or give other data", code=BAD_INPUT)]

    def _overlong_notes(self, overlong: dict[int, int]) -> list[Problem]:
        if not overlong:
            return []
        filtered = self.settings.filter_overlong_prompts
        first = ", ".join(f"{self.rows.where(row)} ({length})" for row, length in list(overlong.items())[:FIRST_ROWS])
        why = (f"{len(overlong)} of {len(self.rows)} prompts are longer and {'left out' if filtered else 'cut'}; the longest has "
               f"{max(overlong.values())} tokens; {'they are' if len(overlong) <= FIRST_ROWS else 'the first are'}: {first}")
        if not filtered:
            why += f"; what remains lacks the {'beginning of the chat' if self.settings.truncation == 'left' else 'end of the question'}"
        limit, fix = str(self.settings.max_prompt_length), f"raise it to {max(overlong.values())} to keep them"
        return [Problem("data.max_prompt_length", limit, why, fix, level="warning")]

    def _schema_notes(self) -> list[Problem]:
        """Files of different origin may differ in what only a custom scorer looks at."""
        tables, notes = self.rows.tables, []
        for file, table in zip(self.rows.files[1:], tables[1:], strict=True):
            mine, theirs = (leaf_types(t, ("reward_model", "extra_info")) for t in (table, tables[0]))
            different = [f"{path}: {mine.get(path, 'missing')}, not {theirs.get(path, 'missing')}"
                         for path in sorted(mine.keys() | theirs.keys()) if mine.get(path) != theirs.get(path)]
            if different:
                why = f"its columns differ from those of {self.rows.files[0]}: {'; '.join(different)}"
                notes.append(Problem("data", str(file), why, "nothing, unless a custom scorer reads them", where=str(file), level="note"))
        return notes

    def _template_notes(self) -> list[Problem]:
        messages = self.prompt(0).messages
        if self._text(messages) != self._text(messages, add_generation_prompt=False):
            return []
        why = "the chat template does nothing with add_generation_prompt: the model itself has to open the assistant's turn"
        fix = "use a template that opens it, if the model was not trained this way"
        return [Problem("model.path", self._name, why, fix, level="warning")]


def check_prompt(messages) -> list[dict]:
    """Plain role and content messages, without the null fields that a parquet schema fills in. Raises ChatError."""
    if not messages:
        raise ChatError("its prompt is empty")
    for number, message in enumerate(messages, start=1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise ChatError(f"message {number} of its prompt has role {role!r}: must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ChatError(f"message {number} of its prompt ({role}) has content {type(content).__name__}, not a text")
    if messages[-1]["role"] == "assistant":
        raise ChatError("its prompt ends with an assistant message: the answer, or the beginning of one", "end it with the user's message")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


# ---------------------------------------------------------------- types of columns


def check_text(name: str, kind) -> str:
    import pyarrow as pa

    return "" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else f"the column is {kind}, not string"


def check_struct(name: str, kind) -> str:
    import pyarrow as pa

    return "" if pa.types.is_struct(kind) or pa.types.is_null(kind) else f"the column is {kind}, not a struct"


def check_gold(name: str, kind) -> str:
    """A text, or a number, which is graded as it is written."""
    import pyarrow as pa

    if not pa.types.is_struct(kind) or "ground_truth" not in [field.name for field in kind]:
        return f"the column is {kind}, not a struct with ground_truth"
    gold = kind.field("ground_truth").type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
    return "" if any(test(gold) for test in tests) else f"{name}.ground_truth is {gold}, not string"


def leaf_types(table, columns: tuple[str, ...]) -> dict[str, str]:
    """Dotted path -> arrow type, of the innermost fields."""
    import pyarrow as pa

    def walk(path: str, kind) -> dict[str, str]:
        if pa.types.is_struct(kind):
            return {k: v for field in kind for k, v in walk(f"{path}.{field.name}", field.type).items()}
        return {path: str(kind)}

    return {k: v for name in columns if name in table.column_names for k, v in walk(name, table.schema.field(name).type).items()}
