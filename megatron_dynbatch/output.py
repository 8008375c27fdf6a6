"""The one way to say something to whoever watches a run."""


def progress(line: str) -> None:
    """Print one line, at once."""
    print(f"[megatron_dynbatch] {line}", flush=True)
