"""Any generated stub: it takes a routed channel as it takes a plain one. This one: pip install 'tritonclient[grpc]'."""

import grpc
from _grpc_fleet import fleet
from tritonclient.grpc import service_pb2, service_pb2_grpc

import gpuroute
import gpuroute.grpc


def ask(model: str, text: str, max_tokens: int = 8) -> service_pb2.ModelInferRequest:
    """A KServe v2 request."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["max_tokens"].int64_param = max_tokens
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(text.encode())
    return request


with fleet() as pool, gpuroute.Router.from_env() as router, gpuroute.grpc.channel(router, pool) as channel:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    # The timeout spans all attempts; UNAVAILABLE and a full queue are tried elsewhere before you see them.
    answer = stub.ModelInfer(ask(pool, "Name a river."), timeout=10)
    print(answer.raw_output_contents[0][4:].decode())

    # A session stays on one endpoint by a key, in the metadata or for a block.
    with gpuroute.grpc.options(key="session-7"):
        futures = [stub.ModelInfer.future(ask(pool, f"Turn {n}.")) for n in range(3)]
    print([future.result(timeout=10).model_name for future in futures])

    try:
        stub.ModelInfer(ask(pool, "Too long an answer, please.", max_tokens=1_000_000), timeout=10)
    except grpc.RpcError as error:
        print(f"{error.code().name}, not retried: it is the caller's mistake")
