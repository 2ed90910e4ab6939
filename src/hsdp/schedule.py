"""Schedule: when units are gathered, prefetched, released and reduced, over one forward and backward.

    forward   unit 0: gather, start gather of 1, compute, release | unit 1: ... | last unit: keep
    backward  last unit: compute; as gradients appear: reduce | release | start gather of the one before | ...
              behind it: cross-reduce every bucket that is full
    end       reduce what is missing (zeros for what got no gradient), wait, hand out `.grad`, release everything

Calls units and gradients; hooks call it. All ranks see the same calls in the same order when they run the same model,
and a unit always reduces all its trainable parameters, whatever happened in backward on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hsdp.calls import Call, Calls
from hsdp.collectives import TAG_SPACE, Column
from hsdp.diagnosis import Phase
from hsdp.gradients import Gradients
from hsdp.ignored import IgnoredGradients
from hsdp.internals import call_after_backward, is_backward_running
from hsdp.outdated import Replaced
from hsdp.placement import World
from hsdp.reductions import Reductions
from hsdp.segment import Segment
from hsdp.unit import State, Unit
from hsdp.waits import Waits

BUCKET_BYTES = 8 * 2**20  # a cross-reduce message large enough that the slow link's latency does not matter


@dataclass(eq=False)
class UnitState:
    """What the schedule remembers of one unit."""

    unit: Unit
    reshard_after_forward: bool | None = None  # None: release unless backward needs it next
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list[Unit] | None = None  # set by the user; None: from the recorded order
    backward_prefetch: list[Unit] | None = None
    in_forward: int = 0  # forwards of modules that use this unit and did not return
    kept: bool = False  # until the end of a backward that no hook tells of

    def take_settings(self, other: UnitState, counterparts: Mapping[Unit, Unit]) -> None:
        """What the user has set for another one; units it names become their counterparts."""
        self.reshard_after_forward = other.reshard_after_forward
        self.reshard_after_backward = other.reshard_after_backward
        self.unshard_in_backward = other.unshard_in_backward
        for name in ("forward_prefetch", "backward_prefetch"):
            named = getattr(other, name)
            setattr(self, name, None if named is None else [counterparts[u] for u in named if u in counterparts])


class Schedule:
    """One schedule for a root module and all units below it.

    Args:
        units: in the order their modules are registered, children before their parents, the root's last.
        column: the replicate axis, or None where it has one rank.
        salt: tells this schedule's messages from those of another one over the same groups; equal on all ranks.
        waits: what is around every wait of it.
    """

    def __init__(self, units: list[Unit], mesh: DeviceMesh, column: Column | None, salt: int, waits: Waits) -> None:
        self.units, self.mesh, self.column, self.salt, self.waits = units, mesh, column, salt, waits
        self.num_copies = 0  # deep copies made of it
        self.states = {unit: UnitState(unit) for unit in units}
        self.hooks: list[Any] = []  # the module hooks that call this schedule, to hand them over to another one
        self.world: World | None = None  # where the mesh's ranks sit, by position in the mesh
        self.is_last_backward = True
        self.in_backward = False
        self.creates_graph = False  # whether the backward that runs is itself differentiable
        self.keeps_gathered = False  # nothing is released: a later backward goes through the graph of an earlier one
        self.num_holds = 0  # nothing is released either: the user asked for it
        self.replaced = Replaced()
        self.ignored = IgnoredGradients([], mesh)
        self.num_backwards = 0
        self._tag_units(salt)
        self._gradients: Gradients | None = None
        self._order, self._last_order = list[Unit](), list[Unit]()  # units as this forward came to them, and the last
        self._calls = Calls()
        self.reductions = Reductions(units, self.waits)
        for unit in units:
            unit.listener, unit.changed = self.gradient_ready, self._take_segments
            self.watch_gradients(unit)

    def _tag_units(self, salt: int) -> None:
        tag = TAG_SPACE + (salt % 1024) * 2**20
        self.waits.messages.clear()
        for unit in self.units:
            unit.tag = tag
            for action in ("gather", "reduce"):
                self.waits.messages.update(dict.fromkeys(range(tag, tag + unit.num_tags), (action, unit.name)))
                tag += unit.num_tags
        if tag >= TAG_SPACE + (salt % 1024 + 1) * 2**20:
            raise ValueError(f"too many parameters for one wrapped module: their messages need {tag} tags of {2**20}")

    def take_over(self, old: Schedule) -> None:
        """Go on where `old` was for its units: its settings, its hooks."""
        self.replaced.take(old.replaced)
        same = {unit: unit for unit in self.units}
        for unit, state in old.states.items():
            self.states[unit].take_settings(state, same)
        for hooks in old.hooks:
            hooks.schedule, hooks.is_root = self, False
            self.hooks.append(hooks)

    # -- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root's forward begins: what was recorded in the last one is now the expectation."""
        if self.in_backward:
            if is_backward_running():
                return  # a recomputation
            self.recover()  # the last backward ended in an exception that the caller has dealt with
        self._calls.begin_forward()
        for state in self.states.values():
            state.in_forward, state.kept = 0, False
        if self._order:
            self._last_order, self._order = self._order, []
        if self.keeps_gathered and any(unit.is_stale for unit in self.units):
            self.keeps_gathered = False  # the parameters changed, so that graph is of no use any more
            for unit in self.units:
                unit.release()

    def pre_forward(self, units: list[Unit]) -> Call:
        """Gather `units` for a forward (or for its recomputation in backward) and start on what comes next."""
        self.waits.progress.come_to(Phase.BACKWARD if self.in_backward else Phase.FORWARD, units[0].name)
        for unit in units:
            if not self.in_backward:
                unit.unmark_outdated()
                self.watch_gradients(unit)
            self.gather(unit)
            if not self.in_backward and not self.num_holds:
                self._record(unit)
        return self._calls.recompute(units) if self.in_backward else self._calls.begin(units)

    def _record(self, unit: Unit) -> None:
        """Remember the order, and gather ahead. Not while units are held: ranks may do different things then."""
        self.states[unit].in_forward += 1
        self._order.append(unit)
        chosen = self.states[unit].forward_prefetch
        for following in self._expected() if chosen is None else chosen:
            following.start_gather()

    def _expected(self) -> list[Unit]:
        """The unit whose forward comes next if this forward goes like the last one; none where it does not."""
        done = len(self._order)
        if done and done < len(self._last_order) and self._last_order[done - 1] is self._order[-1]:
            return [self._last_order[done]]
        return []

    def post_forward(self, call: Call, needs_gradient: bool, keep: bool) -> None:
        """Release units after a forward unless backward, or the very next forward, needs them at once.

        `keep`: a backward may follow that no hook tells of; they are released at the end of that.
        """
        if self.in_backward:
            return
        expected = torch.is_grad_enabled() and self._calls.end(call, needs_gradient)
        for unit in call.units:
            state = self.states[unit]
            state.kept |= keep
            state.in_forward = max(0, state.in_forward - 1)
            reshard = state.reshard_after_forward
            if reshard is None:
                at_end = unit is self.units[-1] or self._order == self._last_order
                reshard = not at_end and unit not in self._expected()
            if state.in_forward == 0 and (reshard or not expected):
                self._release(unit)

    def end_forward(self) -> None:
        """The root's forward ended. Without a backward to come nothing stays gathered."""
        if self.in_backward:
            return
        self.waits.progress.phase = Phase.AFTER_FORWARD
        for unit in self.units:
            if not self._calls.any_expected:
                self._release(unit)
            unit.exposed |= unit.state is State.GATHERED

    def gather(self, unit: Unit) -> None:
        """Gather `unit` now."""
        self.waits.start(self)
        with self.waits.during("gather", unit.name):
            unit.finish_gather()

    def _release(self, unit: Unit) -> None:
        if self.num_holds:
            return
        if self.keeps_gathered or self.states[unit].kept:
            unit.hide()
        else:
            unit.release()

    def hold(self) -> None:
        """Gather every unit and release none, until as many calls of `let_go`: forwards then communicate nothing."""
        self.num_holds += 1
        for unit in self.units:
            self.gather(unit)

    def let_go(self) -> None:
        self.num_holds -= 1
        for unit in self.units:
            self._release(unit)

    def _take_segments(self) -> None:
        """The segments of a unit are other ones: parameters were cast between two steps, or left the meta device."""
        if self.holds_sums:
            raise RuntimeError(
                "parameters were replaced while gradients of earlier microbatches wait to be reduced; change dtypes "
                "between steps"
            )
        self._tag_units(self.salt)
        self._gradients = None
        self.reductions = Reductions(self.units, self.waits)
        for unit in self.units:
            self.watch_gradients(unit)

    @property
    def holds_sums(self) -> bool:
        """Whether gradients of earlier microbatches wait to be reduced."""
        return self._gradients is not None and self._gradients.deferred

    def watch_gradients(self, unit: Unit) -> None:
        """Learn of the gradients of the parameters that require one now; freezing changes what is reduced."""
        changed = [segment.plan_gradients() for segment in unit.segments]
        if not any(changed):
            return
        if self.holds_sums:
            raise RuntimeError(
                f"requires_grad changed in unit {unit.name!r} while gradients of earlier microbatches wait to be "
                "reduced; freeze and unfreeze between steps"
            )
        self._gradients = None
        unit.watch_gradients()

    # -- backward ----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """The first event of a backward: see that its end is noticed, and what it has to reduce."""
        if self.in_backward:
            return
        self.in_backward = True
        self.num_backwards += 1
        call_after_backward(self._end_backward)
        for unit in self.units:
            unit.unmark_outdated()
        # Autograd leaves grad mode on in a backward with create_graph=True, and only then.
        self.creates_graph = torch.is_grad_enabled()
        self.keeps_gathered |= self.creates_graph
        if self.creates_graph:
            return
        self.gradients.begin()
        self.reductions.begin(self.gradients)

    @property
    def gradients(self) -> Gradients:
        if self._gradients is None:
            self._gradients = Gradients(self.units[::-1], self.column, BUCKET_BYTES)
        return self._gradients

    def pre_backward(self, call: Call) -> None:
        """Gradients reach an output of `call`."""
        self.enter_backward()
        for due in self._calls.reach(call):
            self._open(due)

    def post_backward(self, call: Call) -> None:
        """Gradients of the inputs of `call` are complete."""
        for due in self._calls.pass_by(call):
            self._open(due)
        for over in self._calls.leave(call):
            self._close(over)

    def _open(self, call: Call) -> None:
        """Gather the units of `call` and start on those of the one before."""
        for over in self._calls.open(call):
            self._close(over)
        self.waits.progress.come_to(Phase.BACKWARD, call.units[0].name)
        backwards = call.units[::-1]  # also here they come in the opposite order of forwards
        for unit in backwards:
            if self.states[unit].unshard_in_backward:
                self.gather(unit)
        for unit in backwards:
            chosen = self.states[unit].backward_prefetch
            for earlier in self._calls.next_units(call) if chosen is None else chosen:
                if self.states[earlier].unshard_in_backward:
                    earlier.start_gather()

    def _close(self, call: Call) -> None:
        """Reduce the units of `call` if no other call of them is to come, and release them if none comes soon.

        This moment is the same on all ranks; that of the last gradient is not if some ranks do not use a parameter. A
        tied parameter may get its gradient later, and waits for the end.
        """
        for unit in call.units:
            tied = any(len(param.owners) > 1 for param in unit.params)
            reduces = unit.row.size > 1 and unit.reduces and not (self.keeps_gathered or tied)
            if reduces and self._calls.is_over(unit):
                self.reductions.leave(unit)
            keeps = not self.states[unit].reshard_after_backward or (tied and self.reductions[unit].missing)
            if not keeps and self._calls.is_idle(unit, call.number):
                self._release(unit)

    def gradient_ready(self, unit: Unit, segment: Segment, i: int) -> None:
        """Autograd has the whole gradient of one gathered parameter."""
        self.enter_backward()
        if self.creates_graph:
            raise RuntimeError(
                f"parameter {segment.params[i].name!r} got a gradient in backward(create_graph=True), which sharding "
                "would cut from its graph; for a penalty on gradients of the inputs call "
                "torch.autograd.grad(outputs, inputs, create_graph=True), then backward() of the whole loss"
            )
        state = self.states[unit]
        reduction = self.reductions[unit]
        if reduction.sent:
            raise RuntimeError(
                f"parameter {segment.params[i].name!r} got a gradient in a backward that has reduced its unit already; "
                "a module used twice needs torch.utils.checkpoint with use_reentrant=False"
            )
        if unit.state is not State.GATHERED and not segment.in_place and state.unshard_in_backward:
            raise RuntimeError(
                f"parameter {segment.params[i].name!r} got a gradient while its unit was released: backward did not "
                "pass the unit's outputs, so the gradient was made from freed memory; return outputs as "
                "tensors, or in tuples, lists, dicts or dataclasses"
            )
        self.gradients.used(segment)[i] = True
        reduction.missing.discard((segment, i))
        if not unit.reduces:
            segment.keep_whole(i)
        elif segment.row.any_order and not segment.layout.slots[i].packed:
            self.reductions.send_direct(unit, segment, [i])
        if not reduction.missing and unit.reduces and unit.row.any_order:
            self.reductions.send_rest(unit)

    # -- the end of a backward ---------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        """Autograd's engine is done with one call of backward."""
        if not self.creates_graph:
            for due in self._calls.pass_by():
                self._open(due)
            for over in self._calls.leave_all():
                self._close(over)
            self.reductions.finish()
            with self.waits.during("cross-reduce", self.units[-1].name):
                self.gradients.finish()
            if synchronises := self.units[-1].reduces and self.units[-1].cross_reduces:
                self.ignored.reduce()
            self.waits.progress.finish_backward(synchronises)
        self.reset()
        if not self.keeps_gathered:  # a graph of a graph reaches parameters without passing any output
            for unit in self.units:
                unit.mark_outdated()
        self.replaced.mark()

    def recover(self) -> None:
        """Forget a forward or backward that ended in an exception, and the gradients it got as far as."""
        self.reductions.drop()
        for unit in self.units:
            for param in unit.params:
                param.gathered.grad = param.whole = None
        self._gradients = None
        for state in self.states.values():
            state.in_forward = 0
        self._order, self.keeps_gathered = [], False
        self._calls.end_backward(forget=True)
        self.waits.progress.recover()
        self.reset()

    def reset(self) -> None:
        """Back to the state between two steps: nothing runs, nothing is gathered but what must stay so.

        Where a forward takes a gradient on its way, only what runs in it stays as it is.
        """
        self.in_backward = False
        self.reductions.end()
        in_forward = any(state.in_forward for state in self.states.values())
        is_last = self.is_last_backward and not in_forward  # otherwise forwards still wait for their backward
        self._calls.end_backward(forget=is_last)
        if is_last and self._order:
            self._last_order, self._order = self._order, []
        for unit, state in self.states.items():
            if state.in_forward:
                continue
            state.kept = False
            if state.reshard_after_backward:
                self._release(unit)
                continue
            if unit.state is State.GATHERING:
                unit.finish_gather()
            if not self.num_holds:
                unit.hide()
