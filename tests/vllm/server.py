"""Starts `vllm serve` from the vLLM CPU environment on loopback and talks to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optkit.validate.served import Answer

REPO = Path(__file__).resolve().parents[2]
TOP = 20  # as many as vLLM gives without --max-logprobs
OPTIONS = ("--dtype bfloat16 --max-num-seqs 8 --max-model-len 256 --no-enable-prefix-caching --enforce-eager").split()
"""As README.md gives them."""
START_LIMIT_S = 300  # 15-30 s on an idle machine; ten times that where other tests share its cores


def vllm_python() -> Path | None:
    """Python of the vLLM environment: OPTKIT_VLLM_PYTHON, else .venv-vllm in the repository; None if there is none."""
    named = os.environ.get("OPTKIT_VLLM_PYTHON")
    path = Path(named) if named else REPO / ".venv-vllm" / "bin" / "python"
    if named and not path.exists():
        raise FileNotFoundError(f"OPTKIT_VLLM_PYTHON: {named}: no such file")
    return path if path.exists() else None


class Server:
    """A running `vllm serve`; a context manager. `log` and `stats` may be read at any time."""

    def __init__(self, model: Path, work: Path, optkit: dict[str, Any] | None, options: Sequence[str] = ()) -> None:
        python = vllm_python()
        assert python is not None
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        work.mkdir(parents=True, exist_ok=True)
        self.log_path, self.stats_path = work / "serve.log", work / "stats.json"
        command = [str(python.parent / "vllm"), "serve", str(model), "--served-model-name", "tiny", *OPTIONS, "--host",
                   "127.0.0.1", "--port", str(self.port), *options]
        if optkit is not None:
            command += ["--additional-config", json.dumps({"optkit": optkit})]
        env = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            # By itself vLLM binds the worker's threads, one a core, and the workers of two servers to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OPTKIT_STATS": str(self.stats_path)}
        env["PYTHONPATH"] = str(REPO)  # this checkout, whichever one the environment was made from
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=work,
                                            start_new_session=True)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def stats(self) -> dict[str, Any]:
        return json.loads(self.stats_path.read_text())

    def wait_ready(self) -> Server:
        """Until /health answers. Raises RuntimeError with the log's end where the server ends or takes too long."""
        end = time.monotonic() + START_LIMIT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {self.process.returncode}:\n{self.log[-4000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.3)
        raise RuntimeError(f"vllm serve not ready after {START_LIMIT_S} s:\n{self.log[-4000:]}")

    def wait_refused(self) -> str:
        """Until the server has ended by itself; returns its log."""
        assert self.process.wait(START_LIMIT_S) != 0, "vllm serve ended with 0"
        return self.log

    def complete(self, prompt: list[int], count: int) -> Answer:
        """`count` greedy tokens after `prompt` (token ids)."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
                "logprobs": TOP, "return_token_ids": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as r:
            choice = json.load(r)["choices"][0]
        found = choice["logprobs"]
        top = [{int(word.removeprefix("t")): x for word, x in d.items()} for d in found["top_logprobs"]]
        return Answer(prompt, choice["token_ids"], found["token_logprobs"], top)

    def complete_all(self, requests: Sequence[tuple[list[int], int]]) -> list[Answer]:
        """All requests at the same time."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda r: self.complete(*r), requests))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        try:  # its own session: the engine's processes as well, should any have outlived it
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
