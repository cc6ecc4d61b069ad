from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.dump.generate import GenerationError, Prompt, PromptError, generate, load_prompts, post, render

Lines = Callable[..., Path]


def prompt(name: str, content: str = "Hi") -> dict[str, Any]:
    return {"id": name, "messages": [{"role": "user", "content": content}]}


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    def write(*items: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
        return path

    return write


def test_prompts_are_read_in_order(lines: Lines) -> None:
    full = {**prompt("b"), "category": "math", "split": "test", "source": "here", "licence": "CC0-1.0"}
    assert load_prompts(lines(prompt("a", "ünï"), "", full, prompt(7))) == [  # type: ignore[arg-type]
        Prompt("a", [{"role": "user", "content": "ünï"}]),
        Prompt("b", [{"role": "user", "content": "Hi"}], "math", "test"),
        Prompt("7", [{"role": "user", "content": "Hi"}]),
    ]
    assert load_prompts(lines()) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "a prompt has the keys id and messages"),
        ({"id": "x"}, "a prompt has the keys id and messages"),
        ({"messages": prompt("x")["messages"]}, "a prompt has the keys id and messages"),
        ({**prompt("x"), "colour": "red"}, "may have .*category.*; .*colour"),
        ({"id": "x", "messages": []}, "messages must be a non-empty list"),
        ({"id": "x", "messages": "Hi"}, "messages must be a non-empty list"),
        ({"id": "x", "messages": ["Hi"]}, "messages must be a non-empty list"),
        ({"id": "x", "messages": [{"role": "user"}]}, "messages must be a non-empty list"),
        ({"id": "x", "messages": [{"role": "user", "content": None}]}, "with the texts role and content"),
        (prompt("a"), "id 'a' is that of line 1 already"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: Any, words: str, lines: Lines) -> None:
    # The blank line counts.
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:3.*{words}"):
        load_prompts(lines(prompt("a"), "", line, prompt("c")))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_separators_inside_a_text_are_no_line_ends(separator: str, lines: Lines) -> None:
    item = prompt("a", f"one{separator}two")
    (read,) = load_prompts(lines(json.dumps(item, ensure_ascii=False)))
    assert read.messages == item["messages"]


class Tokenizer:
    """Token ids are the characters of the last message; a template ends with 0."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options == {"add_generation_prompt": True, "return_dict": True}
        return {"input_ids": [*map(ord, messages[-1]["content"]), 0]}


class Server(ThreadingHTTPServer):
    """Answers with the prompt's tokens reversed; ``fail`` maps a request id to a status, ``raw`` to a body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, Any]] = []
        self.fail: dict[str, int] = {}
        self.raw: dict[str, bytes] = {}
        self.delay: dict[str, float] = {}
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Content-Type"]) == ("/generate", "application/json")
        rid, server = payload["rid"], self.server
        with server.lock:
            server.seen.append(payload)
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        time.sleep(server.delay.get(rid, 0.0))
        with server.lock:
            server.running -= 1
        output = payload["input_ids"][::-1]
        reply = json.dumps({"output_ids": output, "text": f"to {rid}", "meta_info": {"id": rid}}).encode()
        if rid in server.fail:
            reply = f"no room for {rid} \u2603".encode()
        self.send_response(server.fail.get(rid, 200))
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(server.raw.get(rid, reply))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: Server, names: str, **options: Any) -> list[Any]:
    prompts = [Prompt(name, [{"role": "user", "content": name}]) for name in names]
    return generate(prompts, url=server.url, tokenizer=Tokenizer(), max_new_tokens=5, **options)


def test_answers_are_in_the_order_of_the_prompts(server: Server) -> None:
    server.delay = {"x-a": 0.2, "x-b": 0.1}
    answers = ask(server, "abcd", concurrency=4, rid_prefix="x-")
    assert [answer.id for answer in answers] == ["a", "b", "c", "d"]
    assert answers[1].input_ids == [98, 0] and answers[1].output_ids == [0, 98]
    assert (answers[1].text, answers[1].meta_info) == ("to x-b", {"id": "x-b"})
    assert answers[0].seconds >= 0.2
    assert sorted(payload["rid"] for payload in server.seen) == ["x-a", "x-b", "x-c", "x-d"]
    assert all(p["sampling_params"] == {"temperature": 0, "max_new_tokens": 5} for p in server.seen)
    assert ask(server, "") == []


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_requests_at_once(concurrency: int, server: Server) -> None:
    server.delay = dict.fromkeys("abcdef", 0.05)
    ask(server, "abcdef", concurrency=concurrency)
    assert server.most_running == concurrency


def test_a_refused_request_is_named_with_the_servers_words(server: Server) -> None:
    server.fail = {"b": 400}
    with pytest.raises(GenerationError, match="Request b: /generate answered 400: no room for b \u2603"):
        ask(server, "abc")
    server.fail = {"b": 503}
    with pytest.raises(GenerationError, match="answered 503"):
        post(server.url, "/generate", {"rid": "b", "input_ids": []})


def test_a_failure_asks_no_more(server: Server) -> None:
    server.fail, server.delay = {"a": 500}, dict.fromkeys("bcdefghij", 0.05)
    with pytest.raises(GenerationError, match="Request a"):
        ask(server, "abcdefghij")
    assert len(server.seen) < 5


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(GenerationError, match=rf"Request a: {url}/generate cannot be reached: .*refused"):
        generate([Prompt("a", [{"role": "user", "content": "a"}])], url=url, tokenizer=Tokenizer(), max_new_tokens=1)


@pytest.mark.parametrize("raw", [b'{"text":', b'{"text": "no output_ids"}' + b" " * 100])
def test_a_reply_that_breaks_off_names_the_request(raw: bytes, server: Server) -> None:
    server.raw = {"a": raw}
    with pytest.raises(GenerationError, match="Request a"):
        ask(server, "a")


def test_a_prompt_is_rendered_for_its_answer() -> None:
    assert render(Prompt("a", [{"role": "user", "content": "AB"}]), Tokenizer()) == [65, 66, 0]


def test_progress_is_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    ask(server, "ab", progress="answers")
    shown = capsys.readouterr().err
    assert "answers" in shown and "2/2" in shown and "tok/s" in shown
