"""Alerts to a chat: a message to each webhook that the environment names."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it names each address that it asks

# Environment variable with the webhook's address -> the body that the service takes.
WEBHOOKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "NOTIFY_SLACK_URL": lambda text: {"text": text},  # and Mattermost
    "NOTIFY_DISCORD_URL": lambda text: {"content": text[:2000]},
    "NOTIFY_LARK_URL": lambda text: {"msg_type": "text", "content": {"text": text}},
    "NOTIFY_DINGTALK_URL": lambda text: {"msgtype": "text", "text": {"content": text}},
    "NOTIFY_WECOM_URL": lambda text: {"msgtype": "text", "text": {"content": text}},
}
TIMEOUT_S = 10.0
QUIET_STEPS = 10  # steps without an alert on a metric before another one is news


class WebhookNotifier:
    """Sends alerts beside the training, which never waits for it but at its end, 10 s at most.

    An alert that lasts is sent once, as it begins. SwanLab's own notification plugins only speak at a run's end, and
    write the address, which is a secret, into the log when a delivery fails.
    """

    def __init__(self, run: str, environment: Mapping[str, str]) -> None:
        self.targets = {name: url for name in WEBHOOKS if (url := environment.get(name, "").strip())}
        self._run = run
        self._last: dict[str, int] = {}
        self._sending: list[threading.Thread] = []

    def alert(self, step: int, messages: Mapping[str, str]) -> None:
        """``messages``: one by metric, for all that is out of its range at ``step``."""
        news = [text for name, text in messages.items() if step - self._last.get(name, -math.inf) > QUIET_STEPS]
        self._last |= dict.fromkeys(messages, step)
        if not news:
            return
        text = f"MiniResearcher, {self._run}: " + "; ".join(news)
        self._sending = [thread for thread in self._sending if thread.is_alive()]
        for target in self.targets:
            thread = threading.Thread(target=self._send, args=(target, text), daemon=True)
            thread.start()
            self._sending.append(thread)

    def close(self) -> None:
        """What is on its way gets there, or its time is up."""
        deadline = time.monotonic() + TIMEOUT_S
        for thread in self._sending:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _send(self, target: str, text: str) -> None:
        try:
            reply = httpx.post(self.targets[target], json=WEBHOOKS[target](text), timeout=TIMEOUT_S)
            why = _refusal(reply)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = type(error).__name__  # its text may hold the address
        if why:
            log.warning(f"{target}: an alert was not delivered ({why})")


def _refusal(reply: httpx.Response) -> str:
    """Why the service didn't take it, "" if it did. Some say no with status 200 and a code of their own."""
    if not reply.is_success:
        return f"status {reply.status_code}"
    try:
        body = reply.json()
    except ValueError:  # Slack answers "ok"
        return ""
    code = (body.get("errcode") or body.get("code")) if isinstance(body, dict) else 0
    return f"code {code}" if code else ""
