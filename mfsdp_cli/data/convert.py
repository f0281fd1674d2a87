"""A raw row of a known data set to a chat and a gold answer; a row that cannot be used raises BadRow with the reason. No torch."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from mfsdp_cli.rewards.latex import BARE, BOX, closing_brace

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# Two training rows of MATH end in an empty \\boxed{}; the answer to both is 0 ("there are … primes"). Key: sha256 of the problem.
MATH_EMPTY_BOXES = {
    "34d3b36d1c41910066ed6681c639b2d3e572a221fd3b55ee4a84c1f4a1ecb9aa": "0",
    "641a7ef94229c8ca020ec3014841b02e7d7416b7c2dd451cddcae8068fb4976f": "0",
}


class BadRow(Exception):
    """A row that cannot be used; the text is the reason."""


@dataclass(frozen=True)
class Example:
    """One usable row: the chat (its last message is the assistant's), the answer as the source spells it, the gold value."""

    messages: list[dict]
    answer: str
    gold: str | None
    question: str
    data_source: str
    ability: str = "math"
    note: str = ""


def text_of(row: dict, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"column {key} is {'missing' if key not in row else 'not a text' if not isinstance(value, str) else 'empty'}")
    return value


def question_and_answer(question: str, instruction: str, answer: str, gold: str, data_source: str, note: str = "") -> Example:
    prompt = f"{question} {instruction}".rstrip()
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Example(messages, answer, gold, question, data_source, note=note)


def from_gsm8k(row: dict) -> Example:
    answer = text_of(row, "answer")
    return question_and_answer(text_of(row, "question"), GSM8K_INSTRUCTION, answer, gsm8k_gold(answer), "openai/gsm8k")


def from_math(row: dict) -> Example:
    question, answer, note = text_of(row, "problem"), text_of(row, "solution"), ""
    missing = MATH_EMPTY_BOXES.get(hashlib.sha256(question.strip().encode()).hexdigest())
    if missing and "\\boxed{}" in answer:
        answer = answer.replace("\\boxed{}", f"\\boxed{{{missing}}}")
        note = f"the solution's box is empty in the data set: filled with {missing}"
    return question_and_answer(question, MATH_INSTRUCTION, answer, math_gold(answer), "DigitalLearningGmbH/MATH-lighteval", note)


def from_arithmetic(row: dict) -> Example:
    return question_and_answer(row["question"], "", row["answer"], gsm8k_gold(row["answer"]), "arithmetic")


def from_messages(row: dict) -> Example:
    """A chat: column `messages` of {role, content}, or `conversations` of {from, value} as ShareGPT has it."""
    if row.get("messages") is not None:
        turns = row["messages"]
    elif isinstance(row.get("conversations"), list):
        turns = [{"role": SHAREGPT_ROLES.get(t["from"], t["from"]), "content": t.get("value")} if isinstance(t, dict) and "from" in t else t
                 for t in row["conversations"]]
    else:
        raise BadRow("no column messages (or conversations)")
    messages = check_messages(turns)
    gold = next((str(row[key]).strip() for key in ("answer", "ground_truth") if row.get(key) is not None), None)
    last_answer = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    data_source, ability = str(row.get("data_source") or "messages"), str(row.get("ability") or "chat")
    return Example(messages, gold or last_answer, gold, question, data_source, ability)


def check_messages(turns) -> list[dict]:
    if not isinstance(turns, list) or not turns:
        raise BadRow("messages is not a list of {role, content}, or is empty")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRow(f"message {number} is not an object with role and content")
        role, content = turn.get("role"), turn.get("content")
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRow(f"message {number} has role {role!r}: must be system, user, assistant or tool")
        if role == "system" and number > 1:
            raise BadRow(f"message {number} is a system message: only the first may be")
        if not isinstance(content, str):
            raise BadRow(f"message {number} ({role}) has content {type(content).__name__}, not a text")
        if role == "assistant" and not content.strip():
            raise BadRow(f"message {number} (assistant) is empty: nothing to learn")
        extra = sorted(key for key, value in turn.items() if key not in ("role", "content") and value not in (None, [], ""))
        if extra:
            raise BadRow(f"message {number} has {', '.join(extra)}, which the written schema (role, content) cannot hold")
        messages.append({"role": role, "content": content})
    return messages


CONVERTERS = {"gsm8k": from_gsm8k, "math": from_math, "messages": from_messages}


# ---------------------------------------------------------------- gold answers


def gsm8k_gold(answer: str) -> str:
    """The number after the last `####`, without thousands commas. `#### $1,250.` gives 1250."""
    if "####" not in answer:
        raise BadRow("the answer has no #### marker")
    tail = answer.rpartition("####")[2].strip()
    gold = tail.replace(",", "").replace("$", "").removesuffix(".")
    if not re.fullmatch(r"[-+]?(\d+(\.\d+)?|\.\d+)", gold):
        raise BadRow(f"the text after #### is {tail[:40]!r}, not a number")
    return gold


def math_gold(solution: str) -> str:
    """What the last `\\boxed{…}`, `\\fbox{…}` or `\\boxed 5` holds, braces balanced. In a response `rewards.latex.last_box` passes over a
    box that is cut off or empty; in a gold answer it is a fault of the row."""
    for match in reversed(list(BOX.finditer(solution))):
        if solution.startswith("{", match.end()):
            end = closing_brace(solution, match.end())
            if end is None:
                raise BadRow("the last box is cut off: its braces do not balance")
            inside = solution[match.end() + 1:end].strip()
            if not inside:
                raise BadRow("the last box is empty")
            return inside
        if bare := BARE.match(solution, match.end()):  # `\\boxed as asked` is prose, not a box
            return bare[0].rstrip(",")
    raise BadRow("the solution has no \\boxed{} or \\fbox{}")
