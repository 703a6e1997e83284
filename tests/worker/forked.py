"""Workers that are forks of a process that has imported torch and torchao, which takes a new process seven
seconds; and a clock for the parent's limits, so that no test waits for one."""

import contextlib
import functools
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor import pipes
from fp8doctor.worker import parent

SERVER = """
import gc, json, os, socket, sys
import torch._functorch.aot_autograd, torch._inductor.codegen.triton, torchao.float8
gc.collect()
gc.freeze()
orders = socket.socket(fileno=int(sys.argv[1]))
while order := orders.recv(1 << 20):
    order = json.loads(order)
    if "wait" in order:
        status = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        orders.send(str(status).encode())
        continue
    _, descriptors, *_ = socket.recv_fds(orders, 1, 8)
    ready, ended = os.pipe()
    child = os.fork()
    if child:
        os.close(ended)
        os.read(ready, 1)
        for descriptor in (ready, *descriptors):
            os.close(descriptor)
        orders.send(str(child).encode())
        continue
    orders.detach()
    os.setsid()
    aside = [os.dup2(each, 1000 + number, inheritable=False) for number, each in enumerate(descriptors)]
    os.write(ended, b"x")
    os.closerange(3, 1000)
    for each, number in zip(aside, order["numbers"]):
        os.dup2(each, number)
        os.close(each)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["variables"])
    os.getppid = lambda: order["parent"]
    sys.argv[1:] = order["arguments"]
    exec(order["program"], {"__name__": "__main__"})
    sys.exit()
"""
"""Forks for each order: a new session, and no descriptors but those that came with the order. What was
imported is no garbage: a fork that looks through all of it when it ends takes a second for that."""


class Forked:
    """What `subprocess.Popen` is to the parent, of a fork."""

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: tuple[int],
        start_new_session: bool,
    ) -> None:
        assert (command[:3], stdin, start_new_session) == (
            [sys.executable, "-P", "-c"],
            subprocess.DEVNULL,
            True,
        )
        _, _, _, program, *arguments = command
        order = {
            "program": program,
            "arguments": arguments,
            "folder": os.getcwd(),
            "variables": dict(os.environ),
            "parent": os.getpid(),
            "numbers": [1, 2, *pass_fds],
        }
        with open(os.devnull, "w") as nowhere:
            printed = [nowhere.fileno() if each == subprocess.DEVNULL else each for each in (stdout, stderr)]
            server()[0].send(json.dumps(order).encode())
            socket.send_fds(server()[0], [b"x"], [*printed, *pass_fds])
            self.pid = int(server()[0].recv(64))
        self._ends = os.pidfd_open(self.pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self._status is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            os.close(self._ends)
            server()[0].send(json.dumps({"wait": self.pid}).encode())
            self._status = int(server()[0].recv(64))
        return self._status


@functools.cache
def server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The way to the process that forks, and the process; it ends with the tests, which closes the way."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(there.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
        )
    return here, process


def hang(file: Path) -> str:
    """A Python expression that never ends, for a child: ``file`` grows all the while."""
    return (
        f"[(open({str(file)!r}, 'a').write('x'), __import__('time').sleep(0.05)) for _ in iter(lambda: 0, 1)]"
    )


def late_while_it_grows(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit passes whenever `hang` lets ``file`` grow."""

    def monotonic() -> float:
        return time.monotonic() + 1e6 * (file.stat().st_size if file.exists() else 0)

    for each in (parent, pipes):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
