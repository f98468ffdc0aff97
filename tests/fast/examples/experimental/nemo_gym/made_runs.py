"""Made-up training runs in the forms in which Miles leaves them: events, samples, a log; the same at every call."""

import json
import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def metrics_of_step(step: int, chosen: random.Random) -> dict[str, float]:
    """What Miles and ``nemogym_generate.log_rollout`` log of one rollout of a run that learns."""
    reward = min(0.2 + 0.006 * step + chosen.uniform(-0.05, 0.05), 0.95)
    metrics = {
        "rollout/raw_reward": reward,
        "rollout/nemo_gym/kept_groups": 16.0,
        "rollout/nemo_gym/exit_status/Submitted": float(150 + chosen.randint(-20, 20)),
        "rollout/nemo_gym/exit_status/LimitsExceeded": float(max(60 - step, 5)),
        "rollout/nemo_gym/exit_status/SandboxUnavailable": 24.0 if 18 <= step < 22 else 0.0,
        "rollout/dynamic_filter/drop_zero_std_0.0": chosen.randint(6, 12) - step // 8,
        "rollout/dynamic_filter/drop_zero_std_1.0": step // 12,
        "rollout/response_len/mean": 2048.5,
        "rollout/step": step,
    }
    if 18 <= step < 22:
        metrics["rollout/dynamic_filter/drop_no_verdict_SandboxUnavailable"] = 5
    return metrics


def write_events(folder: Path, metrics: list[Mapping[str, Any]]) -> Path:
    """A dump of --dump-details with nothing but metrics in it."""
    (folder / "events").mkdir(parents=True)
    lines = [{"type": "metric", "source": {"component": "rollout_manager"}, "metrics": of} for of in metrics]
    other = {"type": "cell_reconfigure", "rollout_id": 1}
    text = "".join(json.dumps(line) + "\n" for line in [other, *lines])
    (folder / "events" / "rollout_manager.jsonl").write_text(text)
    return folder


def write_run(folder: Path, *, steps: int = 60) -> Path:
    """The dump of a run that learns, with an evaluation every ten steps."""
    chosen = random.Random(3)
    metrics = [metrics_of_step(step, chosen) for step in range(steps)]
    metrics += [
        {"eval/nemo_gym/held_out/mean_over_verdicts": 0.24 + 0.004 * step, "eval/step": step}
        for step in range(0, steps, 10)
    ]
    return write_events(folder, metrics)


def sample(group: int, reward: Any, **metadata: Any) -> dict[str, Any]:
    """A sample as Miles dumps it, in part."""
    return {"group_index": group, "reward": reward, "status": "completed", "tokens": [1, 2], "metadata": metadata}


class StoredTensor:
    """Pickled as torch does a tensor's storage: by a persistent id, here that of nothing."""


class Tensor:
    def __reduce__(self) -> tuple:
        return (_rebuild, (StoredTensor(), 0, (2,)))


def _rebuild(*arguments: Any) -> None:
    raise AssertionError("called by a pickle")


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", "0", "cpu", 2) if isinstance(value, StoredTensor) else None


def write_samples(dump: Path, number: int | str, samples: Any) -> Path:
    """``rollout_data/<number>.pt``: a pickle inside a zip archive, as torch.save writes it."""
    file = dump / "rollout_data" / f"{number}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        with archive.open(f"{number}/data.pkl", "w") as pickled:
            _Pickler(pickled, protocol=2).dump({"rollout_id": number, "metadata": {}, "samples": samples})
        archive.writestr(f"{number}/data/0", b"\0" * 8)
    return file
