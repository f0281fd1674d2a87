"""Which tokens of a chat are learned: exactly the answers and their end-of-turn tokens, for every kind of template."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_tiny_model import make_tokenizer

from mfsdp_cli.data.chat import SENTINEL, ChatError, ChatTokenizer, encode_row
from mfsdp_cli.errors import BAD_INPUT, MfsdpError

# Qwen2.5-Instruct's, without tools: a default system prompt.
QWEN25 = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Qwen3's way with thinking: gone from all turns but those after the last question, where an empty block stands if there is none.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + \
'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}\
{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# Mistral's way: no header, the answer starts with a space, and add_generation_prompt does nothing.
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}\
{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""
# DeepSeek-R1's way: the prompt opens the thought, and earlier turns lose it.
R1 = """{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}{% set c = m.content %}\
{% if not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + c + '<|end|>' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
NO_PROMPT = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"""
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + STOP }}\
{% endgeneration %}REST{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def base():
    return make_tokenizer(480)


def with_template(template: str, special: tuple[str, ...] = (), **options):
    tokenizer = make_tokenizer(480)
    if special:
        tokenizer.add_tokens(list(special), special_tokens=True)
    for key, value in options.items():
        setattr(tokenizer, key, value)
    tokenizer.chat_template = template
    return tokenizer


def say(*turns: str) -> list[dict]:
    """'u: text', 'a: text', 's: text'"""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[3:]} for turn in turns]


def tokens_and_targets(tokenizer, messages) -> tuple[list[str], list[str]]:
    rendered = ChatTokenizer(tokenizer).render(messages)
    pieces = [tokenizer.decode([token]) for token in rendered.input_ids.tolist()]
    return pieces, [piece for piece, learned in zip(pieces, rendered.loss_mask, strict=True) if learned]


def targets(tokenizer, messages) -> list[str]:
    """Learned text of each turn: runs of learned tokens, decoded."""
    rendered = ChatTokenizer(tokenizer).render(messages)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.loss_mask.astype(int), [0]])))
    return [tokenizer.decode(rendered.input_ids[start:end].tolist()) for start, end in edges.reshape(-1, 2)]


# ---------------------------------------------------------------- golden masks


def test_one_turn_token_by_token(base):
    rendered = ChatTokenizer(base).render(say("u: What is 17 + 25?", "a: 17 + 25 = 42\n#### 42"))
    pieces = [base.decode([token]) for token in rendered.input_ids.tolist()]
    prompt = ["<|im_start|>", "user", "\n", "What", " is", " ", "1", "7", " +", " ", "2", "5", "?", "<|im_end|>", "\n",
              "<|im_start|>", "assistant", "\n"]
    answer = ["1", "7", " +", " ", "2", "5", " =", " ", "4", "2", "\n", "####", " ", "4", "2", "<|im_end|>"]
    assert pieces == [*prompt, *answer, "\n"]
    assert rendered.loss_mask.tolist() == [False] * 18 + [True] * 16 + [False]
    assert rendered.num_straddling == 0 and rendered.input_ids.dtype == np.int64 and rendered.loss_mask.dtype == bool


def test_three_turns_token_by_token(base):
    pieces, learned = tokens_and_targets(base, say("u: 1 + 1?", "a: 2", "u: 2 + 2?", "a: 4", "u: 3 + 3?", "a: 6"))
    turn = ["<|im_start|>", "user", "\n", None, " +", " ", None, "?", "<|im_end|>", "\n",
            "<|im_start|>", "assistant", "\n", None, "<|im_end|>", "\n"]
    expected = [piece for digit, total in (("1", "2"), ("2", "4"), ("3", "6"))
                for piece in [*turn[:3], digit, *turn[4:6], digit, *turn[7:13], total, *turn[14:]]]
    assert pieces == expected
    assert learned == ["2", "<|im_end|>", "4", "<|im_end|>", "6", "<|im_end|>"]


def test_system_prompt_token_by_token(base):
    pieces, learned = tokens_and_targets(base, say("s: You are one", "u: 1?", "a: two"))
    assert pieces == ["<|im_start|>", "system", "\n", "You", " are", " one", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "1", "?",
                      "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n", "two", "<|im_end|>", "\n"]
    assert learned == ["two", "<|im_end|>"]


def test_pad_equal_to_eos_does_not_hide_the_end_of_turn(base):
    tokenizer = with_template(base.chat_template, pad_token="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert targets(tokenizer, say("u: 1?", "a: 1", "u: 2?", "a: 2")) == ["1<|im_end|>", "2<|im_end|>"]


def test_end_of_turn_other_than_eos_is_learned_and_told(base):
    tokenizer = with_template(base.chat_template, eos_token="<|endoftext|>")
    assert targets(tokenizer, say("u: 1?", "a: 1")) == ["1<|im_end|>"]
    chat = ChatTokenizer(tokenizer)
    assert chat.end_of_turn_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [p.level for p in chat.notes] == ["note"] and "<|endoftext|>" in chat.notes[0].why
    assert ChatTokenizer(base).notes == []


def test_multibyte_text_is_learned_whole(base):
    assert targets(base, say("u: é🙂", "a: 🙂é 日本")) == ["🙂é 日本<|im_end|>"]


def test_a_token_that_straddles_the_prompt_is_not_a_target_and_counted(base):
    rendered = ChatTokenizer(base).render(say("u: 1?", "a: \n1", "u: 2?", "a: 2"))
    pieces = [base.decode([token]) for token in rendered.input_ids.tolist()]
    assert pieces[8:12] == ["assistant", "\n\n", "1", "<|im_end|>"]  # the header's line end and the answer's are one token
    assert rendered.loss_mask[8:12].tolist() == [False, False, True, True] and rendered.num_straddling == 1


# ---------------------------------------------------------------- templates


def test_qwen25_default_system_prompt():
    tokenizer = with_template(QWEN25)
    assert targets(tokenizer, say("u: hi", "a: ho", "u: and", "a: so")) == ["ho<|im_end|>", "so<|im_end|>"]
    assert targets(tokenizer, say("s: Be brief.", "u: hi", "a: ho")) == ["ho<|im_end|>"]
    assert ChatTokenizer(tokenizer).render(say("u: hi", "a: ho")).text.startswith("<|im_start|>system\nYou are Qwen")


def test_qwen3_thinking_is_learned_where_the_template_keeps_it():
    tokenizer = with_template(QWEN3)
    thought = "a: <think>\nhm\n</think>\n\n"
    assert targets(tokenizer, say("u: 1?", "a: one", "u: 2?", "a: two")) == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]
    assert targets(tokenizer, say("u: 1?", thought + "one", "u: 2?", thought + "two")) == [
        "one<|im_end|>", "<think>\nhm\n</think>\n\ntwo<|im_end|>"]
    with pytest.raises(ChatError, match="drops all text of message 2"):
        ChatTokenizer(tokenizer).render(say("u: 1?", thought, "u: 2?", "a: two"))


def test_llama3_trims_answers_and_ends_them_with_eot():
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
    tokenizer = with_template(LLAMA3, special, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    messages = say("s: Be brief.", "u: hi ", "a:  ho\n", "u: and", "a: so")
    assert targets(tokenizer, messages) == ["ho<|eot_id|>", "so<|eot_id|>"]
    rendered = ChatTokenizer(tokenizer).render(messages)
    assert rendered.input_ids[:2].tolist() == tokenizer.convert_tokens_to_ids(["<|begin_of_text|>", "<|start_header_id|>"])  # one bos only
    assert not rendered.text.endswith("\n") and rendered.loss_mask[-1]


def test_mistral_answer_keeps_its_leading_space():
    tokenizer = with_template(MISTRAL, ("<s>", "</s>"), bos_token="<s>", eos_token="</s>")
    assert targets(tokenizer, say("u: hi", "a: ho", "u: and", "a: so")) == [" ho</s>", " so</s>"]


def test_r1_thought_opened_by_the_prompt_is_not_learned_twice():
    tokenizer = with_template(R1, ("<|User|>", "<|Assistant|>", "<|end|>"))
    messages = say("u: hi", "a: <think>\nhm</think>ho", "u: and", "a: <think>\nso</think>no")
    assert targets(tokenizer, messages) == ["ho<|end|>", "so</think>no<|end|>"]
    assert targets(tokenizer, say("u: hi", "a: ho")) == ["ho<|end|>"]


def test_a_template_without_generation_prompt_does_not_teach_its_header():
    assert targets(with_template(NO_PROMPT), say("u: hi", "a: ho", "u: and", "a: so")) == ["ho<|im_end|>", "so<|im_end|>"]


@pytest.mark.parametrize("stop, rest", [("''", "<|im_end|>\n"), ("'<|im_end|>'", "\n"), ("'<|im_end|>\n'", "")])
def test_generation_tags_are_used_with_the_end_of_turn_added(stop, rest):
    tokenizer = with_template(MARKED.replace("STOP", stop).replace("REST", rest))
    assert targets(tokenizer, say("u: hi", "a: ho", "u: and", "a: so")) == ["ho<|im_end|>", "so<|im_end|>"]


def test_chat_that_begins_with_the_assistant(base):
    assert targets(base, say("a: hi", "u: 1?", "a: 1")) == ["hi<|im_end|>", "1<|im_end|>"]


# ---------------------------------------------------------------- refusals


def refusal(tokenizer) -> str:
    with pytest.raises(MfsdpError) as caught:
        ChatTokenizer(tokenizer)
    assert caught.value.exit_code == BAD_INPUT
    return caught.value.problems[0].why


def test_tokenizers_that_cannot_serve_are_refused_at_once():
    assert "no chat template" in refusal(with_template(None))
    plain_end = with_template("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    assert "no special token" in refusal(plain_end) and "never learn to stop" in refusal(plain_end)
    only_header = with_template("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}")
    assert "no special token" in refusal(only_header)
    assert "no tools here" in refusal(with_template("{{ raise_exception('no tools here') }}"))


def test_a_template_that_rewrites_answers_is_refused_by_row():
    rewriting = "{% for m in messages %}{{ '<|im_start|>' + m.content | replace('a', 'b') + '<|im_end|>' }}{% endfor %}"
    chat = ChatTokenizer(with_template(rewriting))
    assert chat.render(say("u: q", "a: xyz")).loss_mask.sum() > 0
    with pytest.raises(ChatError, match="message 2 cannot be found"):
        chat.render(say("u: q", "a: banana"))


def test_trimmed_offsets_serve_unless_they_leave_a_token_in_doubt(base):
    from tokenizers import processors

    for header, template in (("\n", base.chat_template), (": ", base.chat_template.replace("\\n' + message", ": ' + message"))):
        tokenizer = with_template(template)
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        if header == "\n":
            assert targets(tokenizer, say("u: hi", "a: 1 ho")) == ["1 ho<|im_end|>"]
        else:  # the header's last token is a space, trimmed to nothing at the very place where the answer begins
            with pytest.raises(ChatError, match="trim_offsets"):
                targets(tokenizer, say("u: hi", "a: 1 ho"))


@pytest.mark.parametrize("messages, reason", [
    ([], "empty"),
    (None, "not a list"),
    (say("u: hi"), "no assistant message"),
    (say("u: hi", "a:  "), "message 2 (assistant) is empty"),
    ([{"role": "robot", "content": "x"}], "role 'robot'"),
    ([{"role": "user", "content": None}, {"role": "assistant", "content": "x"}], "message 1 (user) has content NoneType"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"text": "x"}]}], "message 2 (assistant) has content list"),
    (["hi"], "role None"),
    (say("u: hi", "a: one<|im_end|>two"), "holds the end-of-turn token <|im_end|>"),
    (say("u: hi", "a: one<|im_end|>"), "holds the end-of-turn token <|im_end|>"),
    (say(f"u: {SENTINEL}", "a: one"), SENTINEL),
])
def test_malformed_chats_say_why(base, messages, reason):
    with pytest.raises(ChatError) as caught:
        ChatTokenizer(base).render(messages)
    assert reason in str(caught.value)


def test_null_fields_of_a_parquet_schema_do_not_reach_the_template():
    tokenizer = with_template("{% for m in messages %}{% if m.tool_calls is defined %}{{ raise_exception('tools') }}{% endif %}"
                              "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}")
    messages = [{**message, "tool_calls": None} for message in say("u: hi", "a: ho")]
    assert targets(tokenizer, messages)[0].endswith("ho<|im_end|>")


# ---------------------------------------------------------------- truncation and rows


def test_truncation_names_length_and_limit_or_cuts_the_end_it_says(base):
    chat = ChatTokenizer(base)
    messages = say("u: 1?", "a: 123456")
    whole = chat.render(messages)
    assert len(whole.input_ids) == 18  # <|im_start|> user \n 1 ? <|im_end|> \n, <|im_start|> assistant \n, 1 … 6, <|im_end|> \n
    with pytest.raises(ChatError, match="19 tokens long, above the limit of 18"):
        encode_row(chat, 3, say("u: 1?", "a: 1234567"), 18, "error")
    left, cut, _ = encode_row(chat, 3, messages, 10, "left")
    assert cut and left.row == 3 and left.num_targets == 7
    assert np.array_equal(left.input_ids, whole.input_ids[-10:]) and np.array_equal(left.loss_mask, whole.loss_mask[-10:])
    right, cut, _ = encode_row(chat, 3, messages, 12, "right")
    assert cut and np.array_equal(right.input_ids, whole.input_ids[:12]) and right.num_targets == 2
    with pytest.raises(ChatError, match="no assistant token left"):
        encode_row(chat, 3, messages, 10, "right")
    same, cut, _ = encode_row(chat, 3, messages, 18, "error")
    assert not cut and same.num_targets == 7


@pytest.mark.parametrize("template", [QWEN25, QWEN3, NO_PROMPT], ids=["qwen25", "qwen3", "no prompt"])
def test_random_chats_learn_their_answers_and_nothing_else(template):
    """Learned text, joined, is the answers as rendered, each with one end of turn; ids are those of the whole rendering."""
    tokenizer = with_template(template)
    chat = ChatTokenizer(tokenizer)
    draw = random.Random(0)
    words = ["one", "2", "\n", " ", "é", "🙂", "<think>", "tag</b>", "assistant", "user", ".", "im_end", "=", "    x"]
    for _ in range(60):
        messages = say("s: sys") if draw.random() < 0.3 else []
        answers = []
        for _ in range(draw.randint(1, 4)):
            answers.append("x" + "".join(draw.choices(words, k=draw.randint(0, 12))))
            messages += say("u: " + "".join(draw.choices(words, k=5)), "a: " + answers[-1])
        rendered = chat.render(messages)
        if template == QWEN3:
            answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
        assert tokenizer.decode(rendered.input_ids[rendered.loss_mask].tolist()) == "".join(answer + "<|im_end|>" for answer in answers)
        assert rendered.input_ids.tolist() == tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
