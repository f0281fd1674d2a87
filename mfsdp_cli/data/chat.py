"""A chat to token ids and the mask of what is learned: assistant text and its end-of-turn token, nothing else.

The template renders the whole conversation once and that text is tokenized once, as the model will see it; the targets are found in the
text and carried to the tokens by their character offsets. Where a turn lies is read off the template itself, never assumed from its name:

- a template with `{% generation %}` marks its assistant text; otherwise
- a turn ends where the rendering with that answer replaced by a sentinel shows the text after it to begin, and
- it starts after the rendering of the messages before it with the generation prompt, which is what the sampler will put in front of the
  model; where that is no prefix of the whole (the template drops or adds something later), where the sentinel stood.

A template that fits none of this is refused. A token that holds both prompt and answer text (a line end merged with the answer's own) is
not a target, since part of it is given; such tokens are counted.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

import numpy as np

from mfsdp_cli.errors import BAD_INPUT, MfsdpError, Problem
from mfsdp_cli.types import Sample

ROLES = ("system", "user", "assistant", "tool")
SENTINEL = "mfsdpSENTINELmfsdp"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatError(ValueError):
    """A conversation that cannot be trained on; the text is the reason."""

    def __init__(self, reason: str, fix: str = "correct or remove the row"):
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True)
class Rendered:
    """text as the template renders it; input_ids int64 [T]; loss_mask bool [T]; num_straddling tokens across the start of an answer."""

    text: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    num_straddling: int


class ChatTokenizer:
    """Renders chats with a Hugging Face tokenizer's template. Raises MfsdpError at once if no row could be rendered.

    end_of_turn_id  the special token with which the template ends an assistant turn
    notes           what the user should know about this tokenizer, as problems of level note
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._lock = threading.Lock()  # fast tokenizers and template trackers are not safe to share between threads
        if not tokenizer.is_fast:
            raise self._refuse("the tokenizer is not a fast one: it cannot say where in the text a token stands",
                               "use a model folder that has a tokenizer.json")
        if not tokenizer.chat_template:
            raise self._refuse("the tokenizer has no chat template", "use a chat model, or put a chat_template.jinja into the model folder")
        self._template = tokenizer.get_chat_template()
        added = tokenizer.added_tokens_decoder.items()
        self._special = {id_: str(token.content) for id_, token in added if token.special} | {
            id_: tokenizer.convert_ids_to_tokens(id_) for id_ in tokenizer.all_special_ids}
        self.end_of_turn_id = self._probe_end_of_turn()
        self._stop_ids = sorted({self.end_of_turn_id, tokenizer.eos_token_id} - {None})
        self.notes = self._notes()

    def render(self, messages: list[dict]) -> Rendered:
        """Raises ChatError for a conversation that is malformed, has nothing to learn, or that the template cannot place."""
        messages = check(messages)
        with self._lock:
            text, spans = self._render_marked(messages) if GENERATION_TAG.search(self._template) else self._render_and_find(messages)
            input_ids, starts, ends = self._tokenize(text)
        stops = np.flatnonzero(np.isin(input_ids, self._stop_ids))
        loss_mask = np.zeros(len(input_ids), dtype=bool)
        num_straddling = 0
        for start, end in spans:
            first = int(np.searchsorted(starts, start))
            last = next((int(stop) for stop in stops if stop >= first), None)
            self._check_end_of_turn(text, end, last, input_ids, starts)
            if ends[first] == start:
                raise ChatError("the tokenizer's offsets do not say whether a token belongs to the answer (its trim_offsets is on)")
            num_straddling += int(first > 0 and ends[first - 1] > start)
            loss_mask[first:last + 1] = True
        return Rendered(text, input_ids, loss_mask, num_straddling)

    def _check_end_of_turn(self, text, end, last, input_ids, starts) -> None:
        """Only white space may stand between an answer, which ends at character `end`, and the token `last` that ends its turn."""
        if last is None:
            raise ChatError(f"the template writes no {self._special[self.end_of_turn_id]} after the answer")
        at = int(starts[last])
        between = text[min(at, end):max(at, end)].strip()
        if between and at < end:
            token = self._special[int(input_ids[last])]
            raise ChatError(f"an answer holds the end-of-turn token {token} in its text: the template writes it")
        if between:
            raise ChatError(f"the template writes {between[:40]!r} between the answer and the next end-of-turn token")

    def _tokenize(self, text: str):
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], dtype=np.int64), offsets[:, 0], offsets[:, 1]

    def _apply(self, messages: list[dict], **options) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template raises whatever it likes: jinja's errors, or Python's
            raise ChatError(f"the chat template refuses it: {error}") from error

    def _render_marked(self, messages):
        """Text and spans of a template that marks assistant text; the end-of-turn token is cut off a span that holds it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self._apply(messages)
        rendered, marked = render_jinja_template(conversations=[messages], chat_template=self._template, return_assistant_tokens_mask=True,
                                                 **self.tokenizer.special_tokens_map)
        assert rendered[0] == text, "the two renderings of one template differ"
        spans = []
        for start, end in marked[0]:
            body = text[start:end].rstrip()
            for stop in self._stop_ids:
                body = body.removesuffix(self._special[stop])
            if body:
                spans.append((start, start + len(body)))
        if not spans:
            raise ChatError("the template's {% generation %} marks no text of this conversation")
        return text, spans

    def _render_and_find(self, messages):
        """Text and (start, end) of each answer in it, in characters."""
        text = self._apply(messages)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._find(messages, at, text) for at in answers]

    def _find(self, messages: list[dict], at: int, text: str) -> tuple[int, int]:
        if any(SENTINEL in message["content"] for message in messages):
            raise ChatError(f"it holds the word {SENTINEL}, by which answers are found")
        marked = self._apply([*messages[:at], {**messages[at], "content": SENTINEL}, *messages[at + 1:]])
        head, found, tail = marked.partition(SENTINEL)
        lost = ChatError(f"the answer of message {at + 1} cannot be found in what the chat template of {self.name} renders")
        if not found or SENTINEL in tail or not text.endswith(tail):
            raise lost
        start, end = (len(head) if text.startswith(head) else None), len(text) - len(tail)
        prompt = self._prompt(messages[:at])
        # A header between the prompt and the answer is the template's, not the model's: its add_generation_prompt does nothing.
        if prompt and text.startswith(prompt) and (start is None or not self._holds_special(text[len(prompt):start])):
            start = len(prompt)
        if start is None or start > end:
            raise lost
        body, content = squeeze(text[start:end]), squeeze(messages[at]["content"])
        if not (body.endswith(content) or content.endswith(body)):
            raise lost
        if not body:
            raise ChatError(f"the chat template of {self.name} drops all text of message {at + 1}")
        return start, end

    def _prompt(self, before: list[dict]) -> str | None:
        """What a sampler would be given to produce the next answer; null where the template refuses to."""
        try:
            return self._apply(before, add_generation_prompt=True) if before else None
        except ChatError:
            return None

    def _holds_special(self, text: str) -> bool:
        return any(token in text for token in self._special.values())

    def _probe_end_of_turn(self) -> int:
        try:
            text = self._apply([{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}])
        except ChatError as error:
            raise self._refuse(f"{error} (a question and an answer)", "use a template that renders user and assistant messages") from error
        at = text.rfind(SENTINEL) + len(SENTINEL)
        input_ids, starts, _ = self._tokenize(text)
        for id_, start in zip(input_ids.tolist(), starts.tolist(), strict=True):
            if id_ in self._special and start >= at and not text[at:start].strip():
                return id_
        raise self._refuse(f"the chat template ends an assistant turn with {text[at:]!r}, which has no special token of this tokenizer: "
                           "the model would never learn to stop", "use a template that writes the end-of-turn token after each answer")

    def _notes(self) -> list[Problem]:
        if self.end_of_turn_id == self.tokenizer.eos_token_id:
            return []
        turn, eos = self._special[self.end_of_turn_id], self.tokenizer.eos_token
        why = f"the template ends answers with {turn}, and the tokenizer's eos_token is {eos}: the model learns to stop with {turn}"
        return [Problem("model.path", self.name, why, f"have the sampler stop at {turn} (id {self.end_of_turn_id}) too", level="note")]

    def _refuse(self, why: str, fix: str) -> MfsdpError:
        return MfsdpError(Problem("model.path", self.name, why, fix, code=BAD_INPUT))


def squeeze(text: str) -> str:
    return "".join(text.split())


def check(messages) -> list[dict]:
    """Plain role and content messages, without the null fields that a parquet schema fills in. Raises ChatError."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("it is not a list of messages, or is empty")
    plain = []
    for number, message in enumerate(messages, start=1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise ChatError(f"message {number} has role {role!r}: must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ChatError(f"message {number} ({role}) has content {type(content).__name__}, not a text")
        if role == "assistant" and not content.strip():
            raise ChatError(f"message {number} (assistant) is empty: nothing to learn")
        plain.append({key: value for key, value in message.items() if value is not None})
    if not any(message["role"] == "assistant" for message in plain):
        raise ChatError("it has no assistant message: nothing to learn")
    return plain


# ---------------------------------------------------------------- rows to samples


@dataclass(frozen=True)
class RowFault:
    """A row that cannot be trained on: its index in the data set, why, and what to do."""

    row: int
    reason: str
    fix: str


def encode_row(chat: ChatTokenizer, row: int, messages, max_length: int, truncation: str) -> tuple[Sample, bool, int]:
    """(sample, was it truncated, straddling tokens). Raises ChatError, also when truncation leaves nothing to learn.

    max_length in tokens; truncation error | left | right names the end that is cut.
    """
    assert truncation in ("error", "left", "right"), truncation
    rendered = chat.render(messages)
    input_ids, loss_mask, length = rendered.input_ids, rendered.loss_mask, len(rendered.input_ids)
    if length > max_length:
        if truncation == "error":
            raise ChatError(f"it is {length} tokens long, above the limit of {max_length} (data.max_length)",
                            fix=f"raise data.max_length to {length}, set data.truncation to left or right, or remove the row")
        kept = slice(length - max_length, None) if truncation == "left" else slice(max_length)
        input_ids, loss_mask = input_ids[kept], loss_mask[kept]
    sample = Sample(input_ids, loss_mask, row)
    if sample.num_targets == 0:
        raise ChatError(f"cut at {max_length} tokens ({truncation}) of {length}, it has no assistant token left to learn")
    return sample, length > max_length, rendered.num_straddling
