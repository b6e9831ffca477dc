"""A simulated machine that runs a program with any durations: streams and events, and nothing else.

Each device's host issues its list in order and never blocks. An action begins when the action before it on its stream
is over and all its waits are. Compute, offload and reload are one stream each. A message goes from its send to its
receive once both may begin (a rendezvous); messages between two devices begin in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from optpipe.compile import Action, Program
from optpipe.compile.program import RECEIVES, SENDS, matching_receive
from optpipe.costs import device_effect
from optpipe.ops import Op
from optpipe.problem import Problem

Duration = Callable[[Op], float]
"""Duration of an action in us; called with a send, the time that its message is on its way."""

Times = dict[Op, tuple[float, float]]


def play(program: Program, duration_us: Duration) -> Times:
    """Begin and end of every action. Fails where devices wait for one another."""
    machine = _Machine(program, duration_us)
    devices = range(len(program.devices))
    while not all(map(machine.done, devices)):
        assert sum(map(machine.advance, devices)), "the program deadlocks"
    return machine.times


@dataclass
class _Machine:
    program: Program
    duration_us: Duration
    times: Times = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)
    stream_free: dict[object, float] = field(default_factory=dict)
    ready: dict[Op, float] = field(default_factory=dict)

    def done(self, device: int) -> bool:
        return self.place.get(device, 0) == len(self.program.devices[device])

    def advance(self, device: int) -> int:
        """Issue actions as long as it is known when what they wait for is over; returns how many."""
        actions = self.program.devices[device]
        begin = place = self.place.get(device, 0)
        while place < len(actions) and all(wait in self.times for wait in actions[place].waits):
            self.issue(device, actions[place])
            place += 1
        self.place[device] = place
        return place - begin

    def issue(self, device: int, action: Action) -> None:
        may_begin = max((self.times[wait][1] for wait in action.waits), default=0.0)
        if action.kind in SENDS or action.kind in RECEIVES:
            self.ready[action.key] = may_begin
            self.meet(device, action)
        else:
            begin = max(may_begin, self.stream_free.get((device, action.stream), 0.0))
            end = begin + self.duration_us(action.key)
            self.times[action.key] = begin, end
            self.stream_free[device, action.stream] = end

    def meet(self, device: int, action: Action) -> None:
        """Move a message if both sides are ready; the first of a pair to be issued leaves that to the other."""
        send = action.key if action.kind in SENDS else self.send_of(action)
        receive = matching_receive(send)
        if send in self.ready and receive in self.ready:
            pair = (device, action.peer) if action.kind in SENDS else (action.peer, device)
            begin = max(self.ready[send], self.ready[receive], self.stream_free.get(pair, 0.0))
            self.stream_free[pair] = begin
            self.times[send] = self.times[receive] = begin, begin + self.duration_us(send)

    @staticmethod
    def send_of(receive: Action) -> Op:
        before = receive.kind == "RECV_F"
        return Op("SEND_F" if before else "SEND_B", receive.stage + (-1 if before else 1), receive.microbatch)


def planned_duration(problem: Problem) -> Duration:
    """The problem's own durations and delays."""

    def duration_us(op: Op) -> float:
        if op.kind == "SEND_F":
            return problem.forward_delay_us[op.stage]
        if op.kind == "SEND_B":
            return problem.backward_delay_us[op.stage - 1]
        return problem.stages[op.stage].duration_us(op.kind) if op.kind in ("F", "B", "W", "BW", "O", "R") else 0.0

    return duration_us


def levels_bytes(program: Program, problem: Problem, times: Times, device: int) -> Iterator[int]:
    """Every level of a device's memory: taken when a compute-stream action begins there, given back when it ends."""
    effect_of = {"RELEASE": "O", "PREPARE": "R"}
    changes = []
    for k, action in enumerate(a for a in program.devices[device] if a.stream == "compute"):
        stage, name = problem.stages[action.stage], program.modes.get((action.stage, action.microbatch))
        mode = None if name is None else next(mode for mode in stage.choices if mode.name == name)
        effect = device_effect(stage, effect_of.get(action.kind, action.kind), mode)
        begin, end = times[action.key]
        changes += [(begin, k, 0, effect.at_start), (end, k, 1, effect.at_end)]
    level = 0
    for *_, change in sorted(changes):
        level += change
        yield level
