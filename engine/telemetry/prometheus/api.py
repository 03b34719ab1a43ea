"""The HTTP API of Prometheus and of what answers like it: queries out, samples in, every trouble a sentence."""

from __future__ import annotations

import asyncio
import base64
import http.client
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlencode

import msgspec

from engine.profile import Prometheus
from engine.telemetry.source import SourceError
from engine.telemetry.text import clean

TIMEOUT_S = 10.0
"""For a whole reply, so that one that trickles does not count as alive."""
MOST_BYTES = 64 << 20
"""Three times what a metric of 65,536 GPUs with all its labels takes."""
MOST_SECRET = 64 << 10
PIECE = 1 << 18

T = TypeVar("T")


class Sample(msgspec.Struct, frozen=True):
    """One series at one moment: its labels as they came, and (unix seconds of the evaluation, the number as text)."""

    metric: msgspec.Raw
    value: tuple[float, str]


class Series(msgspec.Struct, frozen=True):
    """One series over time."""

    metric: msgspec.Raw
    values: list[tuple[float, str]]


class _Vector(msgspec.Struct, frozen=True, tag_field="resultType", tag="vector"):
    result: list[Sample]


class _Matrix(msgspec.Struct, frozen=True, tag_field="resultType", tag="matrix"):
    result: list[Series]


class _Reply(msgspec.Struct, frozen=True):
    status: str
    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


_REPLY = msgspec.json.Decoder(_Reply)
_VECTOR, _MATRIX = msgspec.json.Decoder(_Vector), msgspec.json.Decoder(_Matrix)
_LABELS = msgspec.json.Decoder(dict[str, str])


def vector(body: bytes) -> list[Sample]:
    """The samples of an instant query's reply. SourceError for anything else."""
    return _decoded(_VECTOR, body).result


def matrix(body: bytes) -> list[Series]:
    """The series of a range query's reply. SourceError for anything else."""
    return _decoded(_MATRIX, body).result


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        reply = _REPLY.decode(body)
        if reply.status != "success":
            raise SourceError(f"Prometheus refuses the query: {clean(reply.error) or 'it does not say why'}", slow=True)
        return decoder.decode(reply.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if body.lstrip()[:1] == b"<":
            raise SourceError("the answer is a web page, not JSON: is this the API's base URL?", slow=True) from None
        raise SourceError(f"the answer is not that of a Prometheus API: {clean(str(error))}") from None


def labels(metric: msgspec.Raw) -> dict[str, str]:
    """A series' labels; none where they are no labels."""
    try:
        return _LABELS.decode(metric)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def number(text: str) -> float:
    """A sample's number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def selector(series: str, matchers: dict[str, str]) -> str:
    """A series with matchers in PromQL; a value that begins with ~ is a regular expression."""
    inside = []
    for name, value in matchers.items():
        sign, text = ("=~", value[1:]) if value.startswith("~") else ("=", value)
        inside.append(f"{name}{sign}{quoted(text)}")
    return f"{series}{{{','.join(inside)}}}"


def quoted(text: str) -> str:
    """A PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class Api:
    """Asks one API. Safe to use from several threads."""

    def __init__(self, told: Prometheus, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BYTES) -> None:
        self._told, self._timeout_s, self._most_bytes = told, timeout_s, most_bytes
        self._opener: urllib.request.OpenerDirector | None = None
        self._opening = threading.Lock()

    async def instant(self, query: str, read: Callable[[list[Sample]], T]) -> T:
        """What `read` makes of an instant query's samples; both off the event loop. SourceError with a sentence."""
        return await _aside(lambda: read(vector(self._ask("query", {"query": query}))))

    async def over(self, query: str, start: float, end: float, step_s: float, read: Callable[[list[Series]], T]) -> T:
        """What `read` makes of a range query's series."""
        asked = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:.3f}"}
        return await _aside(lambda: read(matrix(self._ask("query_range", asked))))

    def _ask(self, what: str, asked: dict[str, str]) -> bytes:
        url = f"{self._told.url.rstrip('/')}/api/v1/{what}"
        request = urllib.request.Request(url, urlencode(asked).encode(), self._headers())
        ends = time.monotonic() + self._timeout_s
        try:
            with self._open(request) as reply:
                return _bounded(reply, ends, self._most_bytes)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error, ends) from None
        except urllib.error.URLError as error:
            raise _unreached(error.reason, self._timeout_s) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _unreached(error, self._timeout_s) from None

    def _open(self, request: urllib.request.Request) -> Any:
        with self._opening:
            if self._opener is None:
                self._opener = _opener(self._told.ca_file)
        return self._opener.open(request, timeout=self._timeout_s)

    def _headers(self) -> dict[str, str]:
        told, found = self._told, {"Accept": "application/json", "User-Agent": "rackside"}
        if told.org:
            found["X-Scope-OrgID"] = told.org
        secret = _secret(told)
        if told.user is not None:
            found["Authorization"] = "Basic " + base64.b64encode(f"{told.user}:{secret or ''}".encode()).decode()
        elif secret is not None:
            found["Authorization"] = f"Bearer {secret}"
        return found


