"""Use a checkout of Miles instead of its release.

Its rollout side runs on a CPU as it is, but two imports of SGLang do not:

- ``sglang/__init__`` imports the whole inference engine, which needs CUDA kernels. Miles wants a few modules of it, the
  chat-completions protocol and the tool-call parsers, so ``sglang`` becomes a package with nothing but its folder.
- ``miles.utils.dumper_utils`` imports SGLang's tensor dumper, a debugging aid that imports the engine too. It is off
  unless ``--dumper-enable`` is given; here it cannot be switched on.

Nothing of Miles is replaced.
"""

import sys
import types
from pathlib import Path

_DUMPER = "sglang.srt.debug_utils.dumper"


def use_checkout(miles: Path, *, packages: Path) -> None:
    """Make ``import miles`` mean a checkout; called before anything of Miles is imported.

    Args:
        miles: the checkout.
        packages: virtual environment with the SGLang that it is written against.

    Raises:
        FileNotFoundError: either is missing.
    """
    if not (miles / "miles" / "rollout" / "session" / "v2").is_dir():
        raise FileNotFoundError(f"MILES={miles}: expected a checkout of Miles that has session server v2")
    site_packages = next(packages.glob("lib/python3.*/site-packages"), packages)
    if not (site_packages / "sglang").is_dir():
        raise FileNotFoundError(f"expected SGLang in {packages}, found none")
    sys.path[:0] = [str(miles), str(site_packages)]

    sglang = types.ModuleType("sglang")
    sglang.__path__ = [str(site_packages / "sglang")]
    dumper = types.ModuleType(_DUMPER)
    dumper.DumperConfig, dumper.dumper, dumper._get_rank = _NothingConfigured, None, None
    sys.modules.update({"sglang": sglang, _DUMPER: dumper})


class _NothingConfigured:
    """The dumper's configuration where none of its options is given."""

    @staticmethod
    def _kv_pairs_to_dict(pairs: None) -> dict:
        assert pairs is None
        return {}
