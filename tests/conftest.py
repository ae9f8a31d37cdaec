"""What every test shares: the scripts on the path, one thread, no network, and nothing written outside
tmp_path but data/tokenizer/."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # two tests run side by side, and sums are the same everywhere
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a hub brings its own on 127.0.0.1
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def environment_as_before():
    """What a test or the program sets in it is gone afterwards: tests do not see each other's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# A shell that starts a suite in the background has it ignore these, and so would every process that a test
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
