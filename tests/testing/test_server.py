"""GpuServer in process: interfaces, timing, the wire, and every order a test can give."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import openai
import pytest
import trustme
from stopwatch import Stopwatch

from gpuroute import ConfigError
from gpuroute.testing import GpuServer, answer, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_S = 60.0
TRIES = 50
COMPLETION = {"model": "m", "prompt": "Once upon a time", "max_tokens": 6}
ENDLESS = {**COMPLETION, "max_tokens": 10_000, "stream": True}  # when it is slow: for half an hour


def to(server: GpuServer, **options: Any) -> httpx2.Client:
    """A client of a server, with patience: it also keeps its connections while the machine stands still."""
    kept = httpx2.Limits(keepalive_expiry=PATIENCE_S)
    return httpx2.Client(**{"base_url": server.url, "timeout": PATIENCE_S, "limits": kept, **options})


@pytest.fixture
def server() -> Iterator[GpuServer]:
    with GpuServer(time_scale=0.02) as running:
        yield running


@pytest.fixture
def client(server: GpuServer) -> Iterator[httpx2.Client]:
    with to(server) as running:
        yield running


def complete(client: httpx2.Client, **changes: Any) -> httpx2.Response:
    return client.post("/v1/completions", json={**COMPLETION, **changes})


def sse(response: httpx2.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# ---------------------------------------------------------------------------------------------------- interfaces


def test_completion_and_its_stream_say_the_same(client: httpx2.Client) -> None:
    whole = complete(client)
    assert whole.json()["choices"][0]["text"] == answer("Once upon a time", 6)
    assert whole.json()["usage"] == {
        "prompt_tokens": 4,
        "total_tokens": 10,
        "completion_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    events = sse(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(event["choices"][0]["text"] for event in events[:6]) == answer("Once upon a time", 6)
    assert [event["choices"][0]["finish_reason"] for event in events[:6]] == [None] * 5 + ["length"]
    assert (events[6]["choices"], events[6]["usage"]["completion_tokens"], events[7]) == ([], 6, "[DONE]")


def test_stream_interval_packs_tokens_after_the_first() -> None:
    with GpuServer(stream_interval=4, time_scale=0.0) as server, to(server) as client:
        events = sse(complete(client, stream=True, max_tokens=10))[:-1]
    texts = [event["choices"][0]["text"] for event in events]
    assert [len(part.encode()) // 4 for part in texts] == [1, 4, 4, 1]
    assert "".join(texts) == answer("Once upon a time", 10)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]


def test_openai_sdk(server: GpuServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(model="m", messages=messages, max_tokens=9)  # type: ignore[arg-type]
        with sdk.chat.completions.create(model="m", messages=messages, max_tokens=9, stream=True) as stream:  # type: ignore[arg-type]
            chunks = [chunk.choices[0] for chunk in stream]
        vectors = sdk.embeddings.create(model="m", input=["a", "b", "a"], dimensions=5).data
        assert [model.object for model in sdk.models.list()] == ["model"]
    assert whole.choices[0].message.content == answer(text.render_chat(messages), 9)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert (chunks[0].delta.role, chunks[-1].finish_reason) == ("assistant", "length")
    assert len(vectors[0].embedding) == 5
    assert vectors[0].embedding == vectors[2].embedding != vectors[1].embedding


def test_anthropic_sdk(server: GpuServer) -> None:
    asked: dict[str, Any] = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]}
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as sdk:
        whole = sdk.messages.create(**asked)
        with sdk.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        prefill = [*asked["messages"], {"role": "assistant", "content": streamed[:8]}]
        rest = sdk.messages.create(model="m", max_tokens=5, messages=prefill)
    assert whole.content[0].text == streamed == streamed[:8] + rest.content[0].text  # type: ignore[union-attr]
    assert (whole.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, 7)


def test_continue_final_message_goes_on_where_it_was_left(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "tell me"}]
    whole = client.post("/v1/chat/completions", json={"messages": messages}).json()
    said = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    body = {
        "messages": [*messages, {"role": "assistant", "content": said[:12]}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    rest = client.post("/v1/chat/completions", json=body).json()
    assert said[:12].encode() + rest["choices"][0]["message"]["content"].encode() == said.encode()
    assert rest["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert client.post("/v1/chat/completions", json={**body, "add_generation_prompt": True}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", b"{", "not JSON"),
        ("/v1/completions", b"[1]", "JSON object"),
        ("/v1/completions", b"{}", "a text or a list of token ids"),
        ("/v1/completions", b'{"prompt": ["a", "b"]}', "takes one prompt"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', "at least 1"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": true}', "at least 1"),
        ("/v1/completions", b'{"prompt": "a", "n": 2}', "n must be 1"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 999999}', "max_model_len"),
        ("/v1/chat/completions", b'{"messages": []}', "at least one message"),
        ("/v1/chat/completions", b'{"messages": ["a"]}', "at least one message"),
        ("/v1/messages", b'{"messages": [{"role": "user", "content": "a"}]}', "max_tokens"),
    ],
)
def test_bad_bodies_are_refused_in_the_interface_s_words(
    client: httpx2.Client, server: GpuServer, path: str, body: bytes, said: str
) -> None:
    response = client.post(path, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, 400)
    assert said in response.json()["error"]["message"]
    assert server.state()["rejected"] == 1


def test_token_ids_and_unknown_models_and_paths() -> None:
    with GpuServer(model="llama", time_scale=0) as server, to(server) as client:
        ids = client.post("/v1/completions", json={"prompt": [1, 2, 3], "model": "llama"}).json()
        assert ids["usage"]["prompt_tokens"] == 3
        refused = client.post("/v1/completions", json={"prompt": "a", "model": "nope"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
        assert client.get("/nope").status_code == 404
        assert client.get("/v1/models").json()["data"][0]["id"] == "llama"


# ------------------------------------------------------------------------------------------- load, cache, timing


def test_load_is_reported_as_vllm_reports_it(client: httpx2.Client, server: GpuServer) -> None:
    form = "endpoint-load-metrics-format"
    orca = client.post("/v1/completions", json=COMPLETION, headers={form: "JSON"}).headers["endpoint-load-metrics"]
    named = json.loads(orca.removeprefix("JSON "))["named_metrics"]
    assert set(named) == {"num_requests_waiting", "kv_cache_usage_perc"}
    text_form = client.post("/v1/completions", json=COMPLETION, headers={form: "TEXT"})
    assert text_form.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.num_requests_waiting=0.0, ")
    for body, wanted in (({**COMPLETION, "stream": True}, "JSON"), (COMPLETION, "BIN")):
        response = client.post("/v1/completions", json=body, headers={form: wanted})
        assert "endpoint-load-metrics" not in response.headers
    assert "endpoint-load-metrics" not in complete(client).headers
    server.hang()
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}):
        assert client.get("/load").json() == {"server_load": 1}
        page = client.get("/metrics").text
    assert 'vllm:num_requests_waiting{engine="0",model_name="stand-in"} 1.0' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="stand-in"} 30.0' in page
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="stand-in"} 5.0' in page


def test_a_repeated_prefix_is_cached_and_answered_sooner(client: httpx2.Client) -> None:
    prompt = "the same long beginning " * 400
    fresh = complete(client, prompt=prompt).json()["usage"]
    again = complete(client, prompt=prompt + "and more").json()["usage"]
    assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 2400
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="stand-in"} 2400.0' in client.get("/metrics").text


def timed(client: httpx2.Client, **changes: Any) -> Stopwatch:
    with Stopwatch() as watch:
        assert complete(client, **changes).status_code == 200
    return watch


def test_time_follows_the_step_model_and_its_scale() -> None:
    """60 tokens take 60 steps of 8.5 ms on an idle H100, a tenth of that here, and never less."""
    with GpuServer(time_scale=0.1) as server, to(server) as client:
        for factor in (1, 4):
            server.slow(factor)
            watches = [timed(client, max_tokens=60)]
            while (
                watches[-1].seconds >= 0.2 * factor and len(watches) < TRIES
            ):  # busy machines: now and then they are not
                watches.append(timed(client, max_tokens=60))
            assert min(watch.wall for watch in watches) >= 0.05 * factor
            assert watches[-1].seconds < 0.2 * factor


def test_scale_zero_answers_at_once() -> None:
    with GpuServer(gpu="V100", time_scale=0) as server, to(server) as client:
        complete(client)
        assert any(timed(client, max_tokens=300).seconds < 0.3 for _ in range(TRIES))  # 8 s on the real thing


# ---------------------------------------------------------------------------------------------------- the wire


def test_target_headers_and_body_are_kept_byte_for_byte(client: httpx2.Client, server: GpuServer) -> None:
    body = b'{ "prompt" : "\\u00e9\xc3\xa9",\n "max_tokens":1}'
    client.post("/v1/completions?a=%2F&b", content=body, headers={"X-Odd": "Value", "x-request-id": "r1"})
    seen = server.last_request
    assert (seen.target, seen.body) == (b"/v1/completions?a=%2F&b", body)
    assert (b"X-Odd", b"Value") in seen.headers
    assert seen.header("x-odd") == "Value"
    assert seen.header("absent") is None


def test_chunked_bodies_and_keep_alive(client: httpx2.Client, server: GpuServer) -> None:
    raw = json.dumps(COMPLETION).encode()
    response = client.post("/v1/completions", content=iter([raw[:5], raw[5:9], raw[9:]]))
    assert response.status_code == 200
    assert server.last_request.header("transfer-encoding") == "chunked"
    assert server.last_request.body == raw
    complete(client)
    assert len({request.connection for request in server.requests}) == 1


def exchange(server: GpuServer, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
        received = b""
        with suppress(ConnectionError):  # which a close is if the server has not read all
            raw.sendall(data)
        with suppress(ConnectionResetError):
            while part := raw.recv(65536):
                received += part
        return received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / SPDY/3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000, 431),
    ],
)
def test_what_is_not_http_is_refused_and_closed(server: GpuServer, data: bytes, status: int) -> None:
    assert exchange(server, data).split(b" ")[1] == b"%d" % status


def test_head_has_no_body(client: httpx2.Client) -> None:
    for _ in range(2):
        response = client.head("/metrics")
        assert (response.status_code, response.content) == (200, b"")
        assert int(response.headers["content-length"]) > 1000


def test_pipelined_requests_are_answered_in_turn(server: GpuServer) -> None:
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.0\r\n\r\n"
    received = exchange(server, get + get + last)
    assert received.count(b'{"version":"0.32.0"}') == 2
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_hanging_up_as_llama_cpp_does() -> None:
    with GpuServer(keepalive_requests=2, time_scale=0.0) as server, to(server) as client:
        while len(server.requests) < 4:
            with suppress(httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):  # it was quicker
                complete(client)
        assert [request.connection for request in server.requests][::2] != [server.requests[0].connection] * 2
    with GpuServer(keepalive_s=0.05, time_scale=0.0) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
            assert raw.recv(1) == b""  # closed by the server, having said nothing


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    ca = trustme.CA()
    cert = ca.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / f"{name}.pem") for name in ("certfile", "keyfile", "client_ca")}
    cert.cert_chain_pems[0].write_to_path(files["certfile"])
    cert.private_key_pem.write_to_path(files["keyfile"])
    ca.cert_pem.write_to_path(files["client_ca"])
    context = ssl.create_default_context()
    ca.configure_trust(context)
    with GpuServer(**files, time_scale=0.0) as server:
        assert server.url.startswith("https://")
        with to(server, verify=context) as stranger, pytest.raises(httpx2.TransportError):
            stranger.get("/health")
        ca.issue_cert("client.test").configure_cert(context)
        with to(server, verify=context) as client:
            assert complete(client).status_code == 200


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("gpu", "B52", "unknown GPU 'B52'"),
        ("gpu", None, "unknown GPU"),
        ("time_scale", -1, "a number from 0"),
        ("time_scale", float("nan"), "a number from 0"),
        ("time_scale", "1", "a number from 0"),
        ("startup_s", -0.1, "a number from 0"),
        ("slowdown", 0, "a number above 0"),
        ("port", 70_000, "at most 65535"),
        ("max_num_seqs", 0, "a whole number from 1"),
        ("max_queued", -1, "a whole number from 0"),
        ("stream_interval", True, "a whole number from 1"),
    ],
)
def test_options_that_cannot_be_are_named_before_anything_starts(option: str, value: object, expected: str) -> None:
    for make in (GpuServer, GpuServer.spawn):
        with pytest.raises(ConfigError, match=expected) as caught:
            make(**{option: value})
        assert str(caught.value).startswith(f"{option}={value!r}: ")
        with pytest.raises(TypeError, match=r"unknown option 'time_scal' of a GpuServer \(did you mean time_scale\?\)"):
            make(time_scal=1.0)


def test_a_url_prefix(server: GpuServer) -> None:
    with GpuServer(prefix="/engine/7", time_scale=0.0) as prefixed, httpx2.Client(timeout=PATIENCE_S) as client:
        assert client.get(prefixed.url + "/health").status_code == 200
        assert client.get(prefixed.url.removesuffix("/engine/7") + "/health").status_code == 404


# ----------------------------------------------------------------------------------------------------- orders


def test_answer_as_ordered_and_only_so_often(client: httpx2.Client, server: GpuServer) -> None:
    server.answer(429, headers={"Retry-After": "3"}, count=2)
    server.answer(503, body="Exceeds maximum queue size", count=1)
    responses = [complete(client) for _ in range(4)]
    assert [response.status_code for response in responses] == [429, 429, 503, 200]
    assert responses[0].headers["retry-after"] == "3"
    assert responses[2].text == "Exceeds maximum queue size"
    server.answer(418, path="/health")
    assert client.get("/health").status_code == 418
    assert complete(client).status_code == 200
    server.resume()
    assert client.get("/health").status_code == 200
    assert (server.state()["answered"], server.state()["finished"]) == (3, 2)
    with pytest.raises(ValueError, match="count must be at least 1"):
        server.answer(500, count=0)


def test_delayed_answers(client: httpx2.Client, server: GpuServer) -> None:
    server.answer(500, delay=0.1)
    started = time.monotonic()
    assert complete(client).status_code == 500
    assert time.monotonic() - started >= 0.1


@pytest.mark.parametrize("reset", [False, True])
def test_drop_in_mid_stream(client: httpx2.Client, server: GpuServer, reset: bool) -> None:
    server.drop_mid_stream(3, count=1, reset=reset)
    with pytest.raises(httpx2.TransportError):
        complete(client, stream=True)
    assert complete(client, stream=True).text.endswith("[DONE]\n\n")
    assert (server.state()["dropped"], server.state()["live"]) == (1, 0)


def test_exactly_the_ordered_events_leave_before_the_drop(server: GpuServer) -> None:
    server.drop_mid_stream(3)
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert exchange(server, head + body).count(b"data: ") == 3


@pytest.mark.parametrize(("stream", "after"), [(False, 0), (True, 0), (False, 5)])
def test_drop_before_or_inside_a_whole_answer(client: httpx2.Client, server: GpuServer, stream: bool, after: int) -> None:
    server.drop_mid_stream(after, count=1)
    with pytest.raises(
        httpx2.RemoteProtocolError, match="without sending a response" if not after else "complete message"
    ):
        complete(client, stream=stream)
    assert complete(client).status_code == 200


def test_stall_keeps_the_connection_open(server: GpuServer) -> None:
    server.stall_mid_stream(2, count=1)
    with to(server, timeout=httpx2.Timeout(PATIENCE_S, read=1.0)) as client:
        with pytest.raises(httpx2.ReadTimeout):
            complete(client, stream=True)
    with to(server) as client:
        assert complete(client).status_code == 200


def test_a_hung_engine_looks_healthy_and_finishes_after_resume(
    client: httpx2.Client, server: GpuServer, eventually: Callable[..., None]
) -> None:
    server.hang()
    answers: list[httpx2.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(complete(client)))
    waiting.start()
    eventually(lambda: server.state()["waiting"] == 1, "one request waits")
    assert client.get("/health").status_code == 200
    assert answers == []
    server.resume()
    waiting.join(PATIENCE_S)
    assert answers[0].status_code == 200


def test_a_mute_server_answers_nothing_but_orders(server: GpuServer) -> None:
    server.hang(everything=True)
    with to(server, timeout=httpx2.Timeout(PATIENCE_S, read=0.1)) as client, pytest.raises(httpx2.ReadTimeout):
        client.get("/health")
    with to(server) as client:
        assert client.get("/_control").json()["hung"] is True
        client.post("/_control", json={"do": "resume"})
        assert client.get("/health").status_code == 200


def test_refused_then_back_on_the_same_port(client: httpx2.Client, server: GpuServer) -> None:
    complete(client)
    url = server.url
    server.refuse()
    with pytest.raises(httpx2.ConnectError):
        complete(client)
    if sys.platform == "linux":
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", server.port))  # nobody else gets the port meanwhile
    server.resume()
    assert complete(client).status_code == 200
    assert server.url == url


def test_kill_resets_what_runs(client: httpx2.Client, server: GpuServer) -> None:
    server.slow(1000)
    with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        server.kill()
        with pytest.raises(httpx2.TransportError):
            list(response.iter_lines())
    with pytest.raises(httpx2.ConnectError):
        complete(client)
    assert (server.state()["dropped"], server.state()["live"]) == (1, 0)


def test_a_crash_loses_the_cache_and_a_restart_serves_again(
    client: httpx2.Client, server: GpuServer, eventually: Callable[..., None]
) -> None:
    prompt = "the same long beginning " * 100
    complete(client, prompt=prompt)
    server.slow(1000)
    streamed = client.build_request("POST", "/v1/completions", json={**ENDLESS, "prompt": prompt})
    client.send(streamed, stream=True)
    eventually(lambda: server.state()["running"] == 1, "a job holds cached blocks")
    server.kill()
    server.resume()
    again = complete(client, prompt=prompt).json()["usage"]["prompt_tokens_details"]
    assert again == {"cached_tokens": 0}
    assert (server.state()["running"], server.state()["waiting"]) == (0, 0)


def test_a_client_that_goes_away_is_counted_and_frees_the_engine(
    client: httpx2.Client, server: GpuServer, eventually: Callable[..., None]
) -> None:
    server.slow(1000)
    with client.stream("POST", "/v1/completions", json=ENDLESS):
        eventually(lambda: server.state()["live"] == 1, "the request runs")
    eventually(lambda: server.state()["cancelled"] == 1, "the cancel is seen")
    server.resume()
    eventually(lambda: server.state()["running"] + server.state()["waiting"] == 0, "the engine is idle")


def test_draining_as_vllm_does(client: httpx2.Client, server: GpuServer) -> None:
    server.slow(20)
    with client.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as running:
        server.drain()
        refused = complete(client)
        assert (refused.status_code, "after shutdown" in refused.text) == (500, True)
        assert client.get("/health").status_code == 200
        assert "".join(running.iter_text()).endswith("[DONE]\n\n")


def test_a_full_queue_answers_503(eventually: Callable[..., None]) -> None:
    options = {"max_num_seqs": 1, "max_queued": 1, "time_scale": 1.0, "slowdown": 1e6}
    streamed = {**COMPLETION, "stream": True}
    with GpuServer(**options) as server, to(server) as client:
        for running in (1, 2):
            client.send(client.build_request("POST", "/v1/completions", json=streamed), stream=True)
            eventually(lambda: server.state()["live"] == running, "the requests are there")  # noqa: B023
        refused = complete(client)
    assert (refused.status_code, "currently busy" in refused.text) == (503, True)


def test_unhealthy_and_still_loading() -> None:
    with GpuServer(startup_s=1e9) as server, to(server) as client:
        assert (client.get("/health").status_code, complete(client).status_code) == (503, 503)
    with GpuServer(time_scale=0.0) as server, to(server) as client:
        server.health(500)
        assert (client.get("/health").status_code, complete(client).status_code) == (500, 200)


def test_resent_requests_are_recognised(client: httpx2.Client, server: GpuServer) -> None:
    server.answer(503, count=1)
    for _ in range(2):
        client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "once"})
    client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "other"})
    state = server.state()
    assert (state["received"], state["resent"], state["resent_after_first_byte"]) == (3, 1, 0)
    client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "once"})
    assert server.state()["resent_after_first_byte"] == 1
    assert [row[2] for row in server.state()["wire"]["once"]] == ["answered", "finished", "finished"]
    server.reset_counters()
    assert server.state()["received"] == 0
    with pytest.raises(LookupError, match="no inference request"):
        _ = server.last_request


# ----------------------------------------------------------------------------------------------------- misuse


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="unknown GPU 'B52'"), GpuServer(gpu="B52"):
        pass
    with pytest.raises(TypeError, match="speed"):
        GpuServer(speed=3)
    stopped = GpuServer()
    stopped.stop()
    with pytest.raises(ConnectionError, match="not running"):
        _ = stopped.url
    with GpuServer() as server:
        with pytest.raises(RuntimeError, match="already running"):
            server.start()
        with pytest.raises(OSError, match="address already in use"), GpuServer(port=server.port):
            pass
        with pytest.raises(ValueError, match="unknown order 'dance'"):
            server.control("dance")
        with pytest.raises(ValueError, match="above 0"):
            server.slow(0)


def test_stop_and_start_again() -> None:
    server = GpuServer(time_scale=0.0)
    for _ in range(2):
        with server, to(server) as client:
            assert complete(client).status_code == 200
