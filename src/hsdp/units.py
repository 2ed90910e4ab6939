"""Which modules become units, and which parameters each unit takes. Reads a model, changes nothing.

Transformer                      unit ""          what no unit below takes: embed, norm, head
  embed
  blocks.0  Block                unit "blocks.0"
  blocks.1  Block                unit "blocks.1"
  norm, head
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hsdp.param import Param
from hsdp.unit import Unit, find_tie

UnitsArgument = Any  # a class, a class name, a predicate on modules, a sequence of classes and names, or None


@dataclass
class UnitPlan:
    """One unit to be: the modules that are gathered together, usually one, and their parameters."""

    names: list[str]
    modules: list[nn.Module]
    params: list[Param] = field(default_factory=list)
    ties: list[UnitPlan] = field(default_factory=list)  # other units that own a parameter this one uses as well
    foreign_ties: list[Unit] = field(default_factory=list)  # the same, units that were wrapped before

    @property
    def name(self) -> str:
        return self.names[0]


def choose_units(model: nn.Module, units: UnitsArgument) -> list[tuple[str, nn.Module]]:
    """The modules that become units, with their names, children before parents; the model itself is always the last.

    Args:
        units: a module class or class name, a sequence of them, a predicate `module -> bool`, or `None` for the
            repeated block: the outermost modules of one class that stand more than once in a container.

    Raises:
        ValueError: `units` is something else, or names nothing in the model.
    """
    chosen = _repeated_blocks(model) if units is None else _named_units(model, units)
    chosen.discard(id(model))
    return [(name, module) for name, module in _post_order(model, "") if id(module) in chosen or module is model]


def _post_order(module: nn.Module, name: str, seen: set[int] | None = None) -> Iterable[tuple[str, nn.Module]]:
    """All modules once, children before parents, otherwise in the order they are registered."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child_name, child in module.named_children():
        yield from _post_order(child, f"{name}.{child_name}" if name else child_name, seen)
    yield name, module


def _repeated_blocks(model: nn.Module) -> set[int]:
    chosen: set[int] = set()

    def visit(module: nn.Module) -> None:
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        counts: dict[type, list[nn.Module]] = {}
        for child in children:
            counts.setdefault(type(child), []).append(child)
        repeated: set[int] = set()
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            for same in counts.values():
                if len(same) > 1:
                    repeated |= {id(child) for child in same}
        chosen.update(repeated)
        for child in children:
            if id(child) not in repeated:
                visit(child)

    visit(model)
    return chosen


def _named_units(model: nn.Module, units: UnitsArgument) -> set[int]:
    wanted: Sequence[Any] = list(units) if isinstance(units, (list, tuple, set, frozenset)) else [units]
    chosen: set[int] = set()
    for item in wanted:
        matches = _matcher(item)
        # A compiled module wraps the one the user means, and takes its place in the model.
        wrapped = {id(module._orig_mod) for module in model.modules() if hasattr(module, "_orig_mod")}
        found = {
            id(module)
            for module in model.modules()
            if id(module) not in wrapped and matches(getattr(module, "_orig_mod", module))
        }
        if not found:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"units={item!r} matches no module of {type(model).__name__}; its classes: {classes}")
        chosen |= found
    return chosen


def _matcher(item: Any) -> Callable[[nn.Module], bool]:
    if isinstance(item, str):
        return lambda module: type(module).__name__ == item
    if isinstance(item, type) and issubclass(item, nn.Module):
        return lambda module: isinstance(module, item)
    if callable(item) and not isinstance(item, type):
        return lambda module: bool(item(module))
    raise ValueError(
        f"units={item!r}: expected module classes, class names, a predicate, or None for the repeated block"
    )


def plan_units(
    chosen: Sequence[tuple[str, nn.Module]],
    ignored: Collection[nn.Parameter] = (),
    skip: Callable[[nn.Module], bool] = lambda module: False,
) -> list[UnitPlan]:
    """Give every parameter below the last chosen module, the root, to one unit: the innermost chosen module above it.

    A parameter tied over several places is one `Param` with all its places as owners. Places in other units make those
    units depend on the one that owns it.

    Args:
        ignored: parameters that no unit takes.
        skip: modules not to look into, because they were wrapped before.
    """
    plans = [UnitPlan([name], [module]) for name, module in chosen]
    plan_of = {id(plan.modules[0]): plan for plan in plans}
    root_name, root = chosen[-1]
    _Claims(set(ignored), skip, plan_of).visit(root, root_name, plans[-1])
    return plans


def plan_group(
    modules: Sequence[nn.Module], ignored: Collection[nn.Parameter], skip: Callable[[nn.Module], bool]
) -> UnitPlan:
    """One unit over several modules; several names are told apart by their place in the list."""
    names = [""] if len(modules) == 1 else [str(place) for place in range(len(modules))]
    plan = UnitPlan(names, list(modules))
    claims = _Claims(set(ignored), skip, {id(module): plan for module in modules})
    for name, module in zip(names, modules, strict=True):
        claims.visit(module, name, plan)
    return plan


class _Claims:
    """Walks modules and hands every parameter to the unit it belongs to."""

    def __init__(
        self, ignored: set[nn.Parameter], skip: Callable[[nn.Module], bool], plan_of: dict[int, UnitPlan]
    ) -> None:
        self._ignored, self._skip, self._plan_of = ignored, skip, plan_of
        self._owned: dict[nn.Parameter, tuple[Param, UnitPlan]] = {}
        self._seen: set[tuple[int, int]] = set()

    def visit(self, module: nn.Module, name: str, plan: UnitPlan) -> None:
        if (id(module), id(plan)) in self._seen:
            return
        self._seen.add((id(module), id(plan)))
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter not in self._ignored:
                self._claim(parameter, module, attribute, f"{name}.{attribute}" if name else attribute, plan)
        for child_name, child in module.named_children():
            if not self._skip(child):
                full = f"{name}.{child_name}" if name else child_name
                self.visit(child, full, self._plan_of.get(id(child), plan))

    def _claim(self, parameter: nn.Parameter, module: nn.Module, attribute: str, name: str, plan: UnitPlan) -> None:
        if (wrapped := find_tie(parameter)) is not None:
            tied, unit = wrapped
            tied.owners.append((module, attribute))
            tied.show(tied.sharded)
            if unit not in plan.foreign_ties:
                plan.foreign_ties.append(unit)
        elif parameter in self._owned:
            param, owner = self._owned[parameter]
            if (module, attribute) not in param.owners:
                param.owners.append((module, attribute))
            if owner is not plan and owner not in plan.ties:
                plan.ties.append(owner)
        else:
            param = Param(name, [(module, attribute)], parameter)
            plan.params.append(param)
            self._owned[parameter] = (param, plan)


def own_modules(module: nn.Module, name: str, plans: Iterable[UnitPlan]) -> list[tuple[str, nn.Module]]:
    """`module` and those below it that belong to no other unit, with names, children before parents."""
    others = {id(other) for plan in plans for other in plan.modules if other is not module}

    def walk(current: nn.Module, current_name: str, seen: set[int]) -> Iterable[tuple[str, nn.Module]]:
        if id(current) in others or id(current) in seen:
            return
        seen.add(id(current))
        for child_name, child in current.named_children():
            yield from walk(child, f"{current_name}.{child_name}" if current_name else child_name, seen)
        yield current_name, current

    return list(walk(module, name, set()))
