"""The fake accelerator is built once a session; tests that use it are skipped with the reason where it cannot be."""

from __future__ import annotations

import fakeacc_build
import harness
import pytest

SUITE = "test_suite.py"
SUITE_MESHES = [(2, 2), (4, 1), (1, 4)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the suite that runs once more here, leave out the other meshes."""
    left_out = [item for item in items if item.path.name == SUITE and _mesh_of(item) not in (None, *SUITE_MESHES)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _mesh_of(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("mesh")


@pytest.fixture(scope="session")
def fakeacc_folder() -> str:
    """The folder with the compiled fake accelerator."""
    try:
        return str(fakeacc_build.build())
    except fakeacc_build.BuildError as error:
        pytest.skip(f"no fake accelerator: {error}")


@pytest.fixture
def fakeacc_at_hand(fakeacc_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may `import fakeacc`."""
    monkeypatch.setenv(fakeacc_build.FOLDER_VARIABLE, fakeacc_folder)


@pytest.fixture
def on_fakeacc(fakeacc_at_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a default group make their tensors on the fake accelerator, and fail where it saw a race."""
    monkeypatch.setattr(harness, "device_type", "fakeacc")
