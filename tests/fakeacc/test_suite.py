"""The parity suite of tests/cpu once more, with every rank on the fake accelerator and the race checker on.

Its plain processes, which everything is compared with, stay on the CPU. Of its meshes those that differ in kind run.
"""

from __future__ import annotations

import pytest
from test_parity import *  # noqa: F403 - its tests are collected here again

pytestmark = pytest.mark.usefixtures("on_fakeacc")
