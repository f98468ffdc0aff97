"""Stand-in for the shell layer of Miles: notes commands and starts nothing."""

COMMANDS: list[str] = []


def exec_command_cpu(cmd: str, capture_output: bool = False) -> str | None:
    COMMANDS.append(cmd)
    return "0" if capture_output else None


exec_command_gpu = exec_command_multi_node = exec_command_cpu
