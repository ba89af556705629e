"""The parameters of a request, checked."""

from aiohttp import web

from arealite.api.errors import RequestError

_MAX_NUMBER = 2**62


class Query:
    """The parameters of a request: values of the path and of the query string."""

    def __init__(self, request: web.Request):
        self._values = {**request.query, **request.match_info}

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def number(self, name: str) -> float | None:
        """Return a number; None if it is not given."""
        value = self._values.get(name, "")
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not abs(number) < _MAX_NUMBER:
            raise RequestError(f"{name} must be a finite number, got {value!r:.60}")
        return number

    def integer(self, name: str, default: int, low: int = 0, high: int = _MAX_NUMBER) -> int:
        """Return a whole number, moved into its range."""
        value = self._values.get(name, "")
        digits = value.removeprefix("-")
        if value and not (digits.isascii() and digits.isdecimal() and len(digits) < 19):
            raise RequestError(f"{name} must be a whole number, got {value!r:.60}")
        return min(max(int(value), low), high) if value else default
