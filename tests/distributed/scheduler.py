"""Threads that run one at a time, in an order that a seed decides, on a virtual clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Killed(BaseException):
    """The end of a simulated process: each further operation of it raises this."""


class Task:
    """One thread of a simulated process."""

    def __init__(self, process: str, body: Callable[[], None]) -> None:
        self.process = process
        self.body = body
        self.turn = threading.Semaphore(0)
        self.wake_at = 0.0
        self.ended = False
        self.error: BaseException | None = None


class Scheduler:
    """Gives one task at a time the right to run. Time passes only when all tasks sleep, and a little at each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.dead: set[str] = set()
        self.paused: dict[str, float] = {}
        self.before_step: Callable[[], None] = lambda: None
        self._tasks: list[Task] = []
        self._current: Task | None = None
        self._back = threading.Semaphore(0)

    def start(self, process: str, body: Callable[[], None]) -> Task:
        """Add a task, which runs when its turn comes."""
        task = Task(process, body)
        self._tasks.append(task)

        def run() -> None:
            task.turn.acquire()
            try:
                if task.process not in self.dead:
                    task.body()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - the test judges it
                task.error = error
            finally:
                task.ended = True
                self._back.release()

        threading.Thread(target=run, daemon=True).start()
        return task

    def tasks_of(self, process: str) -> list[Task]:
        """The tasks of a process."""
        return [t for t in self._tasks if t.process == process]

    def step(self) -> None:
        """Let another task run; called by a task at each operation on the store."""
        self._yield(self.now)

    def sleep(self, seconds: float) -> None:
        """Let others run until the time is over."""
        self._yield(self.now + seconds)

    def _yield(self, wake_at: float) -> None:
        task = self._current
        assert task is not None
        if task.process in self.dead:
            raise Killed
        task.wake_at = wake_at
        self._back.release()
        task.turn.acquire()
        if task.process in self.dead:
            raise Killed

    def run(self, *, most_steps: int = 200_000) -> None:
        """Run all tasks to their ends.

        Raises:
            AssertionError: They do not end.
        """
        while alive := [t for t in self._tasks if not t.ended]:
            assert self.steps < most_steps, "the tasks do not end"
            self.steps += 1
            self.before_step()
            due = {t: max(t.wake_at, self.paused.get(t.process, 0.0)) for t in alive if t.process not in self.dead}
            due |= {t: 0.0 for t in alive if t.process in self.dead}  # they end at once
            ready = [t for t, at in due.items() if at <= self.now]
            if not ready:
                self.now = min(due.values())
                continue
            self.now += self.random.random() * 0.01
            self._current = self.random.choice(ready)
            self._current.turn.release()
            self._back.acquire()
