import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dflash.bench.server import LOG_TAIL_LINES, Server, ServerStartError, free_port

# Answers like a server, after having started a process of its own, as SGLang does.
ANSWERING = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print("pids", os.getpid(), child.pid, "mark", os.environ.get("MARK"), flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def do_GET(self):
        self.answer({"path": self.path})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"got": json.loads(body) if body else None})

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SILENT = "import os, time; print('pids', os.getpid(), flush=True); time.sleep(120)"
DYING = "import sys; [print('line', number) for number in range(100)]; print('no such model'); sys.exit(3)"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Server]:
    def make(script: str, **kwargs: object) -> Server:
        server = Server("model", log=tmp_path / "logs" / "server.log", **kwargs)
        server._command = [sys.executable, "-c", script, str(server.port)]
        return server

    return make


def pids(server: Server) -> list[int]:
    words = server.log.read_text().split("pids ")[1].split("\n")[0].split()
    return [int(word) for word in words if word.isdigit()]


def running(pid: int) -> bool:
    """Whether it runs; a dead process that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ended(numbers: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(running, numbers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [number for number in numbers if running(number)] == []


def test_the_command_is_sglangs_launcher(tmp_path: Path) -> None:
    server = Server(Path("/models/target"), ["--tp-size", "2"], log=tmp_path / "log")
    assert server._command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert server._command[3:5] == ["--model-path", "/models/target"]
    assert server._command[5:] == ["--host", "127.0.0.1", "--port", str(server.port), "--tp-size", "2"]


def test_starts_answers_and_stops_with_its_children(make: Callable[..., Server]) -> None:
    with make(ANSWERING, env={"MARK": "seen"}) as server:
        assert server.healthy()
        assert server.post_text("/flush_cache") == '{"got": null}'
        assert server.post("/generate", {"rid": "a"}) == {"got": {"rid": "a"}}
        assert "mark seen" in server.log.read_text()
        numbers = pids(server)
        assert len(numbers) == 2
        assert all(map(running, numbers))
        assert os.getpgid(numbers[1]) == numbers[0] != os.getpgid(0)
    assert_ended(numbers)
    assert not server.healthy()
    server.stop()


def test_an_exception_in_the_block_stops_it_too(make: Callable[..., Server]) -> None:
    with pytest.raises(KeyError), make(ANSWERING) as server:
        numbers = pids(server)
        raise KeyError
    assert_ended(numbers)


def test_a_server_that_dies_shows_the_end_of_its_log(make: Callable[..., Server]) -> None:
    server = make(DYING)
    with pytest.raises(ServerStartError, match="ended with code 3") as caught, server:
        pass
    lines = str(caught.value).splitlines()
    assert lines[1] == f"The end of {server.log}:"
    assert lines[-1] == "no such model"
    assert len(lines[2:]) == LOG_TAIL_LINES


def test_a_server_that_does_not_answer_is_ended(make: Callable[..., Server]) -> None:
    server = make(SILENT, timeout=1)
    with pytest.raises(ServerStartError, match="did not answer within 1 s") as caught, server:
        pass
    assert f"The end of {server.log}" in str(caught.value)
    assert_ended(pids(server))


def test_the_label_shows_that_it_is_starting(make: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    with make(ANSWERING, label="start the target"):
        pass
    assert "start the target" in capsys.readouterr().err
    with make(ANSWERING):
        pass
    assert capsys.readouterr().err == ""


def test_free_ports_can_be_bound() -> None:
    assert 0 < free_port() < 65536
