"""`python -m polar.engines.embedded MODEL`: the engine as a process of its own."""

import argparse
import sys

from polar.engines.embedded import serve
from polar.errors import UsageError


def main() -> None:
    """Serve what the command line names; exits 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m polar.engines.embedded", description=__doc__)
    parser.add_argument("model", help="laptop, smollm2, or a Hugging Face model directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and reply together")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--served-model-name", help="default: MODEL as given")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests that generate at the same time")
    parser.add_argument("--kv-cache-gib", type=float, default=2.0, help="memory for keys and values")
    arguments = vars(parser.parse_args())
    try:
        serve(arguments.pop("model"), **arguments)
    except UsageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
