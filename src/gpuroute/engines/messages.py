"""Prompts in the protobuf requests of inference servers, read by field numbers, without their packages.

As in `prompts`, only what a prefix cache sees matters: the model, then the text or the token ids. A request that is not
known, or not well formed, gives None, which means no affinity. Nothing raises, nothing is copied but the prompt's head:
5 MB of image tensors beside the text cost microseconds.

Field numbers are those of the published .proto files: KServe v2 and Triton (`ModelInferRequest`), TensorFlow Serving
(`PredictRequest`), and the Generate requests of the services of vLLM, SGLang and TensorRT-LLM. Others: `fields_reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuroute.core.prefix import MAX_BYTES, Prompt
from gpuroute.core.wire import Message, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Reader = Callable[[Message], Prompt | None]

TEXT_INPUTS = frozenset({"text_input", "input_text", "prompt", "prompts", "text", "query", "inputs", "messages"})
"""Names of tensors that hold a prompt, in lower case: Triton's LLM backends, ensembles, common habits."""
ID_INPUTS = frozenset({"input_ids", "prompt_token_ids"})

_FIELD = "\x1f"
_CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint that are not its last


def read_message(method: str, request: bytes) -> Prompt | None:
    """The prompt in a serialized request to `/package.Service/Method`; None if there is none to be read."""
    reader = _READERS.get(method)
    return None if reader is None else _read(reader, request)


def fields_reader(paths: Mapping[str, Sequence[int]]) -> Callable[[str, bytes], Prompt | None]:
    """A reader that also knows other methods: each with the field numbers that lead to its prompt (string or bytes).

    `fields_reader({"/my.Engine/Generate": (2, 1)})` reads field 1 of the message in field 2. Known methods stay known.
    """
    readers = {method: _at(tuple(path)) for method, path in paths.items()}

    def read(method: str, request: bytes) -> Prompt | None:
        reader = readers.get(method) or _READERS.get(method)
        return None if reader is None else _read(reader, request)

    return read


def _read(reader: Reader, request: bytes) -> Prompt | None:
    if not isinstance(request, bytes):
        return None
    try:
        return reader(Message(memoryview(request)))
    except WireError:
        return None


def _at(path: tuple[int, ...]) -> Reader:
    def read(message: Message) -> Prompt | None:
        for number in path[:-1]:
            message = message.message(number)
        return _prompt("", message.all(path[-1]))

    return read


def _prompt(model: str, parts: Sequence[bytes], tokens: int = 0, key: str = "") -> Prompt | None:
    size = sum(map(len, parts))
    if not size and not key:
        return None
    canonical = bytearray(model.encode() + _FIELD.encode())
    for part in parts:
        canonical += part[: MAX_BYTES - len(canonical)]
    return Prompt(bytes(canonical), tokens or size // 4, model, key=key)


def _infer(message: Message) -> Prompt | None:
    """KServe v2: the first tensor of a known name; its contents inline, or in `raw_input_contents` at its place."""
    raw, model, key = message.all(7), message.text(1), _sequence(message)
    for place, tensor in enumerate(message.messages(5)):
        name, kind = tensor.text(1).lower(), tensor.text(2)
        if kind == "BYTES" and name in TEXT_INPUTS:
            texts = _elements(raw[place]) if place < len(raw) else tensor.message(5).all(8)
            return _prompt(model, texts, key=key)
        if name in ID_INPUTS and place < len(raw):
            width = 8 if kind.endswith("64") else 4
            return _prompt(model, [raw[place]], len(raw[place]) // width, key)
    return _prompt(model, (), key=key)


def _sequence(message: Message) -> str:
    """Triton keeps the state of a sequence on one server: its id is an affinity key."""
    for entry in message.messages(4):
        if entry.text(1) == "sequence_id":
            value = entry.message(2)
            number = value.text(3) or value.integer(2)
            return f"sequence {message.text(1)} {number}" if number else ""
    return ""


def _elements(raw: bytes) -> list[bytes]:
    """The strings of a BYTES tensor: each after its length, four bytes, little endian."""
    found, at, kept = [], 0, 0
    while at + 4 <= len(raw) and kept < MAX_BYTES:
        size = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        found.append(raw[at : at + size])
        at += size
        kept += size
    return found


def _predict(message: Message) -> Prompt | None:
    """TF Serving: the string tensor of a known name, else the only one there is."""
    model = message.message(1).text(1)
    texts = {entry.text(1).lower(): strings for entry in message.messages(2) if (strings := entry.message(2).all(8))}
    name = next((name for name in texts if name in TEXT_INPUTS), None)
    if name is None and len(texts) == 1:
        name = next(iter(texts))
    return None if name is None else _prompt(model, texts[name])


def _generate(message: Message) -> Prompt | None:
    """SGLang, TensorRT-LLM: token ids (packed varints as they are: equal prefixes are equal bytes), else their text."""
    tokenized = message.message(2)
    ids = tokenized.all(2)
    if ids:
        return _prompt("", ids, sum(len(bytes(part).translate(None, _CONTINUED)) for part in ids))
    return _prompt("", tokenized.all(1))


def _generate_text(message: Message) -> Prompt | None:
    """vLLM: like SGLang's, or plain text in field 3."""
    return _generate(message) or _prompt("", message.all(3))


_READERS: dict[str, Reader] = {
    "/inference.GRPCInferenceService/ModelInfer": _infer,
    "/tensorflow.serving.PredictionService/Predict": _predict,
    "/vllm.grpc.engine.VllmEngine/Generate": _generate_text,
    "/vllm.grpc.scheduler.VllmScheduler/Generate": _generate_text,
    "/sglang.grpc.scheduler.SglangScheduler/Generate": _generate,
    "/trtllm.TrtllmService/Generate": _generate,
}
