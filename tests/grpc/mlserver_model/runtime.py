"""A model for MLServer: gives its inputs back, and says which server it is."""

import os

from mlserver import MLModel
from mlserver.types import InferenceResponse, ResponseOutput


class Echo(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload):
        outputs = [ResponseOutput(name=i.name, shape=i.shape, datatype=i.datatype, data=i.data) for i in payload.inputs]
        name = ResponseOutput(name="server", shape=[1], datatype="BYTES", data=[os.environ["SERVER_NAME"]])
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=[*outputs, name])
