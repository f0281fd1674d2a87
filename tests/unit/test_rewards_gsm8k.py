"""GSM8K grading. Cases A1–A3 of the hard cases, then what else people and models write."""

from fractions import Fraction

import pytest

from mfsdp_cli.rewards import gsm8k
from mfsdp_cli.rewards.numbers import Unreadable, exact_value


def strict(response, gold):
    return gsm8k.score_strict("openai/gsm8k", response, gold, {})


def flexible(response, gold):
    return gsm8k.score_flexible("openai/gsm8k", response, gold, {})


def test_A1_answer_then_chatter():
    response = "17 + 25 = 42\n#### 42\n" + "The result has been checked a second time. " * 8
    assert len(response.removeprefix("17 + 25 = 42\n#### 42\n")) == 344
    assert strict(response, "42").score == 1 and flexible(response, "42").score == 1


@pytest.mark.parametrize("response, gold", [
    ("####42", "42"), ("#### $42", "42"), ("#### 42.", "42"), ("#### 42.00", "42"), ("#### **42**", "42"), ("#### 42 apples", "42"),
    ("#### 1,250", "1250")])
def test_A2_spellings_of_the_same_value(response, gold):
    assert strict(response, gold).score == 1
    assert flexible(response, gold).score == 1


def test_A3_the_last_marker_counts():
    assert strict("#### 10\nWait, I misread it.\n#### 42", "42").score == 1
    assert strict("#### 42\nWait, I misread it.\n#### 10", "42").score == 0


@pytest.mark.parametrize("response, gold", [
    ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### −5", "-5"), ("#### \\boxed{42}", "42"), ("#### $\\$42$", "42"),
    ("####\n42", "42"), ("#### .5", "0.5"),
    ("#### 3/4", "0.75"), ("#### 0042", "42"), ("#### 42%", "42"), ("#### 42-year-old", "42"), ("#### 1,250.50 dollars", "1250.5"),
    ("#### 42\n#### Conclusion\nDone.", "42"), ("#### 42\n####", "42"), ("#### 1250", "1,250"), ("#### 12", "$12.")])
def test_right_in_other_spellings(response, gold):
    assert (strict(response, gold).score, strict(response, gold).status) == (1, "right")


@pytest.mark.parametrize("response, gold", [
    ("It is 42.", "42"), ("", "42"), ("#### forty-two", "42"), ("####", "42"), ("#### 1,25", "1"), ("#### 1,25", "125"),
    ("#### 1.2.3", "1.2"),
    ("#### 20 + 22", "20"), ("#### 42 = 20 + 22", "42"), ("#### 1e3", "1"), ("#### 3/0", "3"), ("#### " + "9" * 5000, "9")])
def test_no_number_after_the_marker_is_unparseable_not_wrong(response, gold):
    assert (strict(response, gold).score, strict(response, gold).status) == (0, "unparseable")


def test_wrong_is_wrong_and_the_parsed_answer_is_told():
    result = strict("#### $1,251", "1250")
    assert (result.score, result.status, result.parsed) == (0, "wrong", "1,251")
    assert strict("#### 42.001", "42").status == "wrong"
    assert strict("#### -42", "42").status == "wrong"


@pytest.mark.parametrize("response, gold, status", [
    ("it is 42.", "42", "right"), ("10-5", "5", "right"), ("the answer is -3", "-3", "right"), ("x2 = 7", "7", "right"),
    ("3/4 of it", "0.75", "right"),
    ("first 41, then 42", "41", "wrong"), ("no number", "1", "unparseable"), ("#### 42 of 50", "42", "right"),
    ("$1,250!", "1250", "right")])
def test_flexible_takes_the_last_number_when_there_is_no_marker(response, gold, status):
    assert flexible(response, gold).status == status


def test_a_gold_answer_that_is_no_number_is_told_as_such():
    with pytest.raises(ValueError, match="ground truth 'many'"):
        strict("#### 42", "many")


def test_long_responses_take_no_longer_than_their_length():
    assert strict("####" + " " * 200_000 + "x", "1").status == "unparseable"
    assert strict("1 " * 200_000 + "#### 7" + " done" * 100_000, "7").score == 1


@pytest.mark.parametrize("text, value", [
    ("42", 42), ("-6\\frac{3}{4}", Fraction(-27, 4)), ("2 2/3", Fraction(8, 3)), ("11 5/6", Fraction(71, 6)), ("2^{10}/4", 256),
    ("-2^2", -4),
    ("1/2^{60}", Fraction(1, 2**60)), ("2(3+4)", 14), ("\\frac{1}{2}(3)", Fraction(3, 2)), ("3\\cdot-2", -6), ("1 - 2 + 3", 2),
    ("2^{-1}", Fraction(1, 2)),
    ("8/2/2", 2), ("18.90", Fraction(189, 10)), ("5.", 5), ("x", None), ("1/0", None), ("2^{1/2}", None), ("", None),
    ("(1", None), ("3 \\pi", None)])
def test_exact_values(text, value):
    assert exact_value(text) == value


@pytest.mark.parametrize("text", ["4 10/3", "4\\frac{10}{3}", "1 250", "10^{10^{10}}", "9" * 5000])
def test_what_has_no_value_we_would_answer_for(text):
    with pytest.raises(Unreadable):
        exact_value(text)
