"""Any other client library: ask for an endpoint, call it your way, and let the block tell how it went."""

import json
import urllib.error
import urllib.request

from _fleet import fleet

import gpuroute

with fleet() as pool, gpuroute.Router.from_env() as router:
    body = json.dumps({"model": pool, "prompt": "2 + 2 =", "max_tokens": 4}).encode()
    for _ in range(4):
        with router.attempt(pool, tokens=len(body) // 4) as attempt:
            request = urllib.request.Request(
                f"{attempt.url}/v1/completions", data=body, headers={"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    attempt.first_token()
                    answer = json.load(response)
            except urllib.error.HTTPError as error:
                if error.code in {429, 503}:
                    attempt.overloaded()
                raise
            print(f"{attempt.endpoint.id} said{answer['choices'][0]['text']}")
