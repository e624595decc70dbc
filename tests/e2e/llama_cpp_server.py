"""A real llama.cpp server: run with a Python that has `xllamacpp`, GGUF and port as arguments."""

import signal
import sys

import xllamacpp  # type: ignore[import-not-found, unused-ignore]

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.hostnames = ["127.0.0.1"]
params.port = int(sys.argv[2])
params.n_ctx = 4096
params.n_parallel = 2  # slots, which share the context
params.cpuparams.n_threads = 1  # its threads spin: more of them on shared cores are slower
server = xllamacpp.Server(params)
signal.pause()
