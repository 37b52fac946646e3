"""A model for Triton that answers with a stream: the words of its input, one response each."""

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
            for word in text.split():
                tensor = pb.Tensor("text_output", np.array([word], dtype=object))
                sender.send(pb.InferenceResponse(output_tensors=[tensor]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
