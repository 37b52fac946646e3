"""TF Serving's messages and stubs, shaped as its package generates them, from field facts: that package needs TensorFlow.

With `tensorflow-serving-api` installed, its own are used instead. Run as a program this tests exactly that.
"""

from __future__ import annotations

import sys
from concurrent import futures
from typing import Any

import grpc

STRING, AVAILABLE = 7, 30


def _made() -> dict[str, Any]:
    """The message classes that are needed here, by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"string": 9, "bytes": 12, "int64": 3, "int32": 5}
    file = descriptor_pb2.FileDescriptorProto(name="served.proto", package="tensorflow.serving", syntax="proto3")

    def message(name: str, *fields: tuple[int, str, str, bool]) -> Any:
        made = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            added = made.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind in kinds:
                added.type = kinds[kind]
            else:
                added.type, added.type_name = 11, f".tensorflow.serving.{kind}"
        return made

    def tensors(made: Any) -> None:
        entry = made.nested_type.add(name=f"{made.field[-1].name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=9)
        entry.field.add(name="value", number=2, label=1, type=11, type_name=".tensorflow.serving.TensorProto")
        made.field[-1].type_name = f".tensorflow.serving.{made.name}.{entry.name}"

    message("ModelSpec", (1, "name", "string", False), (3, "signature_name", "string", False))
    message("TensorProto", (1, "dtype", "int32", False), (8, "string_val", "bytes", True))
    request = message("PredictRequest", (1, "model_spec", "ModelSpec", False), (2, "inputs", "TensorProto", True))
    tensors(request)
    response = message("PredictResponse", (1, "outputs", "TensorProto", True))
    tensors(response)
    message("GetModelStatusRequest", (1, "model_spec", "ModelSpec", False))
    message("ModelVersionStatus", (1, "version", "int64", False), (2, "state", "int32", False))
    message("GetModelStatusResponse", (1, "model_version_status", "ModelVersionStatus", True))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    classes = message_factory.GetMessageClassesForFiles(["served.proto"], pool)
    return {name.rpartition(".")[2]: made for name, made in classes.items()}


class _Stub:
    """A stub of one method, as grpcio-tools writes them."""

    def __init__(self, service: str, method: str, request: Any, response: Any) -> None:
        self.path, self.name, self.request, self.response = (
            f"/tensorflow.serving.{service}/{method}",
            method,
            request,
            response,
        )

    def __call__(self, channel: Any) -> Any:
        made = channel.unary_unary(
            self.path,
            request_serializer=self.request.SerializeToString,
            response_deserializer=self.response.FromString,
            _registered_method=True,
        )
        return type("Stub", (), {self.name: staticmethod(made)})


try:
    from tensorflow_serving.apis import (
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )
except ImportError:
    by_name = _made()
    PredictRequest, PredictResponse = by_name["PredictRequest"], by_name["PredictResponse"]
    GetModelStatusRequest, GetModelStatusResponse = by_name["GetModelStatusRequest"], by_name["GetModelStatusResponse"]
    PredictionServiceStub: Any = _Stub("PredictionService", "Predict", PredictRequest, PredictResponse)
    ModelServiceStub: Any = _Stub("ModelService", "GetModelStatus", GetModelStatusRequest, GetModelStatusResponse)
else:
    PredictRequest, PredictResponse = predict_pb2.PredictRequest, predict_pb2.PredictResponse
    GetModelStatusRequest = get_model_status_pb2.GetModelStatusRequest
    GetModelStatusResponse = get_model_status_pb2.GetModelStatusResponse
    PredictionServiceStub = prediction_service_pb2_grpc.PredictionServiceStub
    ModelServiceStub = model_service_pb2_grpc.ModelServiceStub


def asked(text: bytes, model: str = "echo") -> Any:
    request = PredictRequest()
    request.model_spec.name = model
    request.inputs["text"].dtype = STRING
    request.inputs["text"].string_val.append(text)
    return request


class Served:
    """A server with one model. `fail_next`: (status, details) to give first."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.state = AVAILABLE
        self.fail_next: list[tuple[grpc.StatusCode, str]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        handler = grpc.unary_unary_rpc_method_handler
        predict = handler(self.predict, PredictRequest.FromString, PredictResponse.SerializeToString)
        status = handler(self.status, GetModelStatusRequest.FromString, GetModelStatusResponse.SerializeToString)
        for service, methods in (
            ("PredictionService", {"Predict": predict}),
            ("ModelService", {"GetModelStatus": status}),
        ):
            made = grpc.method_handlers_generic_handler(f"tensorflow.serving.{service}", methods)
            self._server.add_generic_rpc_handlers((made,))
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def predict(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.fail_next:
            context.abort(*self.fail_next.pop(0))
        response = PredictResponse()
        response.outputs["text"].CopyFrom(request.inputs["text"])
        response.outputs["server"].string_val.append(self.name)
        return response

    def status(self, request: Any, context: grpc.ServicerContext) -> Any:
        if request.model_spec.name != "echo":
            context.abort(grpc.StatusCode.NOT_FOUND, "Could not find any versions of model")
        response = GetModelStatusResponse()
        version = response.model_version_status.add()
        version.version, version.state = 1, self.state
        return response

    def stop(self) -> None:
        self._server.stop(None).wait(60)


def answered_by(response: Any) -> bytes:
    name: bytes = response.outputs["server"].string_val[0]
    return name


def main() -> None:
    """Fails unless the real package's own stubs are routed, in this interpreter."""
    import gpuroute
    import gpuroute.grpc
    from gpuroute.grpc import health

    assert "tensorflow_serving" in sys.modules, "the package tensorflow-serving-api is not installed here"
    servers = [Served("s0"), Served("s1")]
    router = gpuroute.Router(endpoints={"p": [server.url for server in servers]}, policy="prefix")
    with gpuroute.grpc.channel(router, "p") as channel:
        stub = PredictionServiceStub(channel)
        homes = [{answered_by(stub.Predict(asked(b"%d " % n * 900), timeout=30)) for _ in range(3)} for n in range(48)]
        assert all(len(home) == 1 for home in homes), homes
        assert set.union(*homes) == {b"s0", b"s1"}
        assert health.ask(channel, health.tf_serving_ready("echo"), timeout=30)
        request = GetModelStatusRequest()
        request.model_spec.name = "echo"
        assert ModelServiceStub(channel).GetModelStatus(request, timeout=30).model_version_status[0].state == AVAILABLE
    for server in servers:
        server.stop()
    print("routed")


if __name__ == "__main__":
    main()
