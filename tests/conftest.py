"""What every test may rely on. Rank processes are harness.py's business; see there."""

from __future__ import annotations
