"""The OpenAI SDK, routed: `wrap` is the only line that a program without gpuroute does not have."""

import openai
from _fleet import fleet

import gpuroute

with fleet() as pool, gpuroute.Router.from_env() as router:
    client = gpuroute.wrap(openai.OpenAI(base_url=f"http://{pool}/v1", api_key="-"), router)

    answer = client.chat.completions.create(
        model=pool, messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=12
    )
    print("whole:  ", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=pool,
        messages=[{"role": "user", "content": "And why is grass green?"}],
        max_tokens=12,
        stream=True,
        extra_headers={"x-gpuroute-timeout": "10s", "x-gpuroute-key": "user-4711"},  # for gpuroute, not for the engine
    )
    print("stream: ", end="")
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    decision = stream.response.extensions["gpuroute"]
    print(f"\nserved by {decision['endpoint']}: {decision['reason']}")