async def _aside(work: Callable[[], T]) -> T:
    """`work` on a daemon thread: a server that hangs must not keep the console from closing, as a pool's would."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:
            failed = error
        try:
            loop.call_soon_threadsafe(tell, result, failed)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    threading.Thread(target=run, name="ask Prometheus", daemon=True).start()
    return await done


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(ca_file: str | None) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SourceError(f"ca_file {clean(str(ca_file))} cannot be used: {clean(str(error))}", slow=True) from None
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirect())


def _secret(told: Prometheus) -> str | None:
    """Read anew each time: tokens are rotated. Never part of a message."""
    if told.token_env:
        found = os.environ.get(told.token_env, "")
        where = f"the environment variable {clean(told.token_env)}"
    elif told.token_file:
        where = f"token_file {clean(told.token_file)}"
        try:
            with Path(told.token_file).open("rb") as file:
                found = file.read(MOST_SECRET).decode("ascii", "replace")
        except OSError as error:
            raise SourceError(f"{where} cannot be read: {error.strerror}", slow=True) from None
    else:
        return None
    found = found.strip()
    if not found or not found.isascii() or not found.isprintable():
        raise SourceError(f"{where} holds no token", slow=True)
    return found


def _bounded(reply: Any, ends: float, most: int) -> bytes:
    """The body, at most `most` bytes and all of it by `ends`."""
    pieces, size = [], 0
    told = reply.headers.get("Content-Length", "")
    while piece := reply.read1(PIECE):
        size += len(piece)
        pieces.append(piece)
        if size > most:
            raise SourceError(f"the answer is larger than {most >> 20} MiB", slow=True)
        if time.monotonic() > ends:
            raise TimeoutError
    if told.isdigit() and int(told) != size:
        raise SourceError("the answer breaks off")
    return b"".join(pieces)


def _refused(error: urllib.error.HTTPError, ends: float) -> SourceError:
    """What an HTTP status means, with Prometheus's own words where it gave any."""
    code = error.code
    if code in (301, 302, 303, 307, 308):
        where = clean(error.headers.get("Location", "") or "elsewhere")
        return SourceError(f"the server redirects to {where}: name that address as the url", slow=True)
    words = _words(error, ends)
    known = {
        401: "the server wants a login (401): name a token_file or token_env, or check the token",
        403: "the server does not allow this login to read (403)",
        404: "the server has no such address (404): is this the API's base URL?",
        405: "the server does not take queries here (405): is this the API's base URL?",
        503: "Prometheus is not ready (503)",
    }
    text = known.get(code) or (
        f"Prometheus does not take the query ({code})" if code in (400, 422) else f"the server answers {code}"
    )
    return SourceError(f"{text}: {words}" if words else text, slow=code in (400, 401, 403, 404, 405, 422))


def _words(error: IO[bytes], ends: float) -> str:
    try:
        reply = _REPLY.decode(_bounded(error, ends, 1 << 20))
    except (SourceError, OSError, http.client.HTTPException, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return clean(reply.error)


def _unreached(error: object, timeout_s: float) -> SourceError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return SourceError(
            f"the server's certificate is not trusted: {clean(error.verify_message)}; name its ca_file", slow=True
        )
    if isinstance(error, TimeoutError):
        return SourceError(f"no whole answer within {timeout_s:.0f} s")
    if isinstance(error, ConnectionRefusedError):
        return SourceError("nothing listens there (connection refused)")
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionResetError):
        return SourceError("the answer breaks off")
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"the server cannot be reached: {clean(error.strerror)}")
    return SourceError(f"the server's answer is no HTTP: {clean(str(error))}")
