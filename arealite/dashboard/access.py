"""Decides which requests the dashboard answers, and what a browser may do with the answers.

With a token, every request must carry it: as `Authorization: Bearer`, or as the cookie that a visit of `/?token=…`
sets. Without one, the dashboard listens on loopback only. There it answers only to names that no web page can choose.
"""

import hashlib
import hmac

from aiohttp import web

from arealite.api.errors import ConfigError
from arealite.api.generation_args import LOOPBACK_HOSTS
from arealite.utils.http.server import LoopbackHosts, bearer_token, is_same_token

# Scripts, styles and images of the page itself only: text of a model can never run.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Access:
    """The rules of one dashboard. `check` returns True, or raises an HTTP error."""

    def __init__(self, host: str, token: str | None):
        if host not in LOOPBACK_HOSTS and not token:
            raise ConfigError(f"the dashboard listens on {host}, where everybody can read it: set a token too")
        self._token = (token or "").encode(errors="surrogateescape")
        self._hosts = LoopbackHosts() if host in LOOPBACK_HOSTS else None
        # The cookie is made from the token, so that it cannot be used in its place elsewhere.
        self._cookie = hmac.new(self._token, b"arealite dashboard", hashlib.sha256).hexdigest().encode()

    def check(self, request: web.Request) -> bool:
        if self._hosts is not None:
            self._hosts.check(request.headers.get("Host", ""))
        given = request.cookies.get(self._cookie_name(request), "").encode(errors="surrogateescape")
        query = request.query.get("token", "").encode(errors="surrogateescape") if request.path == "/" else b""
        if not self._token or is_same_token(given, self._cookie):
            return True
        if any(is_same_token(each, self._token) for each in (bearer_token(request), query)):
            return True
        raise web.HTTPUnauthorized(
            reason="missing or wrong token: open the address that `arealite dashboard` has printed"
        )

    def accept_token(self, request: web.Request) -> web.Response | None:
        """Answer a visit of `/?token=…`: keep the token in a cookie and remove it from the address."""
        if not self._token or "token" not in request.query:
            return None
        response = web.Response(status=303, headers={"Location": "./"})
        name = self._cookie_name(request)
        response.set_cookie(name, self._cookie.decode(), httponly=True, samesite="Strict", path="/")
        return response

    def _cookie_name(self, request: web.Request) -> str:
        # Cookies are shared by all ports of a host.
        address = request.transport.get_extra_info("sockname") if request.transport is not None else None
        return f"arealite_dashboard_{address[1] if address else 0}"
