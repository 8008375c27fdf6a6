"""Lines for whoever watches the run."""


def progress(line: str) -> None:
    """Print one line, at once."""
    print(f"[megatron_dynbatch] {line}", flush=True)
