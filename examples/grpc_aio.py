"""The asyncio channel: a stream of tokens, and many calls at once. One channel serves any number of event loops.

The stub comes with tritonclient: pip install 'tritonclient[grpc]'.
"""

import asyncio

from _grpc_fleet import fleet
from tritonclient.grpc import service_pb2, service_pb2_grpc

import gpuroute
import gpuroute.grpc.aio


def ask(model: str, text: str) -> service_pb2.ModelInferRequest:
    """A KServe v2 request for eight tokens."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["max_tokens"].int64_param = 8
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return request


async def main(pool: str) -> None:
    """Stream one answer, then ask sixteen questions at once."""
    async with gpuroute.Router.from_env() as router, gpuroute.grpc.aio.channel(router, pool) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        async for part in stub.ModelStreamInfer(iter([ask(pool, "Name three rivers.")]), timeout=20):
            print(part.infer_response.raw_output_contents[0][4:].decode(), end="", flush=True)
        answers = await asyncio.gather(*(stub.ModelInfer(ask(pool, f"Question {n}")) for n in range(16)))
        served = {endpoint.id: endpoint.served for endpoint in router.snapshot().pools[pool].endpoints}
        print(f"\n{len(answers)} answers; calls by endpoint: {served}")


with fleet() as pool:
    asyncio.run(main(pool))
