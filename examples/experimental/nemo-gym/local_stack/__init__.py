"""A real NeMo Gym on this machine: no docker, no GPU, no API key.

``install`` makes NeMo Gym's environment and, through ``build_tasks``, the tasks; ``server`` starts and stops NeMo Gym
under ``keeper``; ``bubblewrap`` is the sandbox provider that NeMo Gym loads. Run it from the example's folder::

    python -m local_stack serve
"""
