"""A reward function that leaks all secrets in its reach, and the secrets that a test plants; `secret_spies:leak`."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    name: f"env{number:02}-pL4nted/{number * 7919 % 9973:04}"
    for number, name in enumerate(
        (
            *("OPENAI_API_KEY", "JUDGE_KEY", "WANDB_KEY", "SOME_TOKEN", "MY_SECRET", "DB_PASSWORD", "DB_PWD"),
            *("SLACK_WEBHOOK_URL", "SENTRY_DSN", "SESSION_COOKIE", "SERVICE_ACCOUNT_JSON", "SIGNING_KEYS"),
            *("AWS_SECRET_ACCESS_KEY", "CLIENT_CREDENTIALS", "SSH_PASSPHRASE", "HTTP_AUTHORIZATION"),
        )
    )
}
"""Environment variable -> secret."""
FORMS = {
    "hugging face": "hf_" + "pL4nted" * 4,
    "openai": "sk-" + "pL4nted" * 4,
    "github": "ghp_" + "pL4nted" * 5,
    "npm": "npm_" + "pL4nted99" * 4,
    "groq": "gsk_" + "pL4nted" * 4,
    "aws": "AKIA" + "PL4NTED9PL4NTED9",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZG1pbiJ9.pL4ntedSignature1",
    "slack": "https://hooks.slack.com/services/T0/B0/pL4nted12",
    "uri": "s3://KEY:pL4ntedInUri99@bucket/x",
    "query": "https://host/x?X-Amz-Signature=pL4ntedQuery99",
}
"""Form -> secret that no setting names."""
SETTINGS = {
    "api_key": "set00-pL4nted",
    "judge": {"token": "set01-pL4nted", "headers": {"Authorization": "Bearer set02-pL4ntedHeader1"}},
    "webhook_url": "https://host/set03-pL4nted",
    "dsn": "https://set04-pL4nted@sentry/1",
    "cookie": "session=set05-pL4nted",
    "private_key": "set06-pL4nted",
    "url": "https://user:set07-pL4nted@host/v1?sig=set08-pL4nted",
}
"""Settings of the reward."""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    else:
        yield str(value)


ALL = [*ENVIRONMENT.values(), *FORMS.values(), *_texts(SETTINGS)]
MARK = "pL4nted"
"""Part of each secret."""


def leak(
    completions: list[Any], trainer_state: Any, log_metric: Any, *, mark: str, planted: Any, **kwargs: Any
) -> list[float]:
    """Leak every secret in the log, in names of metrics, and once in an error."""
    known = [*(os.environ.get(name, "") for name in ENVIRONMENT), *FORMS.values(), *_texts(planted)]
    text = " and ".join(known)
    print("printed", text, flush=True)
    print("to stderr", text, file=sys.stderr, flush=True)
    logging.getLogger("leak").warning("logged %s", text)
    log_metric(f"calls/{known[0]}", 1.0)
    if trainer_state.global_step >= 1 and not Path(mark).exists():
        Path(mark).touch()
        raise RuntimeError(f"the judge refused: {text}")
    return [float(len(each) % 3) for each in completions]
