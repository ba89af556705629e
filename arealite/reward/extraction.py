r"""Find the final answer in a completion.

`final_answer` tries, in this order: the last `\boxed{…}`; the last statement behind a marker (`####`, `the answer is`,
`Final answer:`, `<answer>`); the last formula or number of the text. It returns text, which `reward.math` compares.
"""

import re
import unicodedata
from collections.abc import Iterator

from arealite.reward.measures import compound_at

# Without a marker the answer is searched in the last characters only; in more of them if there is none.
_TAILS = (500, 5_000)
# Limits that bound the work on degenerate text: characters of an answer, and how many markers or boxes are tried.
_MAX_ANSWER = 1_000
_MAX_TRIES = 20
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "÷": "/", "·": "*", "\u00a0": " ", "\u2009": " ", "\u202f": " "})
_SIGNS |= str.maketrans("－＋（）％", "-+()%") | {ord("±"): "\\pm "}
# A minus in words.
_NEGATIVE = re.compile(r"(?:\b[Nn]egative\s+|(?<=\bis )minus\s+|负\s*)(?=\$?\d)")
# ½ and its like, in LaTeX.
_PARTS = {sign: unicodedata.normalize("NFKC", sign).split("\u2044") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
FRACTIONS = str.maketrans({sign: rf"\frac{{{a}}}{{{b}}}" for sign, (a, b) in _PARTS.items()} | {"\u2044": "/"})

# ⁶ and its like: `10⁻³`, `xⁿ⁺¹`.
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"

SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SCALE = rf"(?:\s*\b(?:{'|'.join(SCALES)})\b)+"
_SCALE = re.compile(SCALE, re.I)

_COMMAND = (
    r"\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname|begin|end)\s*\{[^{}]*\}"
    r"|\\[A-Za-z]+\s*\{[A-Za-z]{1,4}\}|\\(?:sin|cos|tan|cot|sec|csc|log|ln)\s*[A-Za-z](?![A-Za-z])|\\(?!boxed)[A-Za-z]+"
)
# A formula inside `$…$`. A word of four letters or more means that the `$` are currency signs.
_INLINE = rf"(?:{_COMMAND}|\\.|[^\\$A-Za-z\n]|[A-Za-z]{{1,3}}(?![A-Za-z])){{1,600}}?"
_DELIMITED = (
    r"\$\$(?P<dollars>.{1,1000}?)\$\$|\\\[(?P<brackets>.{1,1000}?)\\\]|\\\((?P<parentheses>.{1,1000}?)\\\)"
    rf"|(?<![\\$])\$(?P<inline>(?!\s){_INLINE}(?<!\s)|(?=\s){_INLINE}(?<=\s))\$(?!\d)"
)
# A letter is a variable, and not a word or a label, if it touches a digit, a bracket or an operator.
_VARIABLE = (
    r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
    rf"(?:(?=[\d^_({SUPERSCRIPTS}])|(?=\s*[-+*/=<>])|(?<=[\d)}}\](\{{^_*/+=\-{SUPERSCRIPTS}].)"
    r"|(?<=[-+*/=]\s.)|(?<=\{.))"
)
# A formula outside `$…$`: a run of numbers, operators, brackets, commands and variables, without words. Chinese,
# Japanese and Korean write no space before it.
_RUN = (
    rf"(?<![A-Za-z\d_\u00c0-\u1fff^\\.{{])(?:{_COMMAND}|\\[^A-Za-z\s$()\[\]]|\\?\$(?=\d)|[€£¥]|\bsqrt(?=\()"
    rf"|(?<=\d):(?=\d)|{_VARIABLE}|[\d^_+\-*/(){{}}\[\]|!=<>&,.%√π∞{SUPERSCRIPTS} \t])+"
)
_FORMULA = re.compile(rf"{_DELIMITED}|(?P<run>{_RUN})", re.S)
_HAS_VALUE = re.compile(r"\d|\\[A-Za-z]|[√π∞]")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d{3})")
_ALIGNED = re.compile(r"\\(?:begin|end)\s*\{(?:align|gather|equation|split)\w*\*?\}")
_IMPLIES = re.compile(r"\\(?:implies|[Rr]ightarrow|Longrightarrow|therefore|q?quad)(?![A-Za-z])")
_TEXT = re.compile(r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# Before a formula: a bullet, an equals sign, the label of a choice.
_PREFIX = re.compile(r"^(?:[-+*=,.:]\s+|[=,:*]\s*|\(?[A-Ea-e]\)\s+(?=\S))+")
_SUFFIX = " \t,.;:=+-*/^_([{<>!&\\"

# Words that every marker contains. Searching them first is faster than a search for the whole patterns.
_MARKER_WORDS = ("####", "nswer", "NSWER", "答案")
_MARKER = re.compile(
    r"(?P<hashes>(?<!\#)\#\#\#\#(?!\#))|(?<=<a)nswer>"
    r"|(?:(?<=[Ff]inal [Aa])nswer|NSWER)\W*\n"
    r"|答案\W{0,4}(?:[是为]|等于|[:：])[:：]?"
    r"|(?:nswer|NSWER)s?\b\W*(?:(?:to|of|for|in)\b[^.:=\n]{1,80}?)?(?:\b(?:is|are|IS|equals|becomes)\b|[:=])"
)
_HEADING = re.compile(r"\s*(?:step\b|\d+[.):]\s+\S)", re.I)
_STATEMENT_END = re.compile(r"(?<![ap]\.m)[.;](?=\W*(?:\s|$))|[。；]|\n|</|\bI hope\b")
_WORD = re.compile(rf"(?:{_COMMAND})|\bsqrt\b|(?P<word>(?<![^\W_])[^\W\d_]{{2,}})")
# What follows the marker is no answer: "the answer is correct", "the answer is not 12", "the answer is found by …".
_NO_ANSWER = re.compile(
    r"\W*(?:正确|错误|不|(?:(?:also|indeed|therefore|thus|then|still|now|so|clearly)\s+)*"
    r"(?:not|in|correct|incorrect|right|wrong|found|obtained|calculated|computed"
    r"|given|derived|verified|confirmed|reasonable|clear|unique|the\s+same|as\s+follows|your)\b)",
    re.I,
)
_JOINT = re.compile(r"\s*(?:,\s*(?:and|or)?|and|or)\s*", re.I)
_NEXT = r"[-+]?\$?\d(?:[\d.,]*\d)?"
# Numbers that are given together: `5 or 6`, `5, 6, or 7`, `5 to 7`, and at the end of a statement `5 and 6`.
_ALTERNATIVE = re.compile(rf"(?:\s*,\s*{_NEXT})*(?:\s*,?\s*(?:or|to)\s+{_NEXT}|\s*,?\s*and\s+{_NEXT}(?=\W*$))", re.I)
# Before the last number: the one that it is an alternative to.
_OTHER = re.compile(r"\s*,?\s*or\s+\$?", re.I)
# Words and an operator behind a number: a calculation such as `5 apples + 3 apples = 8 apples`.
_CALCULATION = re.compile(
    r"(?:\s+(?!when|if|where|for|because|since|with|at)[A-Za-z]{2,}){0,4}\s*(?:=|[-+*/]\s*[($]*\d)"
)


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a completion, or None; the module describes where it looks."""
    text = behind_thinking(text)
    boxed = last_boxed(text)
    if boxed is not None:
        plain = _TEXT.sub(r"\1", boxed)
        return next(filter(None, map(_read_statement, _marked_statements(plain))), None) or boxed
    # A box that is not closed, or empty, is no marker.
    text = _NEGATIVE.sub("-", text.translate(_SIGNS).translate(FRACTIONS).replace("\\boxed{", " "))
    for statement in _marked_statements(text):
        answer = _read_statement(statement)
        if answer:
            return answer
    for size in _TAILS:
        found = list(_formulas(text[-size:]))
        if found:
            match, formula = found[-1]
            if measure := _measure_until(text[-size:], found):
                return measure
            other = found[-2] if len(found) > 1 else None
            if other and _OTHER.fullmatch(text[-size:], other[0].start() + _width(other[0]), match.start()):
                return f"{other[1]} or {formula}"
            return _with_scale(formula, text[-size:], match.end())
    return None


def behind_thinking(text: str) -> str:
    """Return what follows the last `</think>`, which is the answer; all of the text if nothing does."""
    answer = text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text
    return answer if answer.strip() else text


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{…}`; boxes joined by `and`, `or` or `,` are one."""
    boxes: list[str] = []
    end = start = text.rfind("\\boxed")
    for _ in range(_MAX_TRIES):
        if start < 0:
            break
        content, after = _box_content(text, start)
        if content:
            between = text[after:end].replace("$", "")
            if boxes and not (len(between) < 20 and _JOINT.fullmatch(between)):
                break
            boxes.insert(0, content)
            end = start
        start = text.rfind("\\boxed", 0, start)
    return ", ".join(boxes) or None


def last_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`, or None."""
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    return text[start + len("<answer>") : text.index("</answer>", start)] if start >= 0 else None


def _box_content(text: str, start: int) -> tuple[str, int]:
    """Return the content of the box at `start` (empty if it is not closed), and where the box ends."""
    begin = start + len("\\boxed")
    if text[begin : begin + 1] != "{":
        bare = re.compile(r"\s*([^\s{}$]+)").match(text, begin)
        return (bare[1], bare.end()) if bare else ("", begin)
    depth = 0
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, begin, begin + _MAX_ANSWER):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[begin + 1 : brace.start()].strip(), brace.end()
    return "", begin


def _marked_statements(text: str) -> Iterator[str]:
    """What follows each marker, from the last marker to the first."""
    position = len(text)
    for _ in range(_MAX_TRIES):
        position = max(text.rfind(word, 0, position) for word in _MARKER_WORDS)
        if position < 0:
            return
        marker = _MARKER.match(text, position)
        if marker is None:
            continue
        statement = text[marker.end() : marker.end() + _MAX_ANSWER]
        if not (marker["hashes"] and _HEADING.match(statement)):
            yield statement


def _formulas(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """All formulas and numbers of a text, each with the match that it was found in."""
    for match in _FORMULA.finditer(text):
        if match["run"] is None:
            formula = _delimited_formula(match)
            if formula:
                yield match, formula
            continue
        run = _THOUSANDS.sub(",", match["run"][-_MAX_ANSWER:]).replace("\\$", "").replace("$", "")
        for part in _split_list(_last_step(run)):
            formula = _trim(part)
            if formula and _HAS_VALUE.search(formula):
                yield match, formula


def _delimited_formula(match: re.Match[str]) -> str:
    r"""The formula between `$`, `\(` or `\[`; the last step where there are several."""
    groups = (match[name] for name in ("dollars", "brackets", "parentheses", "inline"))
    formula = next(group for group in groups if group is not None)
    return _last_step(formula).strip().rstrip(".,;:").strip()


def _last_step(formula: str) -> str:
    r"""The last line of aligned formulas, and of that line what follows `\implies`."""
    if _ALIGNED.search(formula):
        formula = _ALIGNED.sub("", formula).replace("&", "").rstrip("\\ \n").split("\\\\")[-1]
    return _IMPLIES.split(formula)[-1]


def _split_list(run: str) -> Iterator[str]:
    """The parts of a run that `,` `.` or `:` and a space separate, outside brackets."""
    depth = begin = 0
    for i, character in enumerate(run):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0 and character in ",.:" and run[i + 1 : i + 2].isspace():
            yield run[begin:i]
            begin = i + 1
    yield run[begin:]


def _trim(part: str) -> str:
    """`part` without a label before it, and without operators and unmatched brackets around it."""
    for _ in range(_MAX_TRIES):
        part = _PREFIX.sub("", part.strip().rstrip(_SUFFIX))
        # Counted together, as the brackets of an interval such as [0, 1) differ.
        opened, closed = (sum(part.count(bracket) for bracket in brackets) for brackets in ("([{", ")]}"))
        if closed > opened and part[-1:] in ")]}":
            part = part[:-1]
        elif opened > closed and part[:1] in "([{":
            part = part[1:]
        else:
            break
    return part


def _measure_until(text: str, found: list[tuple[re.Match[str], str]]) -> str | None:
    """Return the measure in several units that ends with the last number."""
    last = found[-1][0].start()
    starts = (match.start() for match, _ in found[-4:-1])
    return next((each for start in starts if (each := compound_at(text, start)) and start + len(each) > last), None)


def _with_scale(formula: str, text: str, end: int) -> str:
    """The formula with the word behind it that multiplies it: `5 thousand`."""
    scale = _SCALE.match(text, end)
    return f"{formula} {scale.group().strip()}" if scale else formula


def _read_statement(text: str) -> str | None:
    """The answer in the text behind a marker, or None if the text states none."""
    text = text.lstrip("*_:`>= \t\r\n")
    end = _STATEMENT_END.search(text)
    stop = end.start() if end else len(text)
    found = next(_formulas(text), None)
    match, formula = found if found and found[0].start() <= stop else (None, "")
    if _NO_ANSWER.match(text[: match.start() if match else stop]):
        return None
    if match and (measure := compound_at(text, match.start())):
        return measure
    if match and match["run"] is None:
        return _join_formulas(text, match, formula)
    sentence = text[:stop].strip("*_`\"'! \t\r")
    if not any(word["word"] for word in _WORD.finditer(sentence)):
        return _PREFIX.sub("", sentence.replace("\\$", "").replace("$", ""))
    if match is None:
        return sentence if len(sentence.split()) <= 6 else None
    return _read_sentence(text[:stop], match, formula)


def _join_formulas(text: str, match: re.Match[str], formula: str) -> str:
    """The formula, with those that a comma, `and` or `or` joins to it."""
    answers = [formula]
    while joint := _JOINT.match(text, match.end()):
        following = _FORMULA.match(text, joint.end())
        if following is None or following["run"] is not None:
            break
        match = following
        answers.append(_delimited_formula(match))
    return _with_scale(", ".join(answers), text, match.end())


def _width(match: re.Match[str]) -> int:
    """Return the length of what was matched, without what only separates it from the words behind it."""
    return len(match.group().rstrip(" ,.(="))


def _read_sentence(sentence: str, match: re.Match[str], formula: str) -> str | None:
    """Return the answer in a sentence with words: its result if it calculates one, or its first formula.

    A question has none.
    """
    end = match.start() + _width(match)
    if sentence[end:].lstrip(" ,.").startswith("?"):
        return None
    if alternative := _ALTERNATIVE.match(sentence, end):
        return f"{formula}{alternative.group()}"
    if _CALCULATION.match(sentence, end) and "=" in sentence[end:]:
        results = [result for _, result in _formulas(sentence[sentence.rindex("=") + 1 :])]
        return results[0] if results else sentence
    return _with_scale(formula, sentence, end)
