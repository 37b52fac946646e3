"""The Anthropic SDK, asynchronous, against engines that speak /v1/messages (vLLM and SGLang do). pip install anthropic"""

import asyncio

import anthropic
from _fleet import fleet

import gpuroute


async def main(pool: str) -> None:
    async with gpuroute.Router.from_env() as router:
        client = gpuroute.wrap(anthropic.AsyncAnthropic(base_url=f"http://{pool}", api_key="-"), router)
        async with client.messages.stream(
            model=pool, max_tokens=12, messages=[{"role": "user", "content": "Name three rivers."}]
        ) as stream:
            async for text in stream.text_stream:
                print(text, end="", flush=True)
        usage = (await stream.get_final_message()).usage
        print(f"\n{usage.input_tokens} tokens in, {usage.output_tokens} out")
        await client.close()


with fleet() as pool:
    asyncio.run(main(pool))
