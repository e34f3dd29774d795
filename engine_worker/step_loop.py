"""The engine thread: take commands, step, hand the result over. It never waits for Redis or for text."""

from __future__ import annotations

import queue
import time
from typing import Final, assert_never

from common.errors import HeadraceError
from common.events import FinishReason
from engine_worker.engine import Engine, EngineStats
from engine_worker.handoff import Add, Commands, Drop, Finish, Halt, Progress, Refused, StepReports
from engine_worker.step import StepPlan, StepResult
from engine_worker.step_limits import StepLimits

_IDLE_S: Final = 0.5
_IDLE_ALLOWANCE_S: Final = 5.0
_LET_OUT_STREAMS: Final = 2  # with more of them others would wait for it
_LET_OUT_S: Final = 0.002


class StepLoop:
    """Runs in the thread that calls `run`; ``stats`` and ``progress`` may be read from others."""

    def __init__(
        self, engine: Engine, commands: Commands, reports: StepReports, limits: StepLimits, max_step_s: float
    ) -> None:
        self.commands = commands
        self.reports = reports
        self._engine = engine
        self._limits = limits
        self._max_step_s = max_step_s
        self._is_halted = False
        self._in_hand: tuple[StepPlan, float] | None = None  # with the time at which it was begun
        self.progress = Progress(max_step_s)
        engine.before_execute = self._before_execute

    @property
    def stats(self) -> EngineStats:
        """As of about now; counters and gauges may be of two steps that follow each other."""
        return self._engine.stats()

    def run(self) -> None:
        """Step until halted. Raises what the engine raises: it is not to be used again then."""
        while not self._is_halted:
            self.progress.announce(_IDLE_ALLOWANCE_S)
            self._obey()
            if self._is_halted or not self._engine.has_work or not self.reports.wait_for_room(_IDLE_S):
                continue
            self.progress.announce(self._max_step_s)
            result = self._engine.step(time.time())
            self._learn()
            self._report(result)

    def _report(self, result: StepResult) -> None:
        """The next step takes all cores, and would keep log, edge and client from showing a first token at once: each
        of them would wait for a core in its turn. So the step waits for the token, where hardly anybody else does."""
        if len(result.sampled) <= _LET_OUT_STREAMS and any(s.sequence.num_output_tokens == 1 for s in result.sampled):
            self.reports.put_and_let_out(result, _LET_OUT_S)
        else:
            self.reports.put(result)

    def _before_execute(self, plan: StepPlan) -> None:
        self.progress.announce(self._limits.limit_s(plan))
        self._in_hand = plan, time.perf_counter()

    def _learn(self) -> None:
        in_hand, self._in_hand = self._in_hand, None
        if in_hand is not None:
            plan, began_s = in_hand
            self._limits.learn(plan, time.perf_counter() - began_s)

    def _obey(self) -> None:
        """Carry out what has been commanded; with nothing to compute wait for a command."""
        while not self._is_halted:
            try:
                command = self.commands.get(block=not self._engine.has_work, timeout=_IDLE_S)
            except queue.Empty:
                return
            self._carry_out(command)

    def _carry_out(self, command: Add | Drop | Finish | Halt) -> None:
        match command:
            case Add(request_id=request_id, sequences=sequences):
                try:
                    self._engine.add(sequences)
                except HeadraceError as error:
                    self.reports.put(Refused(request_id, error))
            case Drop(request_id=request_id):
                self._engine.cancel(request_id)
            case Finish(sequence=sequence, stop=stop):
                self._engine.finish(sequence, FinishReason.STOP, stop)
            case Halt():
                self._is_halted = True
            case _:
                assert_never(command)
