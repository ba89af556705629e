"""Extraction and comparison of final answers."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from arealite.api.errors import DatasetError
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.math import answers_equal, final_answer, math_reward


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so \\boxed{12}", "12"),
        ("first \\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("nested \\boxed{a_{b_{c}}}", "a_{b_{c}}"),
        ("not closed \\boxed{12", "12"),
        ("48/2 = <<48/2=24>>24\n#### 1,072", "1,072"),
        ("The answer is $18.50.", "18.50"),
        ("3 apples and 4 pears, so 7.", "7"),
        ("no number", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "a, b, equal",
    [
        ("1,072", "1072", True),
        ("0.5", "\\frac{1}{2}", True),
        ("\\dfrac{3}{6}", "1/2", True),
        ("$18.50", "18.5", True),
        ("-7", "7", False),
        ("50%", "50", True),
        ("x + 1", "x+1", True),
        ("\\left(1, 2\\right)", "(1,2)", True),
        ("1/0", "1/0", True),
        ("", "0", False),
        ("__import__('os')", "0", False),
    ],
)
def test_answers_equal(a, b, equal):
    assert answers_equal(a, b) is equal


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answer is 10⁶", "1000000"), ("\\boxed{x⁴+1}", "x^4 + 1"), ("So it is x⁴ + 1", "x^4+1"),
        ("\\boxed{x^{10}}", "x¹⁰"), ("\\boxed{10⁻³}", "0.001"), ("\\boxed{2xⁿ⁺¹}", "2x^{n+1}"),
        ("It is x³ + 1", "x^3+1"),
    ],
)  # fmt: skip
def test_superscripts_are_powers(completion, answer):
    assert reward(completion, answer) == 1.0
    assert reward("The answer is 10⁷", answer) == 0.0


def test_rewards():
    common = {"prompt": "", "prompt_ids": [], "completion_ids": []}
    assert gsm8k_reward(completion="\\boxed{24}", answer="48/2=24\n#### 24", **common) == 1.0
    assert gsm8k_reward(completion="it is 25", answer="#### 24", **common) == 0.0
    assert math_reward(completion="\\boxed{\\frac{2}{4}}", answer="0.5", **common) == 1.0
    assert math_reward(completion="", answer="0.5", **common) == 0.0
    with pytest.raises(DatasetError, match="column `answer`"):
        gsm8k_reward(completion="1", answer="", **common)


@pytest.mark.parametrize(
    "box, answer, value",
    [
        ("6 * 7", "42", 0.0), ("6 \\times 7", "42", 0.0), ("(40 + 2)", "42", 0.0), ("84/2", "42", 0.0),
        ("\\frac{84}{2}", "42", 0.0), ("6 * 7 = 42", "42", 1.0), ("-42", "-42", 1.0), ("\\$1,042.00", "1042", 1.0),
        ("44 - 2", "42", 0.0), ("42 km/h", "42", 1.0), ("1/2", "0.5", 1.0), ("x = 42", "42", 1.0),
    ],
)  # fmt: skip
def test_an_answer_to_gsm8k_is_a_number_and_no_formula(box, answer, value):
    assert gsm8k_reward("", f"so \\boxed{{{box}}}", [], [], answer=f"#### {answer}") == value


def reward(completion: str, answer: str) -> float:
    return math_reward("", completion, [], [], answer=answer)


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("\\boxed{\\text{yes}}", "\\text{yes}"),
        ("\\boxed{\\text{(B)}}", "(B)"),
        ("\\boxed{1\\frac{1}{2}}", "1.5"),
        ("\\boxed{-1\\frac12}", "-3/2"),
        ("\\boxed{1 1/2}", "1.5"),
        ("\\boxed{70{,}000}", "70,000"),
        ("\\boxed{70\\,000}", "70000"),
        ("\\boxed{−5}", "-5"),
        ("\\boxed{18 dollars}", "18"),
        ("\\boxed{\\text{18 dollars}}", "18"),
        ("\\boxed{12\\text{ m}^2}", "12"),
        ("\\boxed{60 miles per hour}", "60"),
        ("\\boxed{€12}", "12"),
        ("\\boxed{x=18}", "18"),
        ("\\boxed{5 \\times 3 = 15}", "15"),
        ("\\boxed{0 apples}", "0"),
        ("She has 1{,}000 apples.", "1000"),
        ("The final answer is $\\frac{3}{4}$.", "3/4"),
        ("The answer is $1\\frac{1}{2}$ cups.", "1.5"),
        ("The answer is 5 + 3 = 8", "8"),
        ("The answer is 5 apples + 3 apples = 8 apples.", "8"),
        ("The answer is 12 when x = 3", "12"),
        ("The answer is 18 because 20 - 2 = 18", "18"),
        ("The answer is \\( 18 \\).", "18"),
        ("The answer is $2\\sqrt{3}$.", "2\\sqrt{3}"),
        ("The answer is $2x + 3$.", "2x+3"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\boxed{\begin{pmatrix} 1 & 0.5 \\[2pt] 3 & 4 \end{pmatrix}}", r"\begin{pmatrix}1&\frac12\\3&4\end{pmatrix}"),
        (r"\boxed{x = 2 \text{ or } x = -2}", "-2, 2"),
        (r"\boxed{x_1 = \frac{1}{2},\quad x_2 = 3}", "0.5, 3"),
        (r"\boxed{2, 3}", "x=2 or x=3"),
        (r"\boxed{0.1\overline{6}}", r"\frac16"),
        (r"\boxed{-\frac{15}{11}}", r"-1.\overline{36}"),
        (r"\boxed{12个}", "12"),
        (r"\boxed{60千米/小时}", "60"),
        ("因此，小明有12个苹果。", "12"),
        ("答案是：-3。验证：3×4=12，共3组。", "-3"),
        ("答案不是5，而是6。", "6"),
        ("따라서 정답은 12개입니다", "12"),
        ("\\boxed{½}", "1/2"),
        ("The answer is 2½ cups.", "5/2"),
        ("#### -¾", "-0.75"),
        (r"\boxed{x½}", r"\frac{x}{2}"),
        ("\\boxed{3^{rd}}", "3"),
        (r"\boxed{3^{\text{rd}}}", "3rd"),
        (r"The answer is $4^\mathrm{th}$.", "4th"),
        ("\\boxed{3rd}", "3^{rd}"),
        ("The answer is 6 ft 2 in.", "6 ft 2 in"),
        ("#### 6 ft. 2 in.", "6 ft 2 in"),
        ("So it takes 1 hour and 30 minutes.", "1 hour and 30 minutes"),
        (r"\boxed{6\text{ feet }2\text{ inches}}", "74 inches"),
    ],
)
def test_right_answers_in_other_spellings(completion, answer):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("\\boxed{\\text{no}}", "\\text{yes}"),
        ("\\boxed{\\text{(B)}}", "\\text{(A)}"),
        ("\\boxed{}", "\\text{Evelyn}"),
        ("\\boxed{\\text{}}", ""),
        ("\\boxed{1\\frac{1}{2}}", "5.5"),
        ("\\boxed{1 1/2}", "5.5"),
        ("\\boxed{18 20}", "1820"),
        ("\\boxed{18, 20}", "20"),
        ("\\boxed{18 or 20}", "18"),
        ("\\boxed{18-20}", "18"),
        ("\\boxed{18 apples and 20 pears}", "18"),
        ("\\boxed{x=18, y=20}", "20"),
        ("\\boxed{x=18 or x=20}", "20"),
        ("\\boxed{x=18, y=20}", "18, 20"),
        (r"\boxed{0.\overline{6}}", "0.6"),
        ("\\boxed{3万}", "3"),
        ("\\boxed{2小时30分}", "2"),
        ("\\boxed{12厘米}", "12米"),
        ("\\boxed{2½}", "1"),
        (r"\boxed{3^{r}}", "3"),
        (r"\boxed{x^{th}}", "x"),
        ("The answer is 6 ft 2 in.", "6"),
        ("\\boxed{6 ft 2 in}", "6 ft 3 in"),
        ("\\boxed{5 m 30 s}", "5 m"),
        ("\\boxed{2x = 18}", "18"),
        ("\\boxed{x >= 18}", "18"),
        ("\\boxed{18x}", "18"),
        ("\\boxed{m^2}", "2"),
        ("\\boxed{5 cm}", "5 m"),
        ("\\boxed{3 million}", "3"),
        ("\\boxed{3 and a half}", "3"),
        ("\\boxed{50%}", "0.5"),
        ("\\boxed{1.000}", "1,000"),
        ("\\boxed{1,2}", "12"),
        ("The answer is 18 or 20", "18"),
        ("The answer is 18-20", "18"),
        ("The answer is 5 + 3", "5"),
        ("The answer is $\\sqrt{2}$", "2"),
        ("The answer is $3\\pi$", "3"),
        ("The answer is $2^{10}$", "2"),
        (r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\boxed{\begin{pmatrix} 3 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_wrong_answers_get_no_reward(completion, answer):
    assert reward(completion, answer) == 0.0


@pytest.mark.parametrize(
    "completion, answer, wrong",
    [
        ("$\\frac{2}{3}$", "2/3", "3"),
        ("2^{10}", "1024", "10"),
        ("#### 70 000", "70000", "70"),
        ("−5°C", "-5", "5"),
        ("25 cm^2", "25", "2"),
        ("The answer is 8. 3+5=8, so the answer is correct.", "8", "5"),
        ("Final answer: 5 (out of 12)", "5", "12"),
        ("12-17", "-5", "-17"),
        ("5 thousand", "5000", "5"),
        ("The answer is 5 thousand.", "5,000", "5"),
        ("so it is $\\sqrt2$", "\\sqrt{2}", "2"),
        ("so it is \\frac7{12}.", "7/12", "12"),
        ("so it is $10^3$.", "1000", "3"),
        ("so it is $1\\times10^3$", "1000", "1"),
    ],
)
def test_extraction_reads_the_whole_answer(completion, answer, wrong):
    assert reward(completion, answer) == 1.0
    assert reward(completion, wrong) == 0.0


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answer is (1, 2) as shown.", "(1,2)"),
        ("So we get (7, 6).", "(7,6)"),
        ("so 8n^2 + 4n + 1", "8n^2+4n+1"),
        ("The answer is (B).", "\\text{B}"),
        ("Answer: C) 12", "12"),
        ("The answer is Friday.", "\\text{Friday}"),
        ("x = 10^3", "1000"),
        ("$A = \\pi r^2 = 25\\pi$", "25\\pi"),
        ("\\[ 3x = 18 \\implies x = 6 \\]", "6"),
        ("\\[\\begin{aligned} x &= 3+5 \\\\ &= 8 \\end{aligned}\\]", "8"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "1, 2"),
        ("The answers are $1$ and $2$.", "1,2"),
        ("\\boxed{7, -2, -5}", "7, -2, \\text{ and } -5"),
        ("#### Step 4: add\nSo 7", "7"),
        ("**Final Answer**\n\nThe total is 5.", "5"),
        ("The answer to the question is 5.", "5"),
        ("<answer>5</answer> as asked", "5"),
        ("The answer is 8!", "8"),
        ("She has $5 and the side is $x$.", "x"),
        ("It cost $5 and the rest was $6.", "6"),
        ("The answer is -$5", "-5"),
        ("The answer is: $$\n5\n$$", "5"),
        ("Answer: 0.333333", "1/3"),
        ("The answer is \\frac{3}{4} of a cup", "3/4"),
        ("The answer is $5$ million", "5,000,000"),
        ("\\boxed{5\\text{ dozen}}", "60"),
        ("The answer is 2*sqrt(3)", "2\\sqrt{3}"),
        ("The answer is 2√3.", "2\\sqrt3"),
        ("Thus $x \\ge 3$.", "x >= 3"),
        ("The answer is 5. It is not 12: the answer is not 12.", "5"),
        ("The ratio is 3:1", "3:1"),
        ("The answer is 5km.", "5"),
        ("- 5 apples", "5"),
    ],
)
def test_answers_as_models_write_them(completion, answer):
    assert reward(completion, answer) == 1.0


def test_formulas_that_would_take_minutes_are_not_evaluated():
    for formula in ("9^{9^{9^9}}", "99999999!", "(x+y+z+w)^{99}", "\\binom{1000000}{500000}", "2^{99999999}"):
        assert reward(f"\\boxed{{{formula}}}", "5") == 0.0
        assert reward(f"\\boxed{{{formula}}}", formula) == 1.0


@pytest.mark.parametrize(
    "part", ["$", "\\[", "{", "\\boxed{", "answer is ", "(", "1,", "####", "\\", "-", "= ", "1-", "\\text{"]
)
def test_degenerate_text_is_read_in_bounded_time(part):
    reward(part * 20_000, "5")


def test_expressions_are_compared_by_algebra_in_any_thread():
    with ThreadPoolExecutor(1) as threads:
        for run in (reward, lambda *args: threads.submit(reward, *args).result(60)):
            assert run("\\boxed{(x+1)^2}", "x^2+2x+1") == 1.0
            assert run("\\boxed{(x+1)^2}", "x^2+1") == 0.0


@pytest.mark.parametrize(
    "box, answer, other",
    [
        (r"x^3 + x^2 + 1", "1 + x^2 + x^3", "1 + x^2 - x^3"), (r"x^2y^3", "y^3x^2", "x^3y^2"),
        ("x^2+y^2-4=0", "x^2+y^2=4", "x^2+y^2=2"), ("(x-1)^2+(y+2)^2=9", "x^2+y^2-2x+4y-4=0", "x^2+y^2-2x+4y=0"),
        (r"\frac{x^2}{4}+\frac{y^2}{9}=1", "9x^2+4y^2=36", "4x^2+9y^2=36"),
        (r"2\times10^{-7}", "0.0000002", r"3\times10^{-7}"), ("6.02e23", r"6.02\times10^{23}", r"6.03\times10^{23}"),
        ("10^{-20}", r"1\times10^{-20}", "10^{-21}"), ("0.0000124", "1.24e-5", "0.000012"),
        ("1:3:2", "2:6:4", "1:2:3"), (r"3 \text{ to } 1", "3:1", "1:3"),
        # Times and ranges have no common factor.
        ("3:15", "3:15", "6:30"), ("2 to 4", "2 to 4", "1 to 2"),
        ("12_8", "(12)_8", "12_7"), ("11_2", "3_{10}", "11_3"), ("x_{1}", "x_1", "x_2"),
        (r"\frac{1\pm\sqrt{5}}{2}", r"\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}", r"\frac{1+\sqrt5}{2}"),
        ("(x, y) = (1, 2)", "(1,2)", "(2,1)"), (r"(r,\theta)=(1,\pi)", r"(1,\pi)", r"(\pi,1)"),
        (r"2\sqrt{3} \text{ square inches}", r"2\sqrt{3}", r"3\sqrt{2}"), (r"12\pi \text{ meters}", r"12\pi", "12"),
        (r"5 \text{ sq. units}", "5", "6"), (r"5\text{ cm}^{2}", r"5\text{ cm}^2", r"5\text{ cm}^3"),
        (r"\boldsymbol{7}", "7", "8"), (r"\mathbb R", r"\mathbb{R}", r"\mathbb{Z}"),
        (r"\varnothing", r"\emptyset", "0"),
        ("“yes”", r"\text{yes}", "no"), ("－5％", "-5", "5"), ("负5", "-5", "5"), ("₹1,000", "1000", "100"),
        (r"\text{The answer is }5", "5", "6"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}", r"\frac{n(n+1)}{2}"),
    ],
)  # fmt: skip
def test_equal_formulas_and_others(box, answer, other):
    assert reward(f"\\boxed{{{box}}}", answer) == 1.0
    assert reward(f"\\boxed{{{box}}}", other) == 0.0


@pytest.mark.parametrize(
    "completion, answer",
    [
        (r"\boxed{5 \text{ or 6}}", "5"), (r"\boxed{\sqrt{2}\text{, 3}}", r"\sqrt{2}"),
        (r"\boxed{5 \text{ (or 6)}}", "5"),
        (r"\boxed{\sqrt{2}\text{, not }\sqrt{3}}", r"\sqrt{2}"), (r"\boxed{(y, x) = (1, 2)}", "(1,2)"),
        ("The answer is 5 and 6.", "5"), ("The answer is 5, 6, or 7.", "5"), ("The answer is between 5 and 7.", "5"),
        ("So x = 5 or x = 7.", "7"), ("It is 5 or -5", "-5"), ("±5", "5"), ("The answer is ±5", "5"),
        ("The answer is negative 5.", "5"), ("The answer is minus 5.", "5"), ("答案是负5", "5"),
        ("The answer is 4? No, so it is 5.", "4"),
    ],
)  # fmt: skip
def test_several_answers_and_lost_signs_get_no_reward(completion, answer):
    assert reward(completion, answer) == 0.0


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("The answers are 5 and 6.", "5, 6"), ("So x = 5 or x = 7.", "5, 7"), ("The answer is ±5", "-5, 5"),
        ("The answer is negative 5.", "-5"), ("The answer is minus $5.", "-5"), ("答案是负5", "-5"),
        ("答案：（5）", "5"),
        ("The answer is 4? No, so it is 5.", "5"),
    ],
)  # fmt: skip
def test_answers_in_sentences(completion, answer):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    "box",
    [
        r"\int_0^{\infty} \frac{\sin x}{x} dx", r"\frac{d^{99}}{dx^{99}} x^{98}", r"\binom{x}{999}", "2^{9999}x",
        r"(1+\sqrt{2})^{9999}", "(x+y+z+w+v)^{8}", "*".join(f"(x+y+{i})" for i in range(40)),
        "(" * 150 + "x" + ")" * 150,
        r"\sin^{99}x", "(((((((((9^9)^9)^9)^9)^9)^9)^9)^9)^9",
    ],
)  # fmt: skip
def test_what_takes_long_is_compared_as_text(box, monkeypatch):
    monkeypatch.setattr("math_verify.verify", lambda *args, **options: pytest.fail("evaluated"))
    assert [reward(f"\\boxed{{{box}}}", answer) for answer in (r"\frac{\sqrt{2}}{2}", r"\sin x", box)] == [
        0.0,
        0.0,
        1.0,
    ]
