"""Program without grpo_ray: send a problem to an OpenAI-compatible endpoint, and retry a wrong answer once.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python example_program.py <<< '{"prompt": [...], "solution": "5"}'

`rollout_examples.external_program` runs it for each row.
"""

import json
import os
import sys
import urllib.request

SECONDS = 3600
"""Timeout of a request. An answer may wait until all other programs of the step have made their next request."""


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the policy's answer as a message, with the finish reason as `ended`."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        choice = json.load(response)["choices"][0]
    return {"role": "assistant", "content": choice["message"]["content"], "ended": choice["finish_reason"]}


def main(problem: dict) -> None:
    """Let the policy answer once more if its first answer is not the solution and was not cut off."""
    answer = ask(problem["prompt"])
    if answer.pop("ended") == "stop" and f"\\boxed{{{problem['solution'].strip('$')}}}" not in answer["content"]:
        ask([*problem["prompt"], answer, {"role": "user", "content": "Wrong. Try again."}])


if __name__ == "__main__":
    main(json.load(sys.stdin))
