"""Offline tests of the NeMo Gym example.

The example's folder, ``nemo-gym``, is no Python identifier, and Miles loads its modules by bare name from PYTHONPATH;
``EXAMPLE_DIR`` is what conftest puts on sys.path so that the tests do the same.
"""

from pathlib import Path

EXAMPLE_DIR = Path(__file__).resolve().parents[5] / "examples" / "experimental" / "nemo-gym"
