"""A model for Triton: doubles its input after 20 ms, one batch at a time."""

import time

import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.02)
        doubled = (pb.get_input_tensor_by_name(request, "x").as_numpy() * 2 for request in requests)
        return [pb.InferenceResponse(output_tensors=[pb.Tensor("y", array)]) for array in doubled]
