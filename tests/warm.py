"""`python -m vitctl ...` as a process that need not import torch first: it is forked from one that has, which
saves 4 seconds.

`Popen` and `run` are those of subprocess, for lines that begin with this Python and `-m` or `-c`. The process
has signals, streams, an environment, a folder, a session and an end of its own. Only its imports are over: a
test of the start takes subprocess itself. The launcher's agent and workers, which such a process starts in
turn, are forked from it in the same way.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import PIL.Image
import typer.main

# The suite starts hundreds of processes, and without bytecode each of them compiles vitctl anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "numpy.ma",
    "rich._emoji_codes",
    "torch._dynamo",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "accelerate.commands.launch",
    "vitctl.cli.app",
    "vitctl.cli.show.render",
    "vitctl.cli.show.console",
    "vitctl.jobs.evaluate",
    "vitctl.export.export",
    "vitctl.jobs.fewshot",
    "vitctl.jobs.finetune",
    "vitctl.jobs.plan",
    "vitctl.jobs.pretrain",
    "vitctl.jobs.vtab_suite",
    "vitctl.launch.jobset",
    "vitctl.launch.launcher",
    "vitctl.launch.prepare_run",
    "vitctl.models.roofline",
    "vitctl.report.run_records",
    "vitctl.report.sweep_table",
)
# What is forked where a process of this kind starts it.
FORKED = re.compile(r"accelerate\.commands\.launch|vitctl(\.launch\.worker)?|tests\.launch\.\w+_worker")
LAST = 1  # seconds that the process outlives those that ask
ROOM = 1 << 15  # bytes of a process's arguments and of its environment, as /proc shows them
CHANGEABLE = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}


class Popen(subprocess.Popen[Any]):
    """A process of its own.

    With `start_new_session` and a terminal as standard input, that is its controlling terminal.
    """

    def _execute_child(self, *given: Any) -> None:
        call = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        line = call["args"]
        assert line[0] == sys.executable and line[1] in ("-m", "-c") and call["preexec_fn"] is None
        request = {
            "line": [str(word) for word in line[1:]],
            "folder": os.path.abspath(call["cwd"] or "."),
            "environment": dict(os.environ if call["env"] is None else call["env"]),
            "session": call["start_new_session"],
            "ignored": [number for number in CHANGEABLE if signal.getsignal(number) == signal.SIG_IGN],
        }
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        self._told, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )  # the pid, and how it ended
        with theirs:
            ends = [end if end != -1 else own for own, end in enumerate(streams)]
            socket.send_fds(_server(), [json.dumps(request).encode()], [*ends, theirs.fileno()])
        self._close_pipe_fds(*(call[name] for name in PIPES))  # type: ignore[attr-defined]
        self.pid = int(self._told.recv(100))
        self._child_created = True

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG and not select.select([self._told], [], [], 0)[0]:
            return 0, 0
        with self._told:
            return self.pid, int(self._told.recv(100))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def run(
    line: list[str],
    *,
    check: bool = False,
    capture_output: bool = False,
    timeout: float | None = None,
    **given: Any,
) -> "subprocess.CompletedProcess[Any]":
    """subprocess.run."""
    if capture_output:
        given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(line, **given) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(line, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


@cache
def _server() -> socket.socket:
    """The way to the process that has imported everything: one for all workers of xdist."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = Path(tempfile.gettempdir(), f"warm-{run}")
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for _ in range(1000):
        try:
            ours.connect(str(place))
            break
        except OSError:
            with suppress(OSError):  # another worker has just bound it, and will listen
                _start_server(place)
            time.sleep(0.01)

    @atexit.register
    def end() -> None:
        ours.close()

    return ours


