"""`polar engine serve`: the embedded engine in the foreground."""

from typing import Literal

from polar.engines.embedded import serve
from polar.errors import UsageError

EXTRA = ("torch", "transformers", "accelerate", "gguf")


def serve_command(
    model: str,
    *,
    host: str,
    port: int,
    max_model_len: int | None,
    dtype: Literal["float32", "bfloat16"],
    max_num_seqs: int,
    kv_cache_gib: float,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        serve(
            model,
            host=host,
            port=port,
            max_model_len=max_model_len,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
        )
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise UsageError(f"the embedded engine needs {error.name}: pip install 'polar-rollout[engine]'") from None
