"""Run PyTorch's own tests of `fully_shard` against `hsdp.fully_shard`, on CPU.

    python tools/torch_tests.py CHECKOUT [--only training --only state] [--match tied]

CHECKOUT is a clone of pytorch/pytorch at the tag of the torch that is installed; nothing in it is changed. Every test
runs in a process of its own, over copies of the files that substitute the engine before they import it. Printed is what
passed, what failed, and what is not applicable and why. Exits with 1 if a test failed, or passed although it is listed
as not applicable.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

FOLDER = Path("test/distributed/_composable/fsdp")
FILES = (
    "training",
    "init",
    "state",
    "state_dict",
    "clip_grad_norm_",
    "frozen",
    "autograd",
    "ignore_params",
    "mixed_precision",
)
PRIVATE = "asserts on FSDP2's private names"
COUNTS = "asserts on the number of FSDP2's collectives"
WORDING = "asserts on the wording of FSDP2's error; hsdp raises one of its own"
REFUSAL = "asserts that FSDP2 refuses what hsdp does"
ACCELERATOR = "needs an accelerator"
ON_CPU = f"{ACCELERATOR}: FSDP2 itself fails it on CPU"
NOT_APPLICABLE = {
    "TestFullyShard1DTrainingCompose.test_partial_group_reshard_toggle": f"{PRIVATE}: _fsdp_param_group",
    "TestFullyShardGradientAccumulation.test_gradient_accumulation": COUNTS,
    "TestFullyShardNDTraining.test_shard_placement_fn_tp_ep": f"{PRIVATE}: ShardPlacementResult, FSDPMeshInfo",
    "TestFullyShardRegisteredParams.test_modules_to_run_forward_empty_for_single_module": f"{PRIVATE}: _get_fsdp_state",
    "TestFullyShardShareCommContext.test_share_comm_context": f"{PRIVATE}: _get_fsdp_state, foreach_all_gather",
    "TestFullyShardSharedParams.test_shared_params_separate_fsdp_groups_error": f"{REFUSAL}: a tie across units",
    "TestFullyShardState.test_fully_shard_cls": f"{PRIVATE}: the class is called FSDP...",
    "TestFullyShardState.test_fully_shard_deepcopy": f"{REFUSAL}: deepcopy",
    "TestFullyShardState.test_fully_shard_reapply": WORDING,
    "TestFullyShardState.test_fully_shard_state": f"{PRIVATE}: .state",
    "TestFullyShardState.test_fully_shard_unsupported_module_cls": WORDING,
    "TestFullyShardDeviceDTensor.test_move_states_to_device_dtensor_invalid": ON_CPU,
    "TestFullyShardLazyInit.test_fully_shard_double_lazy_init": f"{PRIVATE}: .state, _lazy_init",
    "TestFullyShardLazyInit.test_fully_shard_is_root": f"{PRIVATE}: .state, _lazy_init",
    "TestFullyShardLazyInit.test_fully_shard_module_and_param_fqns": f"{PRIVATE}: .state, _lazy_init",
    "TestFullyShardLazyInit.test_fully_shard_multi_module_root": f"{PRIVATE}: .state, _lazy_init",
    "TestFullyShardManagedModulesAndStates.test_managed_modules_nested": f"{PRIVATE}: _get_managed_modules",
    "TestFullyShardManagedModulesAndStates.test_managed_modules_nested_fully_shard_and_replicate": (
        f"{PRIVATE}: _get_managed_modules"
    ),
    "TestFullyShardManagedModulesAndStates.test_managed_states_nested_fully_shard": f"{PRIVATE}: _get_managed_states",
    "TestFullyShardMeshArg.test_2d_mesh_without_mesh_dim_names": f"{REFUSAL}: axes without names",
    "TestFullyShardMeshArg.test_invalid_mesh_ndim": WORDING,
    "TestFullyShardMetaDeviceInit.test_invalid_meta_device_init": WORDING,
    "TestFullyShardShardPlacementFn.test_init_1d_uneven_shard_largest_dim": f"{REFUSAL}: another dim cut unevenly",
    "TestFullyShardShardPlacementFn.test_invalid_shard_dim": WORDING,
    "TestFullyShardShardedParameterTensor.test_raise_noncontiguous_parameter": f"{REFUSAL}: strided parameters",
    "TestFullyShardShardedParameterTensor.test_raise_scalar_parameter": f"{REFUSAL}: parameters without dims",
    "TestHSDPWithCustomHook.test_custom_hook_custom_stream": f"{ACCELERATOR}: streams",
    "TestFullyShardStateDictMultiProcess.test_dp_state_dict_cpu_offload": f"{ACCELERATOR}: offloading from it",
    "TestClipGradNormWorldSize4.test_clip_grad_norm_2d": f"{ON_CPU}, by rounding",
    "TestFullyShardFrozen.test_train_mixed_requires_grad_across_groups": f"{PRIVATE}: RegisterPostBackwardFunction",
    "TestFullyShardFrozen.test_train_mixed_requires_grad_per_group": f"{PRIVATE}: RegisterPostBackwardFunction",
    "TestFullyShardMixedPrecisionCasts.test_norm_modules_bf16": ON_CPU,
    "TestFullyShardMixedPrecisionCasts.test_norm_modules_fp16": ON_CPU,
    "TestFullyShardMixedPrecisionTraining.test_reduce_dtype_after_frozen_first_forward": f"{PRIVATE}: .state",
}
KINDS = ("passed", "failed", "not applicable")
TIMEOUT_S = 300
ENGINE = "TORCH_TESTS_ENGINE"
# A device of the kind that has indices; CPU has none, and torch.cpu.current_device() is a text.
INDEXED = re.compile(
    r"torch\.device\(\s*device_type\.type,\s*torch\.get_device_module\(\w+\)\.current_device\(\),?\s*\)"
)
PROLOGUE = "import torch_tests; torch_tests.substitute()\n"


def substitute() -> None:
    """Put hsdp where the tests import FSDP2 from, and let tests marked for accelerators run without one."""
    import torch
    import torch.distributed.fsdp as fsdp
    from torch.distributed import _composable
    from torch.testing._internal import common_device_type, common_distributed

    import hsdp

    @functools.wraps(hsdp.fully_shard)
    def fully_shard(module: Any, **options: Any) -> Any:
        # FSDP2 leaves ranks that start different as they are, and threads draw from one random stream.
        return hsdp.fully_shard(module, sync_replicas=False, **options)

    if os.environ.get(ENGINE) != "fsdp2":
        replacements: dict[str, Any] = {
            "fully_shard": fully_shard,
            "FSDPModule": hsdp.HSDPModule,
            "register_fsdp_forward_method": hsdp.register_forward_method,
        }
        for name, replacement in replacements.items():
            setattr(fsdp, name, replacement)
            setattr(fsdp._fully_shard, name, replacement)

    def run_anyway(*_: Any, **__: Any) -> Any:
        return lambda test: test

    def replicate(module: Any, *args: Any, device_ids: Any = None, **options: Any) -> Any:
        return on_device(module, *args, **options)  # device_ids are for accelerators

    composable: Any = _composable
    on_device, composable.replicate = composable.replicate, replicate
    common_distributed.skip_if_lt_x_gpu = common_distributed.requires_nccl_version = run_anyway
    # Classes that are made per kind of device, but not for CPU, stay the plain ones they are.
    common_device_type.instantiate_device_type_tests = lambda *_, **__: None
    torch.accelerator.device_count = lambda: 99


def on_cpu(source: str) -> str:
    """The source of a test file for a machine without accelerators, where it does not ask what there is."""
    source = INDEXED.sub("torch.device(device_type.type)", source)
    source = source.replace('DISTRIBUTED_BACKEND != "nccl"', "False")  # gloo has what these tests need
    return source if "device_type" in source else source.replace('"cuda"', '"cpu"').replace(".cuda()", ".cpu()")


def prepare(checkout: Path, scratch: Path, names: list[str]) -> list[str]:
    """Copies of the test files that begin with the substitution; returns the ids of their tests."""
    for name in names:
        source = (checkout / FOLDER / f"test_fully_shard_{name}.py").read_text()
        (scratch / f"test_fully_shard_{name}.py").write_text(PROLOGUE + on_cpu(source))
    sys.path.insert(0, str(scratch))
    suite = unittest.defaultTestLoader.loadTestsFromNames([f"test_fully_shard_{name}" for name in names])
    return [test.id() for test in _flatten(suite)]


def _flatten(suite: Any) -> Iterator[Any]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flatten(each)
        else:
            yield each


def run_one(test: str, scratch: Path) -> tuple[str, str]:
    """Run one test in a process of its own: ("passed" | "failed" | "skipped", what it printed or why)."""
    path = os.pathsep.join([str(scratch), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "unittest", "-v", test]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=scratch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "failed", f"did not end in {TIMEOUT_S} s"
    skipped = re.search(r"skipped ['\"](.*)['\"]", output)
    if process.returncode == 0:
        return ("skipped", skipped[1]) if skipped else ("passed", "")
    return "failed", output


def verdict(test: str, outcome: str) -> str:
    """What an outcome counts as."""
    reason = NOT_APPLICABLE.get(test.split(".", 1)[1])
    if reason is not None:
        return "failed" if outcome == "passed" else "not applicable"
    return "not applicable" if outcome == "skipped" else outcome


def main(
    checkout: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="a clone of pytorch/pytorch")],
    only: Annotated[list[str] | None, typer.Option(help=f"one of: {', '.join(FILES)}; may be repeated")] = None,
    match: Annotated[str, typer.Option(help="part of the names of the tests to run")] = "",
    jobs: Annotated[int, typer.Option(help="tests that run at the same time")] = 2,
    engine: Annotated[str, typer.Option(help="hsdp, or fsdp2: what fails on CPU anyway")] = "hsdp",
    verbose: Annotated[bool, typer.Option(help="print what failed tests printed")] = False,
) -> None:
    """Run PyTorch's tests of fully_shard against hsdp.fully_shard."""
    os.environ[ENGINE] = engine
    substitute()
    console = Console(soft_wrap=True)
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as folder, ThreadPoolExecutor(jobs) as pool:
        scratch = Path(folder)
        tests = [test for test in prepare(checkout, scratch, only or list(FILES)) if match in test]
        results = pool.map(lambda test: run_one(test, scratch), tests)
        for test, (outcome, detail) in track(zip(tests, results, strict=True), total=len(tests), console=console):
            counted = verdict(test, outcome)
            row = counts.setdefault(test.split(".")[0], dict.fromkeys(KINDS, 0))
            row[counted] += 1
            if counted == "failed":
                listed = " although it is listed as not applicable" if outcome != "failed" else ""
                console.print(f"{outcome}{listed}: {test}", markup=False, highlight=False)
                if verbose:
                    console.print(detail, markup=False, highlight=False)
            elif counted == "not applicable":
                reason = NOT_APPLICABLE.get(test.split(".", 1)[1], f"{ACCELERATOR} ({detail})")
                console.print(f"not applicable: {test}: {reason}", markup=False, highlight=False)
    table = Table("file", *KINDS)
    for name, row in counts.items():
        table.add_row(name, *(str(count) for count in row.values()))
    table.add_row("all", *(str(sum(row[kind] for row in counts.values())) for kind in KINDS))
    console.print(table)
    raise typer.Exit(1 if any(row["failed"] for row in counts.values()) else 0)


if __name__ == "__main__":
    typer.run(main)
