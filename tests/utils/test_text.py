import logging
import subprocess
import sys

import pytest

from arealite.utils.process import tail
from arealite.utils.text import CleanFormatter, clean, clean_stream, text_decoder

HOSTILE = "a\x1b]0;title\x07b\x9bc\x00d\udc80e\r\nf\tg\u202eh\x7f"


def test_escapes_and_surrogates_become_visible():
    text = clean(HOSTILE)
    assert text == "a\\x1b]0;title\\x07b\\x9bc\\x00d\\udc80e\nf\tg\\u202eh\\x7f"
    assert text.encode() and clean(text) == text
    assert clean("Grüße 你好 🙂\n") == "Grüße 你好 🙂\n"
    assert clean("50%\r100%") == "50%\\r100%" and clean_stream("50%\r100%\x1b[2J") == "50%\r100%\\x1b[2J"


def test_a_stream_may_be_cut_inside_a_character():
    decoder, data = text_decoder(), "né🙂".encode()
    assert "".join(decoder.decode(data[i : i + 1]) for i in range(len(data))) == "né🙂"


def test_log_records_are_clean():
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed: %s", (HOSTILE,), None)
    assert CleanFormatter("%(message)s").format(record) == f"failed: {clean(HOSTILE)}"


def test_the_end_of_a_log_is_clean(tmp_path):
    (tmp_path / "log").write_bytes(b"one\n\x1b[2Jtwo\xff")
    assert tail(tmp_path / "log") == "one\n\\x1b[2Jtwo\ufffd"


PROGRAM = r"""
import logging, sys
from arealite.api.errors import DatasetError
from arealite.utils.config import run_main
from arealite.utils.console import show_message
text = "\x1b[31mred\x07 \udc80"
def main(argv):
    logging.getLogger("arealite.x").warning("logged %s", text)
    show_message("shown " + text)
    print("printed \udc80")
    if argv == ["known"]:
        raise DatasetError("raised " + text)
    raise RuntimeError("raised " + text)
run_main(main)
"""


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_no_text_of_an_error_reaches_the_terminal_raw(kind):
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, timeout=60)
    assert done.returncode == (2 if kind == "known" else 1)
    output = (done.stdout + done.stderr).decode()
    for word in ("logged", "shown", "raised"):
        assert rf"{word} \x1b[31mred\x07 \udc80" in output
    assert r"printed \udc80" in output
    assert "\x1b" not in output and "\x07" not in output
