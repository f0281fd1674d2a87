"""Grading of competition answers. Cases A4 and A5 of the hard cases, then known errors of math-verify and policies of ours."""

import random

import pytest

from mfsdp_cli.rewards import math as competition
from mfsdp_cli.rewards.latex import brace_arguments, last_box, normalise, split_top


def grade(response, gold):
    return competition.score("HuggingFaceH4/MATH-500", response, gold, {})


def boxed(answer, gold):
    return grade(f"Therefore the answer is $\\boxed{{{answer}}}$. I hope it is correct.", gold)


def test_A4_box_traps():
    prose = "The final value goes in \\boxed as requested. So the answer is \\boxed{7}."
    assert grade(prose, "7").score == 1
    assert (grade("so \\boxed{8", "8").score, grade("so \\boxed{8", "8").status) == (0, "unparseable")
    two = "first \\boxed{3}, later \\boxed{4}"
    assert grade(two, "4").score == 1 and grade(two, "3").score == 0
    assert grade("\\fbox{8}", "8").score == 1


@pytest.mark.parametrize("answer, gold", [
    ("\\frac{3}{6}", "\\frac{1}{2}"), ("0.25", "\\frac{1}{4}"), ("1,250", "1250"), ("18.9", "18.90"), ("-\\frac{2}{5}", "\\frac{-2}{5}")])
def test_A5_equal_values_in_other_clothes(answer, gold):
    assert grade(f"\\boxed{{{answer}}}", gold).score == 1


# math-verify 0.9.0 (parse and verify with their defaults) calls the lines that end in ! the other way round.
RIGHT = r"""
42 apples                                | 42
5\text{ cm}^2                            | 5
90^\circ                                 | 90
**42**                                   | 42                         !
\mathbf{42}                              | 42
$\frac 12$                               | 0.5
\$1,250.50                               | 1250.5
1\,250                                   | 1250                       !
3{,}000                                  | 3000
1,000\pi                                 | 1000 \pi                   !
007                                      | 7
.5                                       | 0.5
x = .5                                   | .5
2 2/3                                    | 8/3                        !
11 5/6                                   | \frac{71}{6}               !
6\frac{3}{4}                             | 6.75
50\%                                     | 50                         !
50%                                      | 0.5                        !
50                                       | 50\%
0.06                                     | 6\%                        !
\textbf{(E)}\ 12                         | 12                         !
\text{13}                                | 13
\{2,1\}                                  | 1,2
x=1 \text{ or } x=2                      | 2,1
x = 1, 2                                 | 1, 2
x \in \{1, 2\}                           | 1, 2
1 \pm \sqrt{5}                           | 1+\sqrt5, 1-\sqrt5
2, 3 and 4                               | 2, 3, \text{ and } 4
x = 5                                    | 5
5                                        | k = 5
f(x) = 2x+3                              | 3 + 2x
2+3=5                                    | 5
\frac{2}{3} \approx 0.67                 | 2/3
y=2x+3                                   | 2x-y+3=0
-34x-45y+20z-100=0                       | 34x+45y-20z+100=0
x > 2                                    | (2,\infty)                 !
x >= 2                                   | x \geq 2
x \in [-2,4]                             | [-2,4]
(2,+\infty)                              | (2,\infty)
(3,\infty)\cup(-\infty,1)                | (-\infty,1) \cup (3,\infty)
\left( \frac12, 3 \right)                | (0.5, 3)
\begin{bmatrix}1\\2\end{bmatrix}         | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
(1,2)                                    | \begin{pmatrix} 1 \\ 2 \end{pmatrix} !
\begin{pmatrix} 2/4 & 0 \\ 0 & 1 \end{pmatrix} | \begin{pmatrix} \frac12 & 0 \\ 0 & 1 \end{pmatrix}
203_{7}                                  | 203_7
Saturday                                 | \mbox{Saturday}
\text{saturday}                          | \text{Saturday}
\text{C, A}                              | \text{A,C}                 !
(C)                                      | \text{C}
C                                        | \text{(C)}
4:30 PM                                  | \text{4:30 p.m.}           !
4                                        | \mbox{four}                !
x^2-9                                    | (x-3)(x+3)
\frac{x}{7}+\frac{2}{7}                  | \frac{x+2}{7}
\sin^2 x                                 | 1-\cos^2 x
\sqrt{1/n}                               | \frac{1}{\sqrt{n}}         !
4\sqrt(2)                                | 4\sqrt{2}                  !
5 sin x                                  | 5 \sin x                   !
\frac{\sqrt{2}}{2}                       | \frac{1}{\sqrt2}
3 + 2i                                   | 2i+3
1 - \frac{1}{e}                          | 1 - \frac{1}{\mathrm{e}}   !
"""

