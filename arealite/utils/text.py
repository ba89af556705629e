"""Makes text of unknown origin safe to print.

Messages of rewards, datasets, servers and other programs may contain anything. Everything that reaches a terminal,
a log, a failure record or the ledger passes through `clean`.
"""

import codecs
import io
import logging
import re
import sys
import threading
import traceback
from types import TracebackType

# Control characters but tab and newline, characters that reorder or break lines, and lone surrogates.
_UNSAFE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_STREAM = re.compile(_UNSAFE.pattern.replace("\x0b-\x1f", "\x0b\x0c\x0e-\x1f"))


def clean(text: str) -> str:
    """Return `text` with control characters and lone surrogates as visible escapes."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def clean_stream(text: str) -> str:
    """As `clean`, but keep carriage returns, with which progress bars rewrite their line."""
    return _UNSAFE_IN_STREAM.sub(_escape, text)


def text_decoder() -> codecs.IncrementalDecoder:
    """Return a decoder for portions of a stream, which may end inside a character."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def format_error(error: BaseException) -> str:
    """Return the traceback of an error as clean text."""
    return clean("".join(traceback.format_exception(error))).rstrip()


class CleanFormatter(logging.Formatter):
    """Formats log records as clean text."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def clean_process_output() -> None:
    """Have this process print tracebacks as clean text, and escape what its output cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.excepthook = _print_exception
    threading.excepthook = lambda args: _print_exception(args.exc_type, args.exc_value, args.exc_traceback)


def _print_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    print(clean("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)
