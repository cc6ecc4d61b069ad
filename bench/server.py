"""A SGLang server as a context manager: started as a child process, waited for, and ended with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from sglang_dflash.dump.generate import post

LOG_TAIL_LINES = 30
STOP_SECONDS = 15


class ServerStartError(RuntimeError):
    """The server ended, or did not answer in time; the message has the end of its log."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``with Server(model, args, log=...) as server:`` is a server that answers at ``server.url``.

    Args:
        model: what goes to ``--model-path``.
        args: further command-line arguments.
        log: file that receives all output of the server.
        env: environment variables on top of this process's.
        label: text of the progress bar while it starts; None shows none.

    Raises:
        ServerStartError: on entry.
    """

    def __init__(
        self,
        model: Path | str,
        args: Sequence[str] = (),
        *,
        log: Path,
        env: dict[str, str] | None = None,
        label: str | None = None,
        timeout: float = 600,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *args]
        self._env = {**os.environ, **(env or {})}
        self._label = label
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout
        bar_format = "{desc}: {elapsed}"
        with tqdm(desc=self._label, disable=self._label is None, bar_format=bar_format) as bar:
            while not self.healthy():
                if self._process.poll() is not None:
                    raise ServerStartError(f"The server ended with code {self._process.returncode}.\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise ServerStartError(
                        f"The server did not answer within {self._timeout:.0f} s.\n{self.log_tail()}"
                    )
                time.sleep(0.5)
                bar.refresh()

    def healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def log_tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return f"The end of {self.log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])

    def post(self, path: str, payload: dict[str, Any]) -> Any:
        return post(self.url, path, payload)

    def post_text(self, path: str, payload: dict[str, Any] | None = None) -> str:
        """POST JSON, or nothing, to an endpoint that answers in words or not at all.

        Raises:
            urllib.error.HTTPError: an error status.
        """
        body = b"" if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())

    def stop(self) -> None:
        """End the server and its subprocesses: politely, then not."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            deadline = time.monotonic() + STOP_SECONDS
            while _group_alive(self._process) and time.monotonic() < deadline:
                time.sleep(0.1)
        self._process = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _group_alive(leader: subprocess.Popen[bytes]) -> bool:
    """Whether any process that the leader started is still there."""
    leader.poll()
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True
