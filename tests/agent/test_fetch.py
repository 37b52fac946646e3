"""The small HTTP client that an agent looks at its engine with."""

from __future__ import annotations

import asyncio

import pytest
from ports import own_port

from gpuroute.agent.fetch import GONE, SILENT, Reply, fetch


def fetched(*answers: bytes, path: str = "/x", **options: object) -> tuple[Reply, bytes]:
    """What is made of a server's answer, which may come in pieces, and what the server was asked."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"\r\n\r\n"))
        for answer in answers:
            writer.write(answer)
            await writer.drain()
            await asyncio.sleep(0.02)
        if answers:
            writer.close()

    async def main() -> Reply:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await fetch(f"http://127.0.0.1:{port}/base", path, **{"timeout": 60.0, **options})
        finally:
            server.close()

    return asyncio.run(main()), bytes(got)


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", Reply(200, b"abc")),
        (
            b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
            Reply(503, b"abcde"),
        ),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", Reply(200, b"to the end")),
        (b"HTTP/1.1 204 None\r\ncontent-length: 0\r\n\r\n", Reply(204, b"")),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", SILENT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabc", SILENT),
        (b"SSH-2.0-OpenSSH\r\n\r\n", SILENT),
        (b"\r\n\r\n", SILENT),
    ],
)
def test_answers(answer: bytes, reply: Reply) -> None:
    assert fetched(answer)[0] == reply


def test_the_request_is_what_it_should_be() -> None:
    _, got = fetched(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", path="/path", headers={"authorization": "Bearer x"})
    lines = got.decode().split("\r\n")
    assert lines[0] == "GET /base/path HTTP/1.1"
    assert {"Connection: close", "authorization: Bearer x"} <= set(lines)
    _, got = fetched(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", body={"a": 1})
    assert got.startswith(b"POST /base/x HTTP/1.1")


def test_silence_and_absence_differ() -> None:
    assert fetched(timeout=0.1)[0] == SILENT

    assert asyncio.run(fetch(f"http://127.0.0.1:{own_port()}", "/", timeout=60.0)) == GONE


def test_a_page_that_ends_with_its_connection_is_read_to_the_end() -> None:
    head, page = b"HTTP/1.0 200 OK\r\n\r\n", [b"a 1\n" * 1_000, b"b 2\n" * 1_000, b"c 3\n"]
    assert fetched(head, *page)[0] == Reply(200, b"".join(page))


@pytest.mark.parametrize(
    "head", [b"Transfer-Encoding: chunked\r\n\r\n7fffffff\r\n", b"Content-Length: 99999999999\r\n\r\n"]
)
def test_a_length_that_cannot_be_is_not_waited_for(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.agent.fetch.MAX_BODY", 1000)
    assert len(fetched(b"HTTP/1.1 200 OK\r\n" + head + b"x" * 50_000)[0].body) == 1000


def test_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuroute.agent.fetch.MAX_BODY", 1000)
    assert len(fetched(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 50_000)[0].body) <= 1000