WRONG = r"""
2 2/3                                    | 2
4 10/3                                   | 10
\frac{1}{2^{60}}                         | \frac{1}{2^{61}}           !
\frac{1}{2004!}                          | \frac{1}{2006!}            !
10^{-7}\pi                               | 2\cdot 10^{-7}\pi
abc                                      | ABC                        !
9=1                                      | 1                          !
x+3=5                                    | 5                          !
1,2                                      | (1,2)                      !
0.333333                                 | \frac13                    !
1.41421356                               | \sqrt{2}                   !
3d                                       | 3                          !
50                                       | 0.5
1                                        | 2\%
\pm 2021                                 | 2021
4                                        | 4\sqrt{2}
12:00                                    | 1:00
4:30 a.m.                                | \text{4:30 p.m.}
9                                        | 9\text{ a.m.}              !
y = 5                                    | x=5
n=2, 3, 4                                | n=1, 2, 3
D = (0, 1)                               | D = (0, 1.5)
[1,2)                                    | (1,2)
(2,1)                                    | (1,2)
1,1,2                                    | 1,2                        !
1                                        | 1,2
19, 46, \text{ and } 82                  | 21, 36, and 82
1, 2, \ldots, n                          | 1, 3, 5, \ldots, 2n-1      !
\begin{pmatrix}1&2\end{pmatrix}          | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
203                                      | 203_7                      !
101                                      | 203_7
203_8                                    | 203_7                      !
\text{east}                              | \text{seat}
\text{none}                              | 5
x                                        | |x|
\frac{2^{2005}+1}{3 \cdot 2^{2006}}      | \frac{1}{3 \cdot 2^{2006}} !
1 - \frac{1}{\mathrm{e}}                 | 1 + \frac{1}{\mathrm{e}}
5 sin x                                  | 5
5                                        | .5
"""


def cases(table):
    return [tuple(part.strip() for part in line.rstrip(" !").split("| ", 1)) for line in table.strip().splitlines()]


@pytest.mark.parametrize("answer, gold", cases(RIGHT))
def test_right(answer, gold):
    assert (boxed(answer, gold).score, boxed(answer, gold).status) == (1, "right")


@pytest.mark.parametrize("answer, gold", cases(WRONG))
def test_not_right(answer, gold):
    assert boxed(answer, gold).score == 0


@pytest.mark.parametrize("response", [
    "The answer is 5.", "", "\\boxed{}", "\\boxed{\\$}", "so \\boxed{\\frac{1}{2", "\\boxed{4 10/3}", "\\boxed{10^{10^{10}}}",
    "\\boxed{" + "(" * 3000 + "}",
    "\\boxed{\\frac{1}}"])
def test_without_a_readable_answer_it_is_unparseable(response):
    assert (grade(response, "5").score, grade(response, "5").status) == (0, "unparseable")


def test_the_whole_response_is_searched_and_a_box_may_be_long():
    long = "+".join(f"x^{{{n}}}" for n in range(2, 60))
    assert len(long) > 300
    assert grade(f"\\boxed{{{long}}}" + " checked again" * 1000, long + "+0").score == 1


@pytest.mark.parametrize("text, box", [
    ("\\boxed{a{b}c}", "a{b}c"), ("\\boxed{\\{1\\}}", "\\{1\\}"), ("\\boxed{\\boxed{5}}", "5"), ("\\boxed 5$", "5"),
    ("\\boxed{1} and \\boxed{2", "1"),
    ("\\boxedx{1}", None), ("$\\fbox {x}$", "x")])
def test_last_box(text, box):
    assert last_box(text) == box


def test_one_spelling():
    assert brace_arguments("\\frac12 + \\frac 9{20} + \\sqrt5 + \\sqrt[3]{2} + \\frac{\\sqrt3}2") == \
        "\\frac{1}{2} + \\frac{9}{20} + \\sqrt{5} + \\sqrt[3]{2} + \\frac{\\sqrt{3}}{2}"
    assert normalise("\\dfrac{270}7\\text{ degrees}.") == "\\frac{270}{7}"
    assert normalise("12,\\!000,\\!085") == "12000085"
    assert split_top("(1,2],\\{3,4\\}, 5", ",") == ["(1,2]", "\\{3,4\\}", "5"]


def test_a_gold_answer_that_cannot_be_is_told_as_such():
    with pytest.raises(ValueError, match="is empty"):
        boxed("5", " ")


def test_rationals_in_random_spellings():
    rng = random.Random(5)
    for _ in range(200):
        below = rng.choice([1, 2, 4, 5, 8, 20, 25])
        above = rng.randint(-5000, 5000)
        factor = rng.randint(2, 9)
        sign = "-" if above < 0 else ""
        spellings = [f"{above / below:.5f}", f"\\dfrac{{{above * factor}}}{{{below * factor}}}", f"{sign}\\frac{{{abs(above)}}}{{{below}}}",
                     f"x = {above}/{below}", f"{above / below:,.5f}\\text{{ cm}}", f"\\$ {above / below:,.5f}"]
        gold = rng.choice(spellings)
        assert [boxed(spelling, gold).score for spelling in spellings] == [1] * len(spellings), (gold, spellings)
        assert [boxed(f"{above + 1}/{below}", gold).score, boxed(f"{above * 2 + 1}/{below * 2}", gold).score] == [0, 0]
