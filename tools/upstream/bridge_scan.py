"""What slice 1 puts into Miles' eval_nemogym_via_api.py, until slice 3 replaces that file: one call, one contract."""

import time

from nemogym_agent_function import run_episode


async def _run_one(args, instance: dict) -> dict:
    """One episode as in training: without a verdict it is an error, not a reward of 0.0."""
    started = time.monotonic()
    outcome = await run_episode(
        instance,
        request_kwargs={"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens},
        server=args.nemo_gym_url,
        timeout_s=args.timeout,
        policy_base_url=None if args.golden else args.policy_base_url,
        policy_api_key=None if args.golden else args.policy_api_key,
        golden=args.golden,
    )
    error = None if outcome.reward is not None else f"{outcome.exit_status}: {outcome.detail}"
    reward = outcome.reward or 0.0
    status = "OK " if error is None and (not args.golden or reward == 1.0) else "FAIL"
    said = f"  error={error}" if error else ""
    instance_id = instance.get("instance_id", "?")
    print(f"[{status}] {instance_id}  reward={reward}  {time.monotonic() - started:.0f}s{said}", flush=True)
    return {"instance_id": instance_id, "reward": reward, "error": error, "eval_report": outcome.eval_report}