def _start_server(place: Path) -> None:
    """Listen for it before it has imported anything; only the first request waits for that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(place))
        listening.listen()
        line = [sys.executable, "-m", "tests.warm", str(listening.fileno()), "-" * ROOM]
        environment = {
            **os.environ,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for a GPU must not spoil a fork
            "ROOM": "-" * ROOM,
        }
        server = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, pass_fds=[listening.fileno()]
        )

    @atexit.register
    def end() -> None:
        server.returncode = 0  # it ends with the last worker, and nobody waits for that


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; returns it in the new process, and None when nobody asks any more."""
    under_way: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> process, whom to tell
    asking: list[socket.socket] = []
    while True:
        ready = select.select([listening, *asking, *under_way], [], [], None if asking else LAST)[0]
        if not ready:
            Path(listening.getsockname()).unlink(missing_ok=True)
            if not select.select([listening], [], [], 0)[0]:
                return None
            continue
        for ended in set(ready) & set(under_way):
            pid, told = under_way.pop(ended)
            with told, suppress(OSError):  # a worker that was killed
                told.send(str(os.waitpid(pid, 0)[1]).encode())
            os.close(ended)
        if listening in ready:
            asking.append(listening.accept()[0])
        for asked in set(ready) & set(asking):
            data, files, _, _ = socket.recv_fds(asked, 1 << 20, 4)
            if not data:
                asking.remove(asked)
                asked.close()
                continue
            told = socket.socket(fileno=files[3])
            if (pid := os.fork()) == 0:
                for each in (listening, *asking, told, *(other for _, other in under_way.values())):
                    each.close()
                for ended in under_way:
                    os.close(ended)
                return {**json.loads(data), "streams": files[:3]}
            for file in files[:3]:
                os.close(file)
            under_way[os.pidfd_open(pid)] = pid, told
            told.send(str(pid).encode())


def become(request: dict[str, Any]) -> None:
    """What lies between fork and the first line of a Python program."""
    if request["session"]:
        os.setsid()
    for own, file in enumerate(request["streams"]):
        os.dup2(file, own)
    for file in set(request["streams"]) - {0, 1, 2}:
        os.close(file)
    if request["session"] and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    for number in CHANGEABLE:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    os.environ.clear()
    os.environ.update(request["environment"])
    show_in_proc(request)
    os.chdir(request["folder"])


def show_in_proc(request: dict[str, Any]) -> None:
    """Let /proc, and so psutil, tell the arguments and the environment of this process, not of the first."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words = [sys.executable, *request["line"]]
    settings = [f"{key}={value}" for key, value in request["environment"].items()]
    for texts, first in ((words, 45), (settings, 47)):
        begin, end = int(fields[first]), int(fields[first + 1])
        content = "".join(f"{text}\0" for text in texts).encode()[: end - begin - 1]
        ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def fork_or_execute(popen: Any, *given: Any) -> None:
    """What subprocess starts in a process of this kind: the launcher's agent and workers are forked."""
    call = inspect.signature(execute).bind(popen, *given).arguments
    words = [] if isinstance(call["args"], str) else [str(word) for word in call["args"] if word != "-u"]
    if not (words[:2] == [sys.executable, "-m"] and FORKED.fullmatch(words[2])):
        return execute(popen, *given)
    ends = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
    request = {
        "line": words[1:],
        "folder": os.path.abspath(call["cwd"] or "."),
        "environment": dict(os.environ if call["env"] is None else call["env"]),
        "session": False,
        "ignored": [number for number in CHANGEABLE if signal.getsignal(number) == signal.SIG_IGN],
        "streams": [end if end != -1 else own for own, end in enumerate(ends)],
    }
    sys.stdout.flush()
    popen.pid = os.fork()
    if popen.pid == 0:
        try:
            gc.freeze()
            forget_the_parent()
            if call["start_new_session"]:
                os.setsid()
            if call["preexec_fn"] is not None:
                call["preexec_fn"]()
            become(request)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            run_program(request["line"])
        finally:
            os._exit(1)
    popen._child_created = True
    popen._close_pipe_fds(*(call[name] for name in PIPES))
    return None


def forget_the_parent() -> None:
    """Forget what the parent has opened and computed, and what it does at its end."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("vitctl.") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    for function in (weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # type: ignore[attr-defined]
        atexit.register(function)


def run_program(line: list[str]) -> NoReturn:
    """Run a program and end as Python does, but without taking the imports apart: that would copy every page
    that the fork shares.
    """
    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]
    how, what, *arguments = line
    sys.argv = [what if how == "-m" else how, *arguments]
    code: Any = 0
    try:
        if how == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            sys.modules.pop(what, None)  # as anew
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = error if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | KeyboardInterrupt | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code or 0) & 0xFF)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    PIL.Image.preinit()
    typer.main.get_command = cache(typer.main.get_command)  # the commands are built once, too
    typer.main.get_command(sys.modules["vitctl.cli.app"].app)
    gc.collect()
    gc.freeze()  # or every collection of garbage in a process would look through the imports, too
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        become(request)
        run_program(request["line"])
