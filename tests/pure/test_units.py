"""Which modules become units, and which unit takes which parameter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hsdp.units import choose_units, own_modules, plan_group, plan_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Encoder(nn.Module):
    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(2)


class Model(nn.Module):
    """Blocks in a list inside of a module, a parameter of the root's own, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.encoder = Encoder()
        self.bias = nn.Parameter(torch.zeros(2))
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def names(model: nn.Module, units: Any = None) -> list[str]:
    return [name for name, _ in choose_units(model, units)]


def taken(model: nn.Module, units: Any = None, **options: Any) -> dict[str, list[str]]:
    return {
        plan.name: [param.name for param in plan.params] for plan in plan_units(choose_units(model, units), **options)
    }


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_the_repeated_block_is_found_and_not_what_repeats_inside_it() -> None:
    assert names(Model()) == ["encoder.layers.0", "encoder.layers.1", ""]


def test_children_come_before_parents_and_the_root_is_last() -> None:
    assert names(Model(), [Block, Encoder]) == ["encoder.layers.0", "encoder.layers.1", "encoder", ""]
    assert names(Model(), Model) == [""]


@pytest.mark.parametrize(
    "units",
    [
        Block,
        "Block",
        [Block],
        ("Block",),
        {"Block"},
        lambda module: isinstance(module, Block),
    ],
)
def test_every_way_to_name_units(units: Any) -> None:
    assert names(Model(), units) == ["encoder.layers.0", "encoder.layers.1", ""]


def test_a_mixture() -> None:
    mixed = names(
        Model(), [nn.Embedding, "Block", lambda module: isinstance(module, nn.Linear) and module.out_features == 3]
    )
    assert mixed == ["embed", "encoder.layers.0", "encoder.layers.1", "head", ""]


def test_subclasses_count_for_a_class_and_not_for_a_name() -> None:
    class Wide(Block):
        pass

    model = nn.Sequential(Wide(), nn.Linear(2, 2))
    assert names(model, Block) == ["0", ""]
    with pytest.raises(ValueError, match="units='Block' matches no module of Sequential"):
        names(model, "Block")


@pytest.mark.parametrize(
    ("model", "want"),
    [
        (nn.Linear(2, 2), [""]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ["0", "2", ""]),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), [""]),  # nothing stands there twice
        (nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2)), [""]),  # what repeats has no parameters
        (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), ["a", "b", ""]),
        (nn.ModuleList([Encoder(), Encoder()]), ["0", "1", ""]),  # the outermost
        (
            nn.ModuleDict({"one": Encoder(3), "two": nn.Linear(2, 2)}),
            ["one.layers.0", "one.layers.1", "one.layers.2", ""],
        ),
        (Encoder(1), ["layers.0.experts.0", "layers.0.experts.1", ""]),
    ],
)
def test_automatic_choice(model: nn.Module, want: list[str]) -> None:
    assert names(model) == want


def test_a_module_that_stands_in_two_places_is_one_unit() -> None:
    block = Block()
    assert names(nn.ModuleList([block, block, Block()])) == ["0", "2", ""]


