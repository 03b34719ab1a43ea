"""A console in a browser: a real server, a real request, a real websocket, a real node behind it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.parts.sshd import free_port
from tests.parts.waiting import until
from tui.cli import main
from tui.serve import command, said

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve", reason="textual-serve is not installed: the extra `serve`")


@asynccontextmanager
async def serving(inventory: Path) -> AsyncIterator[str]:
    """The command, until the test is done with it; the address where it is."""
    listen = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "tui.cli", "serve", "--cluster", str(inventory), "--listen", listen]
    server = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE, env=dict(os.environ))
    assert server.stderr is not None
    try:
        line = (await asyncio.wait_for(server.stderr.readline(), 60)).decode()
        assert f"http://{listen}, read-only; there is no login" in line
        yield listen
    finally:
        server.send_signal(signal.SIGINT)
        await asyncio.wait_for(server.wait(), 30)
    assert server.returncode == 0


async def answered(session: aiohttp.ClientSession, url: str, **headers: str) -> aiohttp.ClientResponse:
    for _ in range(200):  # it says where it is a moment before it listens
        try:
            return await session.get(url, headers=headers)
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)
    raise AssertionError(f"{url} does not answer")


async def test_a_browser_gets_a_page_and_a_console_that_only_looks(inventory: Path) -> None:
    async with serving(inventory) as listen, aiohttp.ClientSession() as session:
        page = await answered(session, f"http://{listen}/")
        assert page.status == 200
        assert f"ws://{listen}/ws" in await page.text()
        assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        headers = {"Origin": f"http://{listen}"}
        async with session.ws_connect(f"ws://{listen}/ws?width=100&height=30", headers=headers) as socket:
            seen = ""

            async def shows(text: str) -> None:
                nonlocal seen
                async with asyncio.timeout(60):
                    while text not in seen:
                        message = await socket.receive()
                        assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
                        if isinstance(message.data, bytes):
                            seen += message.data.decode(errors="replace")

            await socket.send_json(["resize", {"width": 100, "height": 30}])
            await shows("1/1")
            await socket.send_json(["stdin", "a"])
            await shows("--read-only")


async def test_ctrl_c_does_not_wait_for_browsers_and_leaves_no_console(inventory: Path) -> None:
    async with aiohttp.ClientSession() as session:
        async with serving(inventory) as listen:
            await answered(session, f"http://{listen}/")
            socket = await session.ws_connect(f"ws://{listen}/ws?width=100&height=30")
            message = await socket.receive(60)
            assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT)
            reading = asyncio.create_task(until_closed(socket))
        await asyncio.wait_for(reading, 30)
    await until(lambda: not consoles(inventory), 30, "the visitor's console has ended")


async def until_closed(socket: aiohttp.ClientWebSocketResponse) -> None:
    async for _ in socket:
        pass


def consoles(inventory: Path) -> list[str]:
    """Processes of consoles on this inventory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            found += [path.parent.name] if "console" in words and str(inventory) in words else []
    return found


async def test_other_sites_are_refused(inventory: Path) -> None:
    """Neither a name that leads here nor a page of another site reads the console."""
    async with serving(inventory) as listen, aiohttp.ClientSession() as session:
        assert (await answered(session, f"http://{listen}/", Host="evil.example")).status == 403
        assert (await answered(session, f"http://{listen}/", Origin="https://evil.example")).status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"ws://{listen}/ws", headers={"Origin": "https://evil.example"})
        assert refused.value.status == 403


async def test_an_address_that_is_taken_is_a_sentence(inventory: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        words = [sys.executable, "-m", "tui.cli", "serve", "--cluster", str(inventory), "--listen", f"127.0.0.1:{port}"]
        server = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(server.communicate(), 60)
        assert server.returncode == 2
        assert f"127.0.0.1:{port} cannot be listened on" in told.decode()
        assert "Traceback" not in told.decode()


def test_without_textual_serve_a_sentence_says_what_to_install(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    monkeypatch.delitem(sys.modules, "tui.web", raising=False)
    assert main(["serve", "--cluster", str(inventory)]) == 2
    assert "pip install 'rackside[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--cluster", "h200x32"], "no address"),
        (["--cluster", "h200x32", "--listen", "here"], "is no address to listen on"),
        (["--cluster", "h200x32", "--listen", "rack.example:80"], "is no address of this machine"),
    ],
)
def test_mistakes_are_sentences(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *more]) == 2
    assert says in capsys.readouterr().err


def test_what_is_said_of_an_address() -> None:
    assert "everybody on this machine can look" in said("127.0.0.1", 8000)
    assert "http://[::]:8000" in said("::", 8000)
    assert "there is no login: everybody who reaches this address can look" in said("0.0.0.0", 8000)


def test_every_visitor_gets_a_read_only_console_whatever_the_file_is_called() -> None:
    words = command(argparse.Namespace(cluster="a b; rm -rf.yaml", ascii=True))
    assert words.endswith("console --cluster 'a b; rm -rf.yaml' --read-only --ascii")
