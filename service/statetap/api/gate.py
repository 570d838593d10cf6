"""Who may call: whoever brings a configured key; without configured keys, whoever is on this machine and is no foreign web page.

A key is 256 random bits, so its plain SHA-256 cannot be guessed back and needs no slow hash; keys of any other form are refused
unread, so that nobody configures the hash of a word. What was presented is never kept, logged or told.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from statetap.api.problems import RequestRefused
from statetap.settings import KEY_PATTERN, ApiKey

SAFE_METHODS = frozenset({"GET", "HEAD"})
OWN_SITES = frozenset({"same-origin", "none"})
BEARER = re.compile(r"bearer +(?P<key>\S+) *", re.ASCII | re.IGNORECASE)
WAY_IN = "send `Authorization: Bearer <key>`, with the client by STATETAP_API_KEY or --api-key-file"


class Scope(StrEnum):
    """What a key allows: to look, or everything. A route names the least that it needs."""

    READ_ONLY = "read-only"
    ADMIN = "admin"


class CallerRefused(RequestRefused):
    """A request refused for who makes it: 401, 403 or 421."""


class Gate:
    """`trusted_hosts` are names under which a proxy makes the service known; they matter only without keys."""

    def __init__(self, keys: Sequence[ApiKey] = (), trusted_hosts: Collection[str] = ()) -> None:
        self._keys = [(bytes.fromhex(key.sha256), Scope(key.scope)) for key in keys]
        self._trusted_hosts = frozenset(host.lower() for host in trusted_hosts)

    def admit(self, request: web.Request, scope: Scope | None) -> None:
        """Return if the caller may use a route of this scope (None: anybody may).

        Raises:
            CallerRefused: no key, one that is not configured, or one of too narrow a scope; without keys, a browser's request for
                another host or from another site.
        """
        if scope is None:
            return
        if self._keys:
            self._require_key(request, scope)
        else:
            self._require_own_host(request)
            if request.method not in SAFE_METHODS:
                self._require_own_site(request)

    def _require_key(self, request: web.Request, scope: Scope) -> None:
        told = request.headers.getall("Authorization", [])
        if not told:
            raise _unauthorized(f"this call needs a key; {WAY_IN}")
        found = BEARER.fullmatch(told[0]) if len(told) == 1 else None
        granted = self._scope_of(found["key"]) if found else None
        if granted is None:
            raise _unauthorized("the key is none of the service's; check it, or have its hash configured", error="invalid_token")
        if scope is Scope.ADMIN and granted is not Scope.ADMIN:
            detail = "the key is read-only, and this call changes something; use a key with the scope admin"
            raise CallerRefused(403, detail, headers=_challenge(error="insufficient_scope", scope=scope.value))

    def _scope_of(self, key: str) -> Scope | None:
        """None: no such key. Every configured hash is compared, each in constant time: how long it takes tells nothing."""
        if not KEY_PATTERN.fullmatch(key):
            return None
        digest = hashlib.sha256(key.encode()).digest()
        granted = None
        for known, scope in self._keys:
            if hmac.compare_digest(known, digest):
                granted = scope
        return granted

    def _require_own_host(self, request: web.Request) -> None:
        """Against DNS rebinding: a name of somebody else's that leads to this machine makes a browser take us for their site."""
        told = request.headers.getall("Host", [])
        host = _hostname(f"//{told[0]}") if len(told) == 1 else None
        if host is None or not (_is_loopback(host) or host in self._trusted_hosts):
            detail = (
                "without configured keys the service answers requests for this machine only, by a loopback address or localhost; "
                "use one, configure keys, or name a proxy's host in server.trusted_hosts"
            )
            raise CallerRefused(421, detail, field="Host")

    def _require_own_site(self, request: web.Request) -> None:
        """Against cross-site posts: any page that somebody looks at can have their browser send them."""
        if request.headers.get("Sec-Fetch-Site", "none") not in OWN_SITES:
            raise _cross_site("Sec-Fetch-Site")
        for origin in request.headers.getall("Origin", []):
            own = origin.lower().partition("://")[2] == request.headers["Host"].lower()
            if not own and _hostname(origin) not in self._trusted_hosts:
                raise _cross_site("Origin")


def _unauthorized(detail: str, **told: str) -> CallerRefused:
    return CallerRefused(401, detail, headers=_challenge(**told))


def _cross_site(field: str) -> CallerRefused:
    return CallerRefused(403, "a browser sent this for a page of another site; only the service's own page may", field=field)


def _challenge(**told: str) -> Mapping[str, str]:
    parameters = ", ".join(f'{name}="{value}"' for name, value in {"realm": "statetap", **told}.items())
    return {"WWW-Authenticate": f"Bearer {parameters}"}


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
