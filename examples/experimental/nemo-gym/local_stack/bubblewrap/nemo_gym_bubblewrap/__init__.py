"""A NeMo Gym sandbox provider on bubblewrap.

``provider`` implements ``nemo_gym.sandbox.providers.base.SandboxProvider`` and runs in NeMo Gym's workers;
``namespace`` builds the bwrap command line, ``seccomp`` the filter of system calls; ``init`` is PID 1 inside each sandbox.
"""
