"""Triton's own client (pip install 'tritonclient[grpc]'): one line routes it, call by call."""

import numpy as np
import tritonclient.grpc as triton
from _grpc_fleet import fleet

import gpuroute

with fleet() as pool, gpuroute.Router.from_env() as router:
    client = gpuroute.wrap(triton.InferenceServerClient("any:8001"), router, pool=pool)
    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"Why is the sky blue?"], dtype=object))
    for _ in range(4):
        result = client.infer(pool, [prompt], parameters={"max_tokens": 8}, client_timeout=10)
        print(result.as_numpy("text_output")[0].decode())
    for endpoint in router.snapshot().pools[pool].endpoints:
        print(f"{endpoint.id} served {endpoint.served}")
    client.close()
