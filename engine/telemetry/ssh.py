"""A node over SSH: one kept connection, one streaming probe, strict host keys. The only module that loads asyncssh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from engine.telemetry.keeper import Keeper
from engine.telemetry.loader import probe_command, probe_payload
from engine.telemetry.reading import Result
from engine.telemetry.session import Session
from engine.telemetry.shell.loader import AMD_TOOLS, TOOLS, Overheard, look_command, shell_command, shell_payload
from engine.telemetry.shell.reader import ShellSession, not_there
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff, SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer
from engine.telemetry.text import clean

CONNECT_S = 10.0
KEEPALIVE_S, KEEPALIVE_MISSED = 1.0, 3
FORGET_S = 600.0
# AES-GCM takes about a quarter less processor time a line than the default.
CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes256-ctr",
    "aes128-ctr",
)
AT_ONCE, JUMPED_AT_ONCE = 64, 8
"""Connections set up at the same time, and through one jump host: its sshd's MaxStartups drops more."""


@dataclass
class Way:
    """What all nodes of a cluster share: files, the jump host's one connection, and the gate for set-ups."""

    known_hosts: Path
    identity: Path | None = None
    config: Path | None = None
    jump: str | None = None
    gate: asyncio.Semaphore = field(init=False)
    _jump_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _jump_connection: asyncssh.SSHClientConnection | None = None
    _read: dict[Path, tuple[float, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = asyncio.Semaphore(JUMPED_AT_ONCE if self.jump else AT_ONCE)

    def _once(self, path: Path, read: Callable[[str], Any]) -> Any:
        """What a file holds, read again only when it changed: a thousand nodes share it."""
        changed = path.stat().st_mtime
        if path not in self._read or self._read[path][0] != changed:
            self._read[path] = (changed, read(str(path)))
        return self._read[path][1]

    def options(self) -> dict[str, Any]:
        """Options of every connection."""
        found: dict[str, Any] = {
            "known_hosts": self._once(self.known_hosts, asyncssh.read_known_hosts),
            "config": [str(self.config)] if self.config and self.config.is_file() else [],
            "encryption_algs": CIPHERS,
            "keepalive_interval": KEEPALIVE_S,
            "keepalive_count_max": KEEPALIVE_MISSED,
            "connect_timeout": CONNECT_S,
            "login_timeout": CONNECT_S,
        }
        if self.identity is not None:
            found["client_keys"] = self._once(self.identity, lambda path: asyncssh.load_keypairs([path]))
        return found

    async def tunnel(self) -> asyncssh.SSHClientConnection | None:
        """The jump host's connection, opened once and again when it broke."""
        if self.jump is None:
            return None
        async with self._jump_lock:
            if self._jump_connection is None or self._jump_connection.is_closed():
                user, _, host = self.jump.rpartition("@")
                options = self.options() | ({"username": user} if user else {})
                self._jump_connection = await asyncssh.connect(host, **options)
            return self._jump_connection


class _Witness(asyncssh.SSHClient):
    """Sees the key of a host that known_hosts does not vouch for; never accepts it."""

    def __init__(self) -> None:
        self.fingerprint = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.fingerprint = key.get_fingerprint()
        return False


class _Incoming:
    """A channel's incoming bytes for readers that know no SSH: a lost connection is a ConnectionError."""

    def __init__(self, reader: asyncssh.SSHReader[bytes]) -> None:
        self._reader = reader

    async def read(self, n: int, /) -> bytes:
        try:
            return await self._reader.read(n)
        except asyncssh.Error as error:
            raise ConnectionError(error.reason) from None


class SshSource:
    """One node. `run` keeps it connected; commands and job sockets go over the same connection."""

    def __init__(self, name: str, host: str, port: int, username: str | None, way: Way, interval_s: float) -> None:
        self.name = name
        self._host, self._port, self._username = host, port, username
        self._way, self._interval_s = way, interval_s
        self._connection: asyncssh.SSHClientConnection | None = None
        self._session: Session | ShellSession | None = None
        self._instead: tuple[str, str] | None = None
        self._cut = time.monotonic()

    @property
    def address(self) -> str:
        user = f"{self._username}@" if self._username else ""
        return f"{user}{self._host}:{self._port}"

    async def run(self, store: Store) -> None:
        """Connect, read, and come back after whatever happens."""
        backoff = Backoff()
        while True:
            try:
                await self._once(store, backoff)
                trouble = SourceError("the probe ended without a word")
            except SourceError as error:
                trouble = error
            except (asyncssh.Error, OSError) as error:
                trouble = self._explain(error)
            state = NodeState.ERROR if trouble.slow else NodeState.DOWN
            store.set_state(self.name, state, clean(str(trouble), 400), time.time())
            await asyncio.sleep(backoff.next_s(trouble.slow))

    async def _once(self, store: Store, backoff: Backoff) -> None:
        if not self._way.known_hosts.is_file():
            raise SourceError(
                f"there is no known_hosts file {self._way.known_hosts}; host keys are always checked. Log in once with "
                f"ssh {self.address} to record the node's key, or name the file under ssh: known_hosts",
                slow=True,
            )
        witness = _Witness()
        async with self._way.gate:
            tunnel = await self._way.tunnel()
            options = self._way.options() | ({"username": self._username} if self._username else {})
            try:
                connection, _ = await asyncssh.create_connection(
                    lambda: witness, self._host, self._port, tunnel=tunnel, **options
                )
            except asyncssh.HostKeyNotVerifiable:
                raise self._wrong_key(witness.fingerprint) from None
        async with connection:
            self._connection = connection
            try:
                await self._poll(connection, store, backoff)
            finally:
                self._connection = None

    async def _poll(self, connection: asyncssh.SSHClientConnection, store: Store, backoff: Backoff) -> None:
        """Read through the Python probe, or where that cannot be through the tools that are there. What was found is
        remembered for the next connection, unless the way back took so long that the node may be another."""
        if time.monotonic() - self._cut > FORGET_S:
            self._instead = None
        try:
            if self._instead is None:
                self._instead = await self._probe(connection, store, backoff)
            await self._shell(connection, store, backoff, *self._instead)
        finally:
            self._cut = time.monotonic()

    async def _probe(self, connection: asyncssh.SSHClientConnection, store: Store, backoff: Backoff) -> tuple[str, str]:
        """Run the probe. Returns, where it cannot run, why, and what it is not worth to try instead."""

        async def others(trouble: str) -> bool:
            names = TOOLS if trouble.startswith("the module") else AMD_TOOLS
            try:
                return (await connection.run(look_command(names), timeout=CONNECT_S)).exit_status == 0
            except (asyncssh.Error, OSError, TimeoutError):
                return False

        process = await connection.create_process(probe_command(), encoding=None, stderr=asyncssh.PIPE)
        heard = Overheard(process.stdout, others)
        session = Session(self.name, heard, process.stdin, store)
        status, words = await self._run(process, session, probe_payload(self._interval_s, self.name), backoff, heard)
        if heard.instead:
            return heard.instead, "" if heard.instead.startswith("the module") else TOOLS[0]
        if not session.greeted:
            if status == 127 or "python3: not found" in words or "python3': No such file" in words:
                looked = "looked in the login's PATH, /usr/bin, /usr/local/bin, /bin"
                return f"there is no python3 on {self._host} ({looked}; install Python 3.6 or newer there)", ""
            if "rackside needs Python" in words or "has no attribute 'buffer'" in words:
                return f"Python on {self._host} is too old: {words}", ""
        raise self._ended(status, words, session.greeted)

    async def _shell(
        self, connection: asyncssh.SSHClientConnection, store: Store, backoff: Backoff, because: str, skip: str
    ) -> None:
        """Run the shell reader. When it ends by itself, Python is tried again first."""
        process = await connection.create_process(shell_command(), encoding=None, stderr=asyncssh.PIPE)
        keeper = Keeper(self.name, lambda: _python(connection)) if skip or because.startswith("the module") else None
        session = ShellSession(self.name, process.stdout, store, self._interval_s, because, keeper)
        payload = shell_payload(self._interval_s, self.name, skip)
        status, words = await self._run(process, session, payload, backoff)
        if status is not None:
            self._instead = None
        if session.state.refusal:
            raise SourceError(session.state.refusal, slow=True)
        if not session.greeted or session.state.reader == "none":
            raise not_there(because)
        raise self._ended(status, words, True)

    async def _run(
        self,
        process: asyncssh.SSHClientProcess[bytes],
        session: Session | ShellSession,
        payload: bytes,
        backoff: Backoff,
        heard: Overheard | None = None,
    ) -> tuple[int | None, str]:
        """A reader on the node until it ends: its exit status, and what it said on the way."""
        complaints = asyncio.create_task(_last_of(process.stderr))
        try:
            process.stdin.write(payload)
            del payload  # 60 KB that a thousand nodes need not keep
            self._session = session
            await session.run()
            if session.greeted:
                backoff.reset()
            if heard is not None and heard.instead:
                return None, ""
            await asyncio.wait_for(process.wait_closed(), 3)
            return process.exit_status, await complaints or clean(session.noise.decode("utf-8", "replace"))
        except TimeoutError:
            raise SourceError(f"{self.address} closed the probe's channel") from None
        finally:
            self._session = None
            complaints.cancel()
            process.close()

    def _ended(self, status: int | None, words: str, greeted: bool) -> SourceError:
        """Why a probe ended, from its exit status and what it said."""
        if greeted:
            return SourceError(
                f"the connection to {self.address} was lost"
                if status is None
                else f"the probe ended: {words or status}"
            )
        said = f": {words}" if words else f" (exit status {status})"
        return SourceError(f"the probe did not start on {self._host}{said}", slow=True)

    def _wrong_key(self, fingerprint: str) -> SourceError:
        """Unknown and changed host keys are different things: the second may be an attack."""
        file = self._way.known_hosts
        host = self._host if self._port == 22 else f"[{self._host}]:{self._port}"
        try:
            trusted = asyncssh.read_known_hosts(str(file)).match(self._host, "", self._port)[0]
        except (OSError, ValueError):
            trusted = []
        if trusted:
            return SourceError(
                f"the host key of {host} has CHANGED to {fingerprint}; {file} holds another. Refused: a re-installed "
                f"node, or an attack. If you know why, remove the old one: ssh-keygen -R '{host}' -f {file}",
                slow=True,
            )
        return SourceError(
            f"the host key of {host} is not known ({fingerprint}). Check it and add it: "
            f"ssh-keyscan -p {self._port} {self._host} >> {file}",
            slow=True,
        )

    def _explain(self, error: Exception) -> SourceError:
        """What went wrong on the way, in a sentence."""
        if isinstance(error, asyncssh.PermissionDenied):
            tried = str(self._way.identity) if self._way.identity else "the agent and the default keys"
            return SourceError(f"{self.address} refused the login (tried {tried}); check user and key", slow=True)
        if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError):
            return SourceError(f"the key {self._way.identity} cannot be used: {error}", slow=True)
        if isinstance(error, ConnectionRefusedError):
            return SourceError(f"no SSH server answers at {self.address} (connection refused)")
        if isinstance(error, TimeoutError):
            return SourceError(f"{self.address} does not answer within {CONNECT_S:.0f} s")
        if isinstance(error, asyncssh.ConnectionLost | ConnectionResetError):
            return SourceError(f"the connection to {self.address} was lost")
        if isinstance(error, asyncssh.Error):
            return SourceError(f"SSH to {self.address} failed: {error.reason}")
        return SourceError(f"{self.address} cannot be reached: {getattr(error, 'strerror', None) or error}")

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Send a command to the node's probe."""
        if self._session is None:
            return Result(str(command["id"]), "failed", f"there is no connection to {self.address} now")
        return await self._session.command(command, timeout_s)

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        """A channel to a hook's socket on the node; no port is opened."""
        if self._connection is None:
            raise SourceError(f"there is no connection to {self.address} now")
        try:
            reader, writer = await self._connection.open_unix_connection(path, encoding=None)
        except (asyncssh.Error, OSError) as error:
            why = error.reason if isinstance(error, asyncssh.Error) else str(error)
            raise SourceError(f"the job's socket {clean(path)} on {self._host} does not open: {clean(why)}") from None
        return _Incoming(reader), writer


async def _python(
    connection: asyncssh.SSHClientConnection,
) -> tuple[Reader, Writer, Callable[[], None]]:
    """Python on the node, that waits for a program."""
    try:
        process = await connection.create_process(probe_command(), encoding=None, stderr=asyncssh.DEVNULL)
    except asyncssh.Error as error:
        raise SourceError(f"no program can be started there: {error.reason}") from None
    return _Incoming(process.stdout), process.stdin, process.close


async def _last_of(stderr: asyncssh.SSHReader[bytes]) -> str:
    """The last line a program wrote to standard error, cleaned; reads on so that the program never blocks."""
    kept = b""
    while data := await stderr.read(4096):
        kept = (kept + data)[-2000:]
    lines = [line for line in kept.decode("utf-8", "replace").splitlines() if line.strip()]
    return clean(lines[-1], 200) if lines else ""
