"""Running the machines of a federation as processes of this one, with an end to every wait.

For trying a federation out before its folders go to their machines, and for tests. The processes are started
by the very scripts that the machines use.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

from ..errors import UserError
from .plan import Federation
from .scripts import CONNECTION
from .settings import read_settings

SUPERLINK = "superlink"
LOG = "output.log"
_MARK = "FEDPLAT_MACHINE"
_POLL, _RUN_POLL, _REJOIN_PAUSE = 1.0, 4.0, 5.0
_GRACE = 10.0
_TAIL = 12
_T = TypeVar("_T")


class Machines:
    """The SuperLink and SuperNodes of a federation, as child processes.

    Leaving the ``with`` block, or ``stop``, ends them together with everything they started.
    """

    def __init__(self, folder: Path, *, timeout: float = 120.0) -> None:
        self.federation = Federation(Path(folder).resolve())
        self.timeout = timeout
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.node_ids: dict[str, int] = {}
        self._marks: dict[str, str] = {}
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        self._environment = {**os.environ, "PATH": places, "PYTHONUNBUFFERED": "1"}

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start one machine by its script, with more options for Flower; what it prints goes to its log."""
        return self.launch(name, [str(self.federation.folder / name / "start.sh"), *options])

    def launch(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program as a machine of this name, whose folder gets the log; raises UserError."""
        if name in self.running:
            if self.running[name].poll() is None:
                raise UserError(f"{name} is running already")
            self.kill(name)  # what a machine that ended by itself may have left
        mark = uuid4().hex
        try:
            with self.log(name).open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self._environment, _MARK: mark},
                    start_new_session=True,
                )
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        self.running[name], self._marks[name] = process, mark
        return process

    def start_all(self) -> None:
        """Start SuperLink and SuperNodes, registering these, and wait until all are online."""
        names = [path.name for path in self.federation.supernodes]
        self.start(SUPERLINK)
        self.wait_for_superlink()
        self.register(names)
        for name in names:
            self.start(name)
        self.wait_for_supernodes(names)

    def log(self, name: str) -> Path:
        """Return the file that gets what a machine prints."""
        return self.federation.folder / name / LOG

    def kill(self, name: str) -> None:
        """Kill a machine and all its processes at once, as a power cut would."""
        _kill(self.running.pop(name), self._marks.pop(name))

    def stop(self) -> None:
        """End all machines, SuperNodes first: gently, and after a while by force."""
        names = sorted(self.running, key=lambda name: name == SUPERLINK)
        for group in (
            [name for name in names if name != SUPERLINK],
            [name for name in names if name == SUPERLINK],
        ):
            for name in group:
                self.running[name].terminate()
            deadline = time.monotonic() + _GRACE
            for name in group:
                with suppress(subprocess.TimeoutExpired):
                    self.running[name].wait(max(0.1, deadline - time.monotonic()))
                self.kill(name)

    def flwr(self, *arguments: str, timeout: float | None = None) -> dict[str, Any]:
        """Run a ``flwr`` command as the operator and return what it prints as JSON; raises UserError."""
        command = [str(self.federation.operator / "flwr.sh"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=self._environment,
                timeout=timeout or self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"flwr {' '.join(arguments)}: no answer in {error.timeout:.0f} s") from error
        except OSError as error:
            raise UserError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        start = done.stdout.find("{")
        try:
            answer = json.loads(done.stdout[max(start, 0) :])
        except ValueError:
            answer = {}
        if not answer.get("success"):
            said = answer.get("error-message") or (done.stdout + done.stderr).strip() or "nothing"
            raise UserError(f"flwr {' '.join(arguments)} failed with exit status {done.returncode}: {said}")
        return answer

    def register(self, names: Iterable[str]) -> dict[str, int]:
        """Register the public keys of SuperNodes and return their node ids."""
        for name in names:
            key = self.federation.operator / "supernode-keys" / f"{name}.pub"
            answer = self.flwr("supernode", "register", str(key), CONNECTION, "--name", name)
            self.node_ids[name] = int(answer["node-id"])
        return self.node_ids

    def statuses(self) -> dict[int, str]:
        """Return what the SuperLink says of every node id: registered, online, offline or unregistered."""
        return {node: str(told["status"]) for node, told in self._nodes().items()}

    def _nodes(self) -> dict[int, dict[str, Any]]:
        nodes = self.flwr("supernode", "ls", CONNECTION)["nodes"]
        return {int(node["node-id"]): node for node in nodes}

    def submit(self, app: Path, run_config: str = "") -> int:
        """Start a run of an app and return its id."""
        options = ["--run-config", run_config] if run_config else []
        return int(self.flwr("run", str(app), CONNECTION, *options)["run-id"])

    def run_status(self, run_id: int) -> str:
        """Return a run's status as Flower words it, such as ``running`` or ``finished:completed``."""
        runs = self.flwr("ls", CONNECTION, "--run-id", str(run_id))["runs"]
        return str(runs[0]["status"])

    def wait_for_superlink(self, timeout: float | None = None) -> None:
        """Wait until the SuperLink says that it is well, over TLS; raises UserError if it does not."""
        address = read_settings(self.federation.operator, "SUPERLINK")["SUPERLINK"]
        trusted = ssl.create_default_context(cafile=str(self.federation.operator / "ca.crt"))
        url = f"https://{address}/health"
        trouble = ""

        def healthy() -> bool | None:
            nonlocal trouble
            try:
                with urlopen(url, timeout=5, context=trusted) as answer:
                    return answer.status == 200 or None
            except (URLError, OSError) as error:
                trouble = str(getattr(error, "reason", error))
                return None

        self._until(healthy, [SUPERLINK], timeout, lambda: f"{url} does not answer: {trouble}")

    def wait_for_supernodes(self, names: Sequence[str], timeout: float | None = None) -> None:
        """Wait until these SuperNodes are online; raises UserError naming those that are not."""
        self._wait_online(dict.fromkeys(names, ""), timeout)

    def rejoin(self, name: str, timeout: float | None = None) -> int:
        """Start a SuperNode that was lost, as often as it takes to be online, and return how often it took.

        For about a minute after a crash the SuperLink holds the lost one to be online and refuses any other
        with its key. Raises UserError when it is not online in time.
        """
        deadline = time.monotonic() + (timeout or self.timeout)
        lost = str(self._nodes()[self.node_ids[name]]["online-at"])
        attempts = 0
        while True:
            self.start(name)
            attempts += 1
            try:
                self._wait_online({name: lost}, max(1.0, deadline - time.monotonic()))
                return attempts
            except UserError:
                if time.monotonic() + _REJOIN_PAUSE > deadline or self.running[name].poll() is None:
                    raise
            time.sleep(_REJOIN_PAUSE)

    def _wait_online(self, since: Mapping[str, str], timeout: float | None) -> None:
        """Wait until SuperNodes are online, and not merely held to be since the time given for each."""
        missing: list[str] = []

        def online() -> bool | None:
            nodes = self._nodes()
            missing[:] = [
                name
                for name, old in since.items()
                if (node := nodes.get(self.node_ids[name])) is None
                or node["status"] != "online"
                or node.get("online-at") == old
            ]
            return None if missing else True

        def describe() -> str:
            logs = "".join(f"\n{name} last printed:\n{_tail(self.log(name))}" for name in missing)
            return f"not online: {', '.join(missing)}{logs}"

        self._until(online, [SUPERLINK, *since], timeout, describe)

    def wait_for_run(self, run_id: int, timeout: float | None = None) -> str:
        """Wait until a run has ended and return how, for example ``finished:completed``.

        Raises UserError if it goes on for longer, or if the SuperLink ended.
        """
        status = "unknown"

        def ended() -> str | None:
            nonlocal status
            status = self.run_status(run_id)
            return status if status.startswith("finished") else None

        def describe() -> str:
            return f"run {run_id} is {status}; {SUPERLINK} last printed:\n{_tail(self.log(SUPERLINK))}"

        return self._until(ended, [SUPERLINK], timeout, describe, _RUN_POLL)

    def _until(
        self,
        ask: Callable[[], _T | None],
        needed: Sequence[str],
        timeout: float | None,
        describe: Callable[[], str],
        pause: float = _POLL,
    ) -> _T:
        """Ask until there is an answer; a machine that has ended will not give one any more."""
        limit = timeout or self.timeout
        deadline = time.monotonic() + limit
        while True:
            for name in needed:
                process = self.running.get(name)
                if process is not None and process.poll() is not None:
                    raise UserError(
                        f"{name} ended with exit status {process.returncode}; it last printed:\n"
                        f"{_tail(self.log(name))}"
                    )
            answer = ask()
            if answer is not None:
                return answer
            if time.monotonic() > deadline:
                raise UserError(f"after {limit:.0f} s: {describe()}")
            time.sleep(pause)


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-_TAIL:]) or "  nothing"


def _marked(mark: str) -> list[int]:
    """Return the processes that were started with this mark in their environment, by whomever.

    Flower starts some of its processes in sessions of their own, and they outlive their parents for a while,
    so neither a process group nor the tree of processes has them all.
    """
    wanted, found = f"\0{_MARK}={mark}\0".encode(), []
    with suppress(OSError):
        for entry in os.listdir("/proc"):
            with suppress(OSError):
                told = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdecimal() else b""
                if wanted in b"\0" + told:
                    found.append(int(entry))
    return found


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a machine's processes, also those that are just being started, and wait until they are gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _GRACE
    while (pids := _marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