@pytest.mark.parametrize("units", [None, Block, "Block"], ids=["automatic", "class", "name"])
def test_a_compiled_module_takes_the_place_of_the_one_it_wraps(units: Any) -> None:
    model = Model()
    for i in range(2):
        model.encoder.layers[i] = torch.compile(model.encoder.layers[i], backend="eager")  # type: ignore[call-overload]
    assert names(model, units) == ["encoder.layers.0", "encoder.layers.1", ""]
    assert [len(params) for params in taken(model, units).values()] == [6, 6, 4]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ("Decoder", r"units='Decoder' matches no module of Model; its classes: \['Block', 'Embedding', 'Encoder'"),
        (nn.Conv2d, "matches no module"),
        ([Block, "Decoder"], "units='Decoder' matches no module"),
        (lambda module: False, "matches no module"),
        (3, "units=3: expected module classes, class names, a predicate, or None"),
        (int, "expected module classes"),
        ([None], r"units=None: expected"),
    ],
)
def test_units_that_name_nothing_are_refused(units: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_units(Model(), units)


# ---- who takes what --------------------------------------------------------------------------------------------------


def test_every_parameter_is_taken_once_by_the_innermost_unit() -> None:
    got = taken(Model(), [Block, Encoder])
    block = ["norm.weight", "norm.bias", "experts.0.weight", "experts.0.bias", "experts.1.weight", "experts.1.bias"]
    assert got == {
        "encoder.layers.0": [f"encoder.layers.0.{name}" for name in block],
        "encoder.layers.1": [f"encoder.layers.1.{name}" for name in block],
        "encoder": ["encoder.norm.weight", "encoder.norm.bias"],
        "": ["bias", "embed.weight"],
    }
    assert sorted(itertools.chain(*got.values())) == sorted(name for name, _ in Model().named_parameters())


def test_a_tied_parameter_in_one_unit_has_two_owners() -> None:
    model = Model()
    (root,) = [plan for plan in plan_units(choose_units(model, None)) if plan.name == ""]
    (embed,) = [param for param in root.params if param.name == "embed.weight"]
    assert embed.owners == [(model.embed, "weight"), (model.head, "weight")]
    assert root.ties == []


def test_a_parameter_tied_over_two_units_belongs_to_the_first() -> None:
    model = Model()
    plans = {plan.name: plan for plan in plan_units(choose_units(model, [nn.Embedding, lambda m: m is model.head]))}
    assert [param.name for param in plans["embed"].params] == ["embed.weight"]
    assert plans["embed"].params[0].owners == [(model.embed, "weight"), (model.head, "weight")]
    assert plans["head"].params == []
    assert plans["head"].ties == [plans["embed"]]
    assert plans[""].ties == []


def test_the_same_parameter_twice_in_one_module() -> None:
    module = nn.Module()
    module.a = module.b = nn.Parameter(torch.zeros(2))
    (plan,) = plan_units([("", module)])
    assert [param.name for param in plan.params] == ["a"]
    assert plan.params[0].owners == [(module, "a"), (module, "b")]


def test_a_shared_module_is_taken_by_both_units_that_hold_it() -> None:
    shared = nn.Linear(2, 2)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.LayerNorm(2))
    model = nn.ModuleDict({"first": first, "second": second})
    plans = {plan.name: plan for plan in plan_units(choose_units(model, [lambda m: m in (first, second)]))}
    assert [param.name for param in plans["first"].params] == ["first.0.weight", "first.0.bias"]
    assert plans["first"].params[0].owners == [(shared, "weight")]
    assert [param.name for param in plans["second"].params] == ["second.1.weight", "second.1.bias"]
    assert plans["second"].ties == [plans["first"]]


def test_ignored_and_skipped() -> None:
    model = Model()
    got = taken(model, None, ignored=[model.bias, model.encoder.norm.weight])
    assert got[""] == ["embed.weight", "encoder.norm.bias"]
    got = taken(model, Model, skip=lambda module: isinstance(module, Block))
    assert got == {"": ["bias", "embed.weight", "encoder.norm.weight", "encoder.norm.bias"]}


def test_a_group_of_modules_is_one_unit() -> None:
    model = Model()
    plan = plan_group([model.encoder.norm, model.head], (), lambda module: False)
    assert (plan.names, plan.modules) == (["0", "1"], [model.encoder.norm, model.head])
    assert [param.name for param in plan.params] == ["0.weight", "0.bias", "1.weight"]
    alone = plan_group([model.head], (), lambda module: False)
    assert (alone.names, [param.name for param in alone.params]) == ([""], ["weight"])


def test_own_modules_stop_at_other_units() -> None:
    model = Model()
    plans = plan_units(choose_units(model, Block))
    assert [name for name, _ in own_modules(model, "", plans)] == [
        "embed",
        "encoder.layers",
        "encoder.norm",
        "encoder",
        "head",
        "",
    ]
    block = model.encoder.layers[0]
    assert [name for name, _ in own_modules(block, "b", plans)] == [
        "b.norm",
        "b.experts.0",
        "b.experts.1",
        "b.experts",
        "b",
    ]
