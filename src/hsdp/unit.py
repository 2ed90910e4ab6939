"""Unit: a module whose parameters are gathered together, as a small state machine over its segments.

    sharded --start_gather--> gathering --finish_gather--> gathered --release--> sharded

Knows its own memory and messages, not the order of events: when to gather, prefetch, reduce and release is the
schedule's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.collectives import Row
from hsdp.outdated import OutdatedGrad, outdated_full
from hsdp.param import TIE, Param
from hsdp.pending import Pending
from hsdp.precision import Precision
from hsdp.segment import Segment


class State(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


def find_tie(parameter: nn.Parameter) -> tuple[Param, Unit] | None:
    """What a parameter became, if a unit has taken it already under another name; that is how ties are found."""
    param_ref, unit_ref = getattr(parameter, TIE, (None, None))
    param, unit = (param_ref(), unit_ref()) if param_ref is not None and unit_ref is not None else (None, None)
    return (param, unit) if param is not None and unit is not None and param.sharded is not parameter else None


class Unit:
    """The parameters of `module` that no unit below it has taken.

    Args:
        name: qualified name of the module from the wrapped root; "" for the root.
        index: place of the unit among the units of its schedule; names its messages.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        params: list[Param],
        mesh: DeviceMesh,
        row: Row,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.name, self.modules, self.mesh, self.precision, self.row = name, modules, mesh, precision, row
        self.device = device
        self.segments = self._segments_of(params)
        self.state = State.SHARDED
        self.tag = 0  # set by the schedule: the first tag of this unit's messages
        self.reduces = True  # False: a backward leaves gradients whole and communicates nothing
        self.cross_reduces = True  # False: a backward reduces inside the row only
        self.divide_factor: float = mesh.size()
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None  # the user's, on final sums
        self.listener: Callable[[Unit, Segment, int], None] | None = None  # hears of every complete gradient
        self.changed: Callable[[], None] | None = None  # called when the segments are other ones
        self.before_first_gather: Callable[[Unit], None] | None = None
        self.exposed = False  # whether full parameters were seen outside of forward and backward
        self._outdated: list[OutdatedGrad | None] = []  # for the full forms, made when first needed
        self._marked = False
        self._shown = False  # whether the modules see the full parameters
        self._pending: list[Pending] = []

    def _segments_of(self, params: list[Param]) -> list[Segment]:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], list[Param]] = {}
        for param in params:
            dtype = param.sharded.dtype
            groups.setdefault((dtype, param.gathered_dtype or dtype, param.sharded.is_meta), []).append(param)
            setattr(param.sharded, TIE, (weakref.ref(param), weakref.ref(self)))
        segments = []
        for (*_, is_meta), group in groups.items():
            device = torch.device("meta") if is_meta else self.device
            segments.append(Segment(group, self.mesh, self.row, self.precision, device))
        return segments

    def adopt(self) -> None:
        """Take up parameters that a user's call replaced, cast, or made real that were on the meta device."""
        changed = [segment.adopt() for segment in self.segments]
        if not any(changed):
            return
        self.release()
        params = self.params
        for param in params:
            param.gathered_dtype = self.precision.param_dtype(param.name, param.sharded)
        self.segments = self._segments_of(params)
        self._outdated, self._marked = [], False
        if self.changed is not None:
            self.changed()

    @property
    def is_meta(self) -> bool:
        """Whether parameters are still on the meta device."""
        return any(segment.shard.is_meta for segment in self.segments)

    @property
    def params(self) -> list[Param]:
        return [param for segment in self.segments for param in segment.params]

    @property
    def gathered_bytes(self) -> int:
        """Memory of the gathered form."""
        return sum(segment.gathered_bytes for segment in self.segments)

    @property
    def num_tags(self) -> int:
        """Tags that the messages of one gather or one reduction need."""
        return sum(len(segment.params) + 1 for segment in self.segments)

    @property
    def is_stale(self) -> bool:
        """Whether full parameters exist that are not what the shards hold now."""
        return self.state is State.GATHERED and any(segment.is_stale for segment in self.segments)

    def start_gather(self) -> None:
        """Start making the full parameters exist; nothing to do where they do or will, as they are now."""
        if self.is_stale:
            self.release()  # kept for a backward that never came, or on the user's wish
        if self.state is not State.SHARDED:
            return
        self.adopt()
        if self.is_meta:
            names = ", ".join(param.name for param in self.params if param.sharded.is_meta)
            raise RuntimeError(
                f"{names}: still on the meta device; call model.to_empty(device=...) and initialise, load a state dict "
                "with assign=True, or give init= when wrapping"
            )
        if self.before_first_gather is not None:
            self.before_first_gather(self)
            self.before_first_gather = None
        tag = self.tag
        for segment in self.segments:
            self._pending.append(segment.start_gather(tag))
            tag += len(segment.params) + 1
        self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Wait until the full parameters exist and let the modules see them."""
        self.start_gather()
        if self.state is State.GATHERING:
            for segment, pending in zip(self.segments, self._pending, strict=True):
                segment.finish_gather(pending)
            self.state = State.GATHERED
        if not self._shown:
            for param in self.params:
                param.show(param.gathered)
            self._shown = True

    def hide(self) -> None:
        """Let the modules see the sharded parameters, also where the full ones stay."""
        if self._shown:
            for param in self.params:
                param.show(param.sharded)
            self._shown = False

    def release(self) -> None:
        """Make the full parameters vanish; the modules see the sharded ones again."""
        if self.state is State.SHARDED:
            return
        for pending in self._pending:
            pending.drain()
        self._pending = []
        for segment in self.segments:
            segment.free()
        self.hide()
        self.state = State.SHARDED

    def mark_outdated(self) -> None:
        """Between two steps: whoever made an optimizer from full parameters gets an error from its `step()`."""
        if not self.exposed:
            return
        if not self._outdated:
            self._outdated = [
                outdated_full(param.gathered, param.name)
                if param.gathered.is_floating_point() and param.inner is None
                else None
                for param in self.params
            ]
        for param, grad in zip(self.params, self._outdated, strict=True):
            param.gathered.grad = grad
        self._marked = True

    def unmark_outdated(self) -> None:
        """Before autograd, or the module itself, uses the full parameters again."""
        if self._marked:
            for param in self.params:
                param.gathered.grad = None
            self._marked = False

    def watch_gradients(self) -> None:
        """Tell the listener whenever autograd has accumulated the gradient of a trainable parameter."""
        this = weakref.ref(self)  # the hook lives as long as the parameter, the unit need not

        def watch(segment_number: int, i: int) -> Callable[[torch.Tensor], None]:
            def ready(_: torch.Tensor) -> None:
                unit = this()
                if unit is not None and unit.listener is not None:
                    unit.listener(unit, unit.segments[segment_number], i)

            return ready

        for number, segment in enumerate(self.segments):
            for i in segment.grads.offsets:
                param = segment.params[i]
                if not param.watched:
                    param.gathered.register_post_accumulate_grad_hook(watch(number, i))
                    param.watched = True
